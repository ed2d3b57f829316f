"""The fields of a stream: how a source is cut into tasks, as they are written in a YAML file."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from coda_prompt.errors import bad_field

CLASS_RULES = ("tasks", "classes_per_task", "class_lists")
DOMAIN_RULES = ("domains_per_task", "domain_lists")


class StreamOptions(BaseModel):
    """How the data is cut into tasks.

    Classes are cut into groups by one of `tasks`, `classes_per_task` and `class_lists`, domains by
    `domains_per_task` or `domain_lists`. A task has the images of one class group, of one domain
    group, or, with both rules, of one class group in one domain group. The other fields leave out
    images or move them to other tasks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int | None = Field(default=None, ge=1)
    """Number of class groups of equal size; the first get the remaining classes."""
    classes_per_task: int | None = Field(default=None, ge=1)
    """Classes of each group; the last may have fewer."""
    class_lists: tuple[tuple[str, ...], ...] | None = None
    """Class names of each group, in this order in every trial."""
    order_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Draw the class order in every trial with NumPy's `permutation` after this seed, as the
    protocols named B0-Inc do (they use 1993). Default: the order of the trial's own seed."""
    base_classes: int | None = Field(default=None, ge=1)
    """Classes of the first group, instead of its equal share."""
    random_sizes: bool = False
    """Draw the number of classes of each group; none is empty. Needs `tasks`."""
    domains_per_task: int | None = Field(default=None, ge=1)
    """Domains of each domain group; the last may have fewer."""
    domain_lists: tuple[tuple[str, ...], ...] | None = None
    """Domain names of each domain group, in this order in every trial."""
    remove_domains: int = Field(default=0, ge=0)
    """Domains removed from the training images of each task (the paper's dual shift)."""
    train_images: int | None = Field(default=None, ge=1)
    """Random images of each class to train on, drawn anew in each trial. Default: all."""
    test_images: int | None = Field(default=None, ge=1)
    """Random images of each class to test on, drawn anew in each trial. Default: all."""
    shots: int | None = Field(default=None, ge=1)
    """Random images of each class to train on in every task but the first. Default: all."""
    imbalance: float = Field(default=1, ge=1)
    """Images of the largest class / images of the smallest; those between fall exponentially, in
    a random order of the classes."""
    blur: float = Field(default=0, ge=0, le=1)
    """Share of the images of blurry classes that are spread evenly over all tasks."""
    disjoint: float = Field(default=0.5, ge=0, le=1)
    """Share of the classes that are not blurry; matters with `blur` only."""
    repeat: float = Field(default=0, ge=0, le=1)
    """Probability that a class returns in each later task. Its images are divided among its tasks,
    so no image is learned twice."""
    chunk: int | None = Field(default=None, ge=1)
    """Cut each task into tasks of at most this number of random images (online learning). Default:
    all images of a task arrive at once."""
    budget: int | None = Field(default=None, ge=1)
    """Optimizer steps after which the training of a task ends. Default: all epochs."""
    validation: bool = False
    """Evaluate on a fifth of the training images; test images are not read."""

    @field_validator("class_lists", "domain_lists", mode="before")
    @classmethod
    def _lists_of_names(cls, value: Any) -> Any:
        if isinstance(value, str) or any(isinstance(names, str) for names in value or ()):
            raise ValueError("needs a list of class names for each task, not a string")
        return value

    @model_validator(mode="after")
    def _rules_fit_together(self) -> StreamOptions:
        by_class = [name for name in CLASS_RULES if getattr(self, name) is not None]
        by_domain = [name for name in DOMAIN_RULES if getattr(self, name) is not None]
        if len(by_class) > 1 or not (by_class or by_domain):
            rule = "give exactly one of tasks, classes_per_task and class_lists"
            raise ValueError(f"{rule}, or one of domains_per_task and domain_lists")
        if len(by_domain) > 1:
            raise ValueError("give only one of domains_per_task and domain_lists")
        if by_domain and self.remove_domains:
            raise ValueError("remove_domains cannot be combined with tasks of single domains")
        if self.class_lists is not None and (self.base_classes or self.random_sizes):
            raise ValueError("class_lists cannot be combined with base_classes and random_sizes")
        if self.random_sizes and self.tasks is None:
            raise ValueError("random_sizes needs the number of tasks")
        if self.class_lists is not None and self.order_seed is not None:
            raise ValueError("class_lists name the order; leave out order_seed")
        if self.base_classes is not None and self.random_sizes:
            raise ValueError("give only one of base_classes and random_sizes")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: Any) -> dict[str, Any]:
        """Leave out fields that are not set, most of which belong to other kinds of streams."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if getattr(self, name) != fields[name].default
        }

    @property
    def by_domain(self) -> bool:
        """Whether tasks differ in their domains."""
        return self.domains_per_task is not None or self.domain_lists is not None

    @property
    def number_of_tasks(self) -> int | None:
        """Number of tasks, where it does not depend on the data."""
        return None if self.by_domain or self.chunk is not None else self.tasks

    @classmethod
    def of(cls, **fields: Any) -> StreamOptions:
        """Validate fields.

        Raises:
            BadOption: A value is out of range, or fields contradict each other.
            UnknownName: There is no such field.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise bad_field("the stream", error, {"": cls.model_fields}, whole="tasks") from error

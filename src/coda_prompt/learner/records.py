"""What a model folder says about a model beside its arrays: lessons, edits, classes, encoder."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from coda_prompt.console import class_name
from coda_prompt.errors import CorruptFile
from coda_prompt.storage.files import FileSchema

FORMAT = 1

Count = Annotated[int, Field(ge=0, le=10**12)]
Text = Annotated[str, Field(max_length=4096)]
"""Anything but class names and what mentions them."""


class WatchedAccuracy(FileSchema):
    """Accuracy of older classes before and after a lesson, on watched images."""

    classes: Count
    """Number of older classes with watched images."""
    images: Count
    """Number of watched images."""
    before: float
    """Accuracy before the lesson."""
    after: float
    """Accuracy after the lesson."""


class EditRecord(FileSchema):
    """A change of what was taught."""

    date: Text
    """Time of the edit, UTC."""
    after_lesson: Count
    """Number of lessons before the edit."""
    what: str
    """The edit in words."""
    names: list[str] = Field(default_factory=list)
    """Class names before the edit that `what` mentions."""
    into: str | None = None
    """The name they have since, if the edit renamed or merged them."""


class TaskRecord(FileSchema):
    """The outcome of one lesson."""

    date: Text
    """Time of the lesson, UTC."""
    new: list[str]
    """New classes, in the order of their rows."""
    continued: list[str]
    """Known classes that got more images."""
    images: dict[str, Count]
    """Number of images per class, held-out ones included."""
    held_out: Count
    """Number of held-out images."""
    drawings: float | None = Field(None, ge=0, le=1)
    """Share of drawings among sampled images; None if it is not known."""
    accuracy: float | None
    """Accuracy on held-out images among all classes; None if none were held out."""
    accuracy_own: float | None
    """The same among the classes of the lesson."""
    calibration_error: float | None
    """Expected calibration error on held-out images."""
    temperature: float = Field(ge=1e-6, le=1e6)
    """Temperature fitted on the held-out images of this lesson."""
    fitted_on: Count
    """Number of held-out images the temperature was fitted on."""
    watched: WatchedAccuracy | None = None
    """What the lesson cost the older classes; None if no image was watched."""
    files: Text | None = None
    """Hash of the names, sizes and labels of the files; None if they were no files."""
    predictions: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Held-out images by correct and by predicted class, right after the lesson."""


class Options(FileSchema):
    """What is decided before the first lesson of a model."""

    removable: bool = False
    """Whether a class can be forgotten without a trace."""
    seed: int = Field(0, ge=0, le=2**31)
    """Of random features, held-out images and trained prompts."""
    integers: bool = False
    """Whether the classes are integers, as in `fit(images, [0, 1])`, and not names."""


class BackboneRecord(FileSchema):
    """The encoder a model was learned on."""

    name: Text
    """Name in the catalogue, or of the file."""
    fingerprint: Text
    """Identifies its weights, preprocessing and precision."""
    kind: Literal["drawing", "photograph"] = "photograph"
    """What images it is for."""
    revision: Text | None
    """Commit on the hub; None if it was not downloaded."""
    path: Text | None = None
    """Absolute path of the file; None if it was embedded or downloaded."""


class Description(FileSchema):
    """Everything about a model except its tensors."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    """Version of this format."""
    coda_prompt: Text
    """Version of coda-prompt that wrote it."""
    method: Text
    """Name of the method."""
    options: Options
    """What was decided before the first lesson."""
    backbone: BackboneRecord
    """The encoder."""
    classes: list[str]
    """Class names in the order of their rows."""
    tasks: list[TaskRecord]
    """The lessons."""
    temperature: float = Field(ge=1e-6, le=1e6)
    """Temperature of the probabilities, combined from all lessons."""
    number: Count
    """Number of the version."""
    parent: Count | None = None
    """Number of the version this one was made from."""
    edits: list[EditRecord] = Field(default_factory=list)
    """The edits in order."""

    @model_validator(mode="after")
    def _classes_match_tasks(self) -> Description:
        if [name for task in self.tasks for name in task.new] != self.classes:
            raise ValueError("its classes are not those of its tasks")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("a class is listed twice")
        if any(class_name(name) != name for name in self.classes):
            raise ValueError("a class has an invalid name")
        return self


def checked_description(fields: dict[str, Any] | None, path: object) -> Description:
    """Return a description after checking its fields.

    Raises:
        CorruptFile: They are not those of a model.
    """
    if fields is None:
        raise CorruptFile(path, "is not a model of coda-prompt")
    try:  # as JSON, whose strict types are those of the file
        return Description.model_validate_json(json.dumps(fields))
    except RecursionError as error:
        raise CorruptFile(path, "its description cannot be read") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        reason = first["msg"].removeprefix("Value error, ")
        problem = f"its description is invalid: {field}: {reason}"
        raise CorruptFile(path, problem) from error

"""The contract of a method, and what the families of methods share.

The engine drives a method; a method never touches files, devices or optimizers:

    begin_task(brief)
    prepare(batches)               a statistics pass, if `prepares_on` asks for one
    for stage in stages():         none: nothing trains
        loss(batch) ...            one per step
        end_stage(stage)
    conclude(batches)              a statistics pass, if `concludes_on` asks for one
    fit(features, queries, labels) on all images of the task, if `fits`; before the first stage on
                                   generated data, if there is one. A method whose `task_sums`
                                   returns sums gets them instead: `add_sums(sums)`
    end_task()

State that grows by task is in banks: frozen between tasks, open rows are parameters. Class labels
are rows: the k-th class ever seen has label k.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.errors import BadOption, CorruptFile, InvalidLabels, UnfinishedTask
from coda_prompt.research.methods.bank import Bank, is_loadable
from coda_prompt.research.methods.head import Head
from coda_prompt.research.methods.options import STRICT, check_prompts
from coda_prompt.research.methods.stages import Stage, TrainingBatch
from coda_prompt.research.methods.sums import TaskSums
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import Images, Prefixes, ViT


@dataclass(frozen=True)
class TaskBrief:
    """What a method knows of a task before it learns it."""

    index: int
    """The number of earlier tasks."""
    seed: int
    """The seed of the trial; generators are keyed by it, the task's index and a purpose."""
    classes: tuple[int, ...]
    """Rows of the task's classes, ascending; those not below the number seen are new."""
    labels: Tensor
    """The row of each training image of the task."""
    class_means: Callable[[], Tensor] | None = None
    """Computes the mean feature of each class in `classes` by the method as it is when called; zero
    for a class without images."""

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for one purpose in this task."""
        return keyed_generator(self.seed, self.index, purpose)


class Loss(NamedTuple):
    """The parts of a loss, separate so that micro-batches and processes reduce them correctly."""

    mean: Tensor
    """Per image; averaged over the whole batch."""
    total: Tensor
    """Per image; summed over the whole batch (key losses)."""
    penalty: Tensor
    """A scalar of the parameters alone; added once per step."""

    @classmethod
    def of(cls, per_image: Tensor) -> Loss:
        """A loss that is averaged over the batch, and nothing else."""
        return cls(per_image, per_image.new_zeros(len(per_image)), per_image.new_zeros(()))


class ParameterCount(NamedTuple):
    """Learned parameters as the CODA-Prompt paper counts them: the head without its bias."""

    body: int
    """Prompts with their keys and attention vectors, or the trained network."""
    head_weights: int

    @property
    def trained(self) -> int:
        return self.body + self.head_weights


@pydantic_dataclass(frozen=True, config=STRICT)
class MethodConfig:
    """Options every method has."""

    head_init: Literal["linear", "imprint"] = "linear"
    """How new head rows start: at random, or at the class's mean feature."""


class Method(nn.Module):
    """A continual-learning method. Families override the parts that differ."""

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Public name -> option values: one class may provide several rows of a results table."""
    needs_queries: bool = False
    """Whether it uses queries: the class token of each image after the plain frozen ViT."""
    trains_on: ClassVar[Literal["task", "all"]] = "task"
    """Whether it learns task after task, or all tasks of a stream at once."""
    keeps_images: ClassVar[bool] = False
    """Whether images of past tasks are needed again."""
    closed_form: ClassVar[bool] = False
    """Whether it learns by `fit` alone, without gradients."""
    fits: ClassVar[bool] = False
    """Whether `fit` is called once per task on the features of all its images, un-augmented: before
    the first stage on generated data, or else at the end."""
    prepares_on: ClassVar[Literal["augmented", "plain"] | None] = None
    """The images of the task that `prepare` sees before training; None: there is no such pass."""
    concludes_on: ClassVar[Literal["augmented", "plain"] | None] = None
    """The images of the task that `conclude` sees after training; None: there is no such pass."""
    learning_rate: ClassVar[float] = 1e-3
    """The learning rate of the paper for this family, unless the training settings have one."""
    frozen_backbone: ClassVar[bool] = True
    """Whether the ViT is never changed; if not, the method trains a copy of it."""
    loss_in_parts: ClassVar[bool] = False
    """Whether parts of a batch may be passed to `loss` instead of all of it, by several threads at
    the same time: no image's loss depends on other images, and `loss` changes no state."""
    first_block: int | None = None
    """The block up to which the query's pass and the next one agree, so that it is run once."""

    name: str = ""
    """The method's name in results; `methods.make` sets it."""

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__()
        self.config = config
        self.vit_config = backbone.config
        self.in_task = False
        self.task_rows: tuple[int, ...] = ()
        """Rows of the classes of the task."""
        if self.frozen_backbone:
            self.backbone = backbone.requires_grad_(False)
        self.task_sizes = Bank(dtype=torch.int64)

    @property
    def classes_seen(self) -> int:
        """Classes of all tasks, the one being learned included."""
        return int(self.task_sizes.frozen.sum())

    # -- learning a task

    def begin_task(self, brief: TaskBrief) -> None:
        """Make parameters for what the task adds."""
        if self.in_task:
            raise UnfinishedTask(self.name)
        seen = self.classes_seen
        new = [row for row in brief.classes if row >= seen]
        if new != list(range(seen, seen + len(new))):
            raise InvalidLabels(
                brief.index, f"{seen} classes are known, new ones cannot be rows {new}"
            )
        self.in_task, self.task_rows = True, brief.classes
        self.task_sizes.append([len(new)])

    def end_task(self) -> None:
        """Freeze what was learned: all banks close. An override calls this one last."""
        for module in self.modules():
            if isinstance(module, Bank):
                module.close()
        self.in_task = False

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def prepare(self, batches: Iterator[TrainingBatch]) -> None:
        """Look at all images of the task before training; called if `prepares_on` is set."""

    def conclude(self, batches: Iterator[TrainingBatch]) -> None:
        """Look at all images of the task after training; called if `concludes_on` is set."""

    def stages(self) -> Sequence[Stage]:
        """The training stages of the current task; empty: nothing trains."""
        return [Stage()] if self.trainable_parameters() else []

    def end_stage(self, stage: Stage) -> None:
        """Called after each stage. What later stages need must be in buffers or parameters, which
        checkpoints contain."""

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The samples (n x D) and labels (n) of an epoch of a stage on generated data."""
        raise TypeError(f"{type(self).__name__} has a stage on generated data and no `generate`")

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        """Learn from all images of a task at once; called if `fits` is set and there are no
        `task_sums`.

        Args:
            features: What `features` returns, n x D.
            queries: The features of the plain ViT, n x D; None unless the method needs queries.
            labels: n.
        """

    def task_sums(self, labels: Tensor) -> TaskSums | None:
        """Return empty sums for the images of a task, so that `fit` needs no table of all features.

        The engine adds the images in chunks, reduces the sums over processes and calls `add_sums`
        instead of `fit`. None, the default: `fit` gets all images at once.

        Args:
            labels: Of all images of the task.
        """
        return None

    def add_sums(self, sums: Any) -> None:
        """Learn from the sums of a task that `task_sums` has made."""
        raise TypeError(f"{type(self).__name__} has sums of a task and no `add_sums`")

    def replay(self, count: int, generator: torch.Generator) -> Tensor:
        """(task, image) of each past image to train on in this epoch, n x 2; none by default.

        Called if `keeps_images` is set.
        """
        return torch.zeros(0, 2, dtype=torch.int64)

    # -- computing

    @abstractmethod
    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        """The features of a batch, B x D."""

    @abstractmethod
    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        """B x classes seen; queries are computed where they are needed and not given."""

    @property
    def fixed_features(self) -> bool:
        """Whether later tasks change no image's features, and `scores` gives the logits for them.

        The engine then computes the features of test images once for all evaluations.
        """
        return False

    def scores(self, features: Tensor) -> Tensor:
        """The logits for features, B x classes seen; called if `fixed_features` is true."""
        raise TypeError(f"{type(self).__name__} has fixed features and no `scores`")

    def loss(self, batch: TrainingBatch) -> Loss:
        """The parts of the loss of a batch; not needed by a closed form."""
        raise TypeError(f"{self.name} is fitted in closed form and has no loss")

    def forward(self, batch: TrainingBatch) -> Loss:
        """Called by the engine, so that wrappers for several processes see the training step."""
        return self.loss(batch)

    @torch.no_grad()
    def queries(self, images: Images) -> Tensor:
        """B x D, without a gradient."""
        return self.backbone.features(images)

    @property
    def plain_queries(self) -> bool:
        """Whether queries are the final features of the plain ViT; override it with `queries`."""
        return self.needs_queries

    # -- learned state

    def parameter_count(self) -> ParameterCount:
        """Count the learned parameters of all tasks so far."""
        body = [
            tensor.numel()
            for name, tensor in self.learned_state().items()
            if tensor.is_floating_point() and not name.startswith("head.")
        ]
        return ParameterCount(sum(body), 0)

    def learned_state(self) -> dict[str, Tensor]:
        """All learned tensors, without those of the frozen backbone."""
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith("backbone.")
        }

    def load_learned_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state saved between tasks; banks take the sizes they had.

        Raises:
            CorruptFile: The state is not one of this method. Discard the method then.
        """
        own = self.learned_state()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise self._misfit(f"missing {missing or '-'}, unexpected {unexpected or '-'}")
        banks = self._banks()
        for name, tensor in state.items():
            fits = (
                banks[name].resize(tensor)
                if name in banks
                else tensor.shape == own[name].shape and is_loadable(tensor, own[name])
            )
            if not fits:
                raise self._misfit(f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}")
        self.load_state_dict(state, strict=False)
        if not self._is_consistent():
            raise self._misfit("the sizes of its tensors contradict each other")

    def _banks(self) -> dict[str, Bank]:
        """Each bank under the name of its tensor in the learned state."""
        modules = self.named_modules()
        return {f"{name}.frozen": bank for name, bank in modules if isinstance(bank, Bank)}

    def _is_consistent(self) -> bool:
        """Whether the banks that grow together have grown alike; asked after loading."""
        return bool((self.task_sizes.frozen >= 0).all())

    def _misfit(self, problem: str) -> CorruptFile:
        return CorruptFile(f"The learned state of {self.name or type(self).__name__}", problem)


class TrainedMethod(Method):
    """A method with a linear head that is trained by gradients."""

    trains_all_rows: ClassVar[bool] = False
    """Whether a task trains the head rows of all classes, or only those of its own classes."""
    imprints: ClassVar[bool] = True
    """Whether head rows may start at class means."""
    learns_lone_class: ClassVar[bool] = False
    """Whether the loss can train a head of one class; a softmax over it is 1 for any weights."""

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.head = Head(backbone.config.width)

    def begin_task(self, brief: TaskBrief) -> None:
        """Open the head rows that will train; overrides add what else is learned.

        New rows are imprinted with class means if asked for, and if no loss could train them.
        """
        seen = self.classes_seen
        super().begin_task(brief)
        rows = tuple(range(self.classes_seen)) if self.trains_all_rows else brief.classes
        lone = rows == (seen,) and not self.learns_lone_class
        wanted = self.imprints and (lone or self.config.head_init == "imprint")
        means = brief.class_means() if wanted and brief.class_means is not None else None
        self.head.begin_task(rows, brief.generator("head"), means)
        if lone:
            self.head.close()

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.head(self.features(images, queries))

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and self.head.is_consistent(self.classes_seen)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(super().parameter_count().body, self.head.weight.frozen.numel())


@pydantic_dataclass(frozen=True, config=STRICT)
class PromptConfig(MethodConfig):
    """Options every prompt method has."""

    query: Literal["final", "early"] = "final"
    """The class token that selects prompts: as it leaves the plain ViT, or as it enters the first
    prompted block, which needs no second pass (one-stage; not in the paper)."""


class PromptMethod(TrainedMethod):
    """A frozen ViT run twice: plain for the query, then with prefixes made from it."""

    Config: ClassVar[type[MethodConfig]] = PromptConfig
    needs_queries = True
    loss_in_parts = True
    first_block: int
    config: PromptConfig

    def __init__(
        self, backbone: ViT, config: PromptConfig, prompts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`prompts`: the option with the prompted blocks -> the option with the prompts' length."""
        super().__init__(backbone, config)
        self.blocks = check_prompts(config, backbone.config.depth, prompts)
        self.first_block = min(self.blocks, default=0)
        if config.query == "early" and self.first_block == 0:
            raise BadOption(
                "the method",
                "query",
                "the class token that enters block 0 is the same for every image: "
                "'early' needs prompts from a later block on",
            )

    @torch.no_grad()
    def queries(self, images: Images) -> Tensor:
        if self.config.query == "early":
            return self.backbone.early_features(self.backbone.start(images, self.first_block))
        return self.backbone.features(images)

    @property
    def plain_queries(self) -> bool:
        return self.config.query == "final"

    @abstractmethod
    def prefixes(self, queries: Tensor) -> Prefixes:
        """The key and value prefixes of all prompted blocks at inference."""

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """The prefixes of a training step, and a loss per image to sum over the batch."""
        return self.prefixes(queries), queries.new_zeros(len(queries))

    def penalty(self) -> Tensor:
        """A scalar added to the loss once per step."""
        return self.head.weight.frozen.new_zeros(())

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if queries is None:
            images = self.backbone.start(images, self.first_block)
            queries = self.queries(images)
        return self.backbone.features(images, self.prefixes(queries))

    def loss(self, batch: TrainingBatch) -> Loss:
        assert batch.images is not None
        assert batch.queries is not None
        prefixes, total = self.training_prefixes(batch.queries)
        features = self.backbone.features(batch.images, prefixes)
        return Loss(self.head.masked_loss(features, batch.labels), total, self.penalty())


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """Cosine similarity of queries (B x D) and keys (… x M x D), … x B x M.

    In the precision of the keys, without autocast: the nearest key depends on small differences.
    """
    with full_precision(queries.device):
        return F.normalize(queries.to(keys.dtype), dim=-1) @ F.normalize(keys, dim=-1).mT

"""The contract of a method, and what the families share.

The engine drives a method and is the only one that knows files, devices and optimizers:

    begin_task(brief) -> steps on loss(images, labels, queries), where something is trainable
    -> one fit(features, labels), where it `fits` -> end_task()

Between tasks everything learned lies in buffers; within a task what is being learned is a
parameter beside them. Class labels are rows: the k-th class ever seen has label k.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.errors import BadOption, CorruptFile, InvalidLabels, UnfinishedTask
from coda_prompt.methods.bank import Bank, upgrade_format1
from coda_prompt.methods.head import Head
from coda_prompt.methods.options import STRICT, check_prompts
from coda_prompt.model.vit import Images, Opening, Prefixes, ViT
from coda_prompt.seeding import keyed_generator


@dataclass(frozen=True)
class TaskBrief:
    """What a method is told of a task before it learns it."""

    index: int
    """How many tasks came before."""
    seed: int
    """The trial's: generators are made from it, the task's number and a purpose."""
    classes: tuple[int, ...]
    """Rows of the task's classes, ascending; those not below the number seen are new."""
    labels: Tensor
    """The rows of the task's training images, one each."""
    class_means: Tensor | None = None
    """Mean feature of each class in `classes` under the method as it stood before the task; zero
    for a class without images. Only where `wants_class_means` asks for it."""

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self.seed, self.index, purpose)


class Loss(NamedTuple):
    """A loss in parts that accumulation and several processes can each reduce rightly."""

    mean: Tensor
    """Per image; averaged over the whole batch."""
    total: Tensor
    """Per image; summed over the whole batch (key losses)."""
    penalty: Tensor
    """Of the parameters alone; counted once a step."""


class ParameterCount(NamedTuple):
    """Learned parameters as the paper counts them (SPEC 8): the head without its bias."""

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
    """A way to learn task after task. Families override the parts that differ."""

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Public name -> option values that make it: one class may serve several rows of a table."""
    needs_queries: ClassVar[bool] = False
    """Whether `features` and `loss` use the query: the class token of the plain frozen ViT."""
    trains_on: ClassVar[Literal["task", "all"]] = "task"
    """What a stream gives it: task after task, or everything at once."""
    keeps_images: ClassVar[bool] = False
    """Whether images of past tasks are needed again."""
    closed_form: ClassVar[bool] = False
    """Whether it learns by `fit` alone, without gradients."""
    fits: ClassVar[bool] = False
    """Whether a task ends with `fit` on the features of all its images, un-augmented."""
    learning_rate: ClassVar[float] = 1e-3
    """What the paper trains this family with (SPEC 5)."""
    temperature: ClassVar[float] = 1.0
    """What scores are divided by to be probabilities where no held-out image says better."""
    frozen_backbone: ClassVar[bool] = True
    """Whether the ViT stays as it came; if not, the method trains a copy of its own."""

    name: str = ""
    """The row of a results table this is; `methods.make` sets it."""

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__()
        self.config = config
        self.vit_config = backbone.config
        self.in_task = False
        if self.frozen_backbone:
            self.backbone = backbone.requires_grad_(False)
        self.task_sizes = Bank(dtype=torch.int64)

    @property
    def classes_seen(self) -> int:
        """Classes of all tasks, the one being learned included."""
        return int(self.task_sizes.rows.sum())

    # -- the life of a task

    def wants_class_means(self, classes: tuple[int, ...]) -> bool:
        """Whether a task with these classes starts from their mean features."""
        return False

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
        self.in_task = True
        self.task_sizes.append([len(new)])

    def end_task(self) -> None:
        """Freeze what was learned: all banks close. An override calls this one last."""
        for _, bank in self._banks():
            bank.close()
        self.in_task = False

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def fit(self, features: Tensor, labels: Tensor) -> None:
        """Learn from all features of a task at once; only where `fits` says so."""

    def replay(self, count: int, generator: torch.Generator) -> Tensor:
        """(task, image) of each past image to train on in this epoch, n x 2; most have none."""
        return torch.zeros(0, 2, dtype=torch.int64)

    # -- what it computes

    @abstractmethod
    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        """The features of a batch, B x D."""

    @abstractmethod
    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        """B x classes seen; queries are computed where they are needed and not given."""

    @abstractmethod
    def loss(self, images: Images, labels: Tensor, queries: Tensor | None) -> Loss:
        """The parts of the loss of a batch; not needed by a closed form."""

    def forward(self, images: Images, labels: Tensor, queries: Tensor | None = None) -> Loss:
        """The training step's way in, so that wrappers for several processes see it."""
        return self.loss(images, labels, queries)

    def opened(self, images: Images) -> Images:
        """As far as the query's pass and the one after it compute the same."""
        return images

    @torch.no_grad()
    def queries(self, images: Images) -> Tensor:
        return self.backbone.features(images)

    # -- what is kept

    def parameter_count(self) -> ParameterCount:
        """Count the learned parameters of all tasks so far."""
        body = [
            tensor.numel()
            for name, tensor in self.learned_state().items()
            if tensor.is_floating_point() and not name.startswith("head.")
        ]
        return ParameterCount(sum(body), 0)

    def learned_state(self) -> dict[str, Tensor]:
        """All that was learned and nothing that came with the backbone."""
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
        state, own = upgrade_format1(self, state), self.learned_state()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise self._misfit(f"missing {missing or '-'}, unexpected {unexpected or '-'}")
        banks = {f"{name}.frozen": bank for name, bank in self._banks()}
        for name, tensor in state.items():
            fits = (
                banks[name].resize(tensor)
                if name in banks
                else tensor.shape == own[name].shape
                and tensor.is_floating_point() == own[name].is_floating_point()
            )
            if not fits:
                raise self._misfit(f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}")
        self.load_state_dict(state, strict=False)
        if not self._is_consistent():
            raise self._misfit("the sizes of its tensors contradict each other")

    def growing_axes(self) -> dict[str, int]:
        """The tensors of the learned state that grow by task, and along which axis."""
        return {f"{name}.frozen": bank.axis for name, bank in self._banks()}

    def _banks(self) -> Iterator[tuple[str, Bank]]:
        for name, module in self.named_modules():
            if isinstance(module, Bank):
                yield name, module

    def _is_consistent(self) -> bool:
        """Whether the banks that grow together have grown alike; asked after loading."""
        return bool((self.task_sizes.rows >= 0).all())

    def _misfit(self, problem: str) -> CorruptFile:
        return CorruptFile(f"The learned state of {self.name or type(self).__name__}", problem)


class TrainedMethod(Method):
    """A method with a linear head that is trained by gradients."""

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.head = Head(backbone.config.width)

    def wants_class_means(self, classes: tuple[int, ...]) -> bool:
        """New head rows are imprinted where asked for, and where no loss could train them."""
        return self.config.head_init == "imprint" or self._lone_new_class(self._open_rows(classes))

    def begin_task(self, brief: TaskBrief) -> None:
        """Open the head rows that will train. Families add what else is learned."""
        rows = self._open_rows(brief.classes)
        nothing_to_tell_apart = self._lone_new_class(rows)
        super().begin_task(brief)
        self.head.begin_task(rows, brief.generator("head"), brief.class_means)
        if nothing_to_tell_apart:
            # Softmax over one class is 1 whatever the weights: the imprinted row stands as it is.
            self.head.close()

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.head(self.features(images, queries))

    def _is_consistent(self) -> bool:
        rows = {len(self.head.weight), len(self.head.bias)}
        return super()._is_consistent() and rows == {self.classes_seen}

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(super().parameter_count().body, self.head.weight.frozen.numel())

    def _open_rows(self, classes: tuple[int, ...]) -> tuple[int, ...]:
        """Head rows that train in a task: its own classes, old ones it brings again included."""
        return classes

    def _lone_new_class(self, rows: tuple[int, ...]) -> bool:
        return len(rows) == 1 and rows[0] >= self.classes_seen

    def _masked_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the open rows alone: old logits take no part (SPEC 5).

        A task of one known class has nothing to tell apart among its own: there its row is
        trained against all other rows, which stay as they are.
        """
        if self.head.open_rows is not None and len(self.head.open_rows) == 1:
            return F.cross_entropy(self.head(features), labels, reduction="none")
        return F.cross_entropy(
            self.head.open_logits(features), self.head.position_of(labels), reduction="none"
        )


@pydantic_dataclass(frozen=True, config=STRICT)
class PromptConfig(MethodConfig):
    """Options every prompt method has."""

    query: Literal["final", "early"] = "final"
    """The class token that prompts are chosen by: as it leaves the plain ViT, or as it enters the
    first prompted block, which takes no second pass (one-stage; not the paper's)."""


class PromptMethod(TrainedMethod):
    """A frozen ViT run twice: plain for the query, then with prefixes made from it."""

    Config: ClassVar[type[MethodConfig]] = PromptConfig
    needs_queries = True
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
    def opened(self, images: Images) -> Opening:
        return (
            images if isinstance(images, Opening) else self.backbone.open(images, self.first_block)
        )

    @torch.no_grad()
    def queries(self, images: Images) -> Tensor:
        if self.config.query == "early":
            return self.backbone.early_features(self.opened(images))
        return self.backbone.features(images)

    @abstractmethod
    def prefixes(self, queries: Tensor) -> Prefixes:
        """The key and value prefixes of all prompted blocks at inference."""

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """The prefixes of a training step, and a loss per image that is summed over the batch."""
        return self.prefixes(queries), queries.new_zeros(len(queries))

    def penalty(self) -> Tensor:
        return self.head.weight.frozen.new_zeros(())

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if queries is None:
            images = self.opened(images)
            queries = self.queries(images)
        return self.backbone.features(images, self.prefixes(queries))

    def loss(self, images: Images, labels: Tensor, queries: Tensor | None) -> Loss:
        assert queries is not None
        prefixes, total = self.training_prefixes(queries)
        features = self.backbone.features(images, prefixes)
        return Loss(self._masked_loss(features, labels), total, self.penalty())

    def _learns_prompts(self, brief: TaskBrief) -> bool:
        """A task of one class has no loss that could train a prompt; an untrained one disturbs."""
        return len(brief.classes) > 1


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; the meta device, which only counts, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """Cosine similarity of queries (B x D) and keys (… x M x D), … x B x M.

    In the keys' precision whatever autocast says: which key is nearest hangs on small differences.
    """
    with full_precision(queries.device):
        return F.normalize(queries.to(keys.dtype), dim=-1) @ F.normalize(keys, dim=-1).mT


def split_prompts(prompts: Tensor) -> tuple[Tensor, Tensor]:
    """B x ... x L x D -> keys and values: the first half of the rows and the second (SPEC 2)."""
    keys, values = prompts.chunk(2, dim=-2)
    return keys, values

"""Gaussians of the features of each class, and a head that is aligned on samples from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import (
    Loss,
    Method,
    MethodConfig,
    ParameterCount,
    PromptConfig,
    PromptMethod,
    TaskBrief,
    cosines,
)
from coda_prompt.research.methods.head import Head, linear_logits
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import ParameterGroup, Stage, TrainingBatch
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.vit.vit import Images, Prefixes, ViT

ITERATIONS = 20
"""Of k-means."""


@dataclass(frozen=True, config=STRICT)
class AlignmentConfig(MethodConfig):
    """Options of methods that align their head on samples from class Gaussians."""

    align_epochs: int = Field(default=5, ge=1)
    """Epochs of the alignment."""
    align_learning_rate: float = Field(default=0.01, gt=0)
    """Initial learning rate of the alignment."""
    align_samples: int = Field(default=256, ge=1)
    """Samples in a batch of the alignment."""
    jitter: float = Field(default=1e-4, gt=0)
    """Added to the variances of the class Gaussians."""


@dataclass(frozen=True, config=STRICT)
class AlignedPromptConfig(AlignmentConfig, PromptConfig):
    """Options of prompt methods with an aligned head."""


class Gaussians(nn.Module):
    """Gaussians of each class: one with a full covariance, or one or several diagonal ones.

    Several are the clusters of k-means. A class without images has none and is never sampled.
    """

    def __init__(
        self,
        width: int,
        kind: Literal["full", "diagonal"],
        centroids: int = 1,
        jitter: float = 1e-4,
    ) -> None:
        super().__init__()
        self.kind, self.centroids, self.jitter = kind, centroids, jitter
        self.means = Bank((centroids, width))
        spread = (width, width) if kind == "full" else (width,)
        self.factors = Bank((centroids, *spread))
        """Cholesky factors of covariances, or standard deviations; zero: no images."""

    def grow(self, classes: int) -> None:
        """Make space for new classes."""
        for bank in (self.means, self.factors):
            bank.grow(classes)

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Estimate the Gaussians of all classes among the labels, from n x D features."""
        means, factors = self.means.frozen.clone(), self.factors.frozen.clone()
        for row in labels.unique().tolist():
            rows = features[labels == row].double()
            if self.kind == "full":
                means[row, 0] = rows.mean(0)
                factors[row, 0] = self._cholesky(rows)
            else:
                mean, variance = self._clusters(rows, row)
                means[row], factors[row] = mean, (variance + self.jitter).sqrt()
        self.means.frozen, self.factors.frozen = means, factors

    def sample(
        self, count: int, generator: torch.Generator, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw `count` samples of every Gaussian.

        Args:
            count: Samples per Gaussian.
            generator: Source of randomness, on the CPU.
            scale: Factor of each class's means, C; None: 1.

        Returns:
            Samples (n x D) and labels (n).
        """
        present = self.factors.frozen.flatten(1).any(1).nonzero()[:, 0]
        means, factors = self.means.frozen[present], self.factors.frozen[present]
        if scale is not None:
            means = means * scale.to(means)[present][:, None, None]
        noise = torch.randn(*means.shape[:2], count, means.shape[2], generator=generator).to(means)
        spread = noise @ factors.mT if self.kind == "full" else noise * factors[:, :, None]
        samples = means[:, :, None] + spread  # C x k x n x D
        return samples.flatten(0, 2), present.repeat_interleave(self.centroids * count)

    def _cholesky(self, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(0)
        covariance = centred.T @ centred / max(len(rows) - 1, 1)
        return torch.linalg.cholesky(covariance + self.jitter * torch.eye(rows.shape[1]).to(rows))

    def _clusters(self, rows: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """Means and variances of k clusters, k x D; with fewer images clusters repeat."""
        count = min(self.centroids, len(rows))
        order = torch.randperm(len(rows), generator=keyed_generator(label, "k-means"))
        means = rows[order[:count].to(rows.device)]
        for _ in range(ITERATIONS if count > 1 else 1):
            member = F.one_hot(torch.cdist(rows, means).argmin(1), count).to(rows)  # n x k
            sizes = member.sum(0)[:, None]
            means = torch.where(sizes > 0, member.T @ rows / sizes.clamp(min=1), means)
        squares = (rows[:, None] - means).square() * member[:, :, None]
        variances = squares.sum(0) / sizes.clamp(min=1)
        chosen = torch.arange(self.centroids, device=rows.device) % count
        return means[chosen], variances[chosen]


class AlignedHead(nn.Module):
    """Head rows of all classes, trained together on samples from class Gaussians.

    A method trains the rows of a task elsewhere, copies them here (`start`), and has a stage
    `align` on what `generate` returns.
    """

    def __init__(
        self, width: int, config: AlignmentConfig, *, cosine: bool = False, **gaussians: Any
    ) -> None:
        """`cosine`: scores are cosines and there is no bias; `gaussians`: see `Gaussians`."""
        super().__init__()
        self.config = config
        self.gaussians = Gaussians(width, jitter=config.jitter, **gaussians)
        self.weight = Bank((width,))
        self.bias = None if cosine else Bank()

    def begin_task(self, classes: int) -> None:
        """Append rows up to the number of classes seen, and open all rows."""
        self.gaussians.grow(classes)
        for bank in (self.weight, self.bias):
            if bank is not None:
                bank.grow(classes)
                bank.reopen()

    @torch.no_grad()
    def start(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Set the rows of some classes to trained values."""
        for bank, values in ((self.weight, weight), (self.bias, bias)):
            if bank is not None and bank.trainable is not None and values is not None:
                bank.trainable[rows] = values.to(bank.trainable)

    def fit(self, features: Tensor, labels: Tensor, head: Head, rows: Sequence[int]) -> None:
        """Estimate the Gaussians of a task, and start at these rows of the head it trained."""
        self.gaussians.update(features, labels)
        chosen = torch.tensor(rows, device=features.device)
        self.start(chosen, head.weight.rows[chosen], head.bias.rows[chosen])

    def forward(self, features: Tensor) -> Tensor:
        """B x classes."""
        if self.bias is None:
            return cosines(features, self.weight.rows)
        return linear_logits(features, self.weight.rows, self.bias.rows)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def stage(self, weight_decay: float, more: Sequence[nn.Parameter] = ()) -> Stage:
        """The alignment: SGD over all rows of the head, and over `more`."""
        config = self.config
        return Stage(
            "align",
            [ParameterGroup([*self.trainable_parameters(), *more])],
            optimizer="sgd",
            learning_rate=config.align_learning_rate,
            weight_decay=weight_decay,
            epochs=config.align_epochs,
            batch_size=config.align_samples,
            schedule="annealing",
            data="generated",
        )

    def generate(
        self, stage: Stage, generator: torch.Generator, steps: int, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The samples of an epoch of about `steps` steps, as many of each Gaussian.

        `scale`: factor of each class's means, C.
        """
        assert stage.batch_size is not None
        drawn = self.gaussians.centroids * len(self.gaussians.means)
        return self.gaussians.sample(math.ceil(steps * stage.batch_size / drawn), generator, scale)

    def is_consistent(self, classes: int) -> bool:
        """Whether all tensors have one row per class."""
        return {len(bank) for bank in self.modules() if isinstance(bank, Bank)} == {classes}


class AlignedMethod(Method):
    """Mixin of methods with an aligned head; list it before the method family in the bases."""

    fits = True
    aligned: AlignedHead

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        self.aligned.begin_task(self.classes_seen)

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.aligned.generate(stage, generator, self.classes_seen)

    def loss(self, batch: TrainingBatch) -> Loss:
        if batch.features is None:
            return super().loss(batch)
        return Loss.of(self.alignment_loss(self.aligned(batch.features), batch.labels))

    def alignment_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of samples from class Gaussians, one value for each."""
        return F.cross_entropy(logits, labels, reduction="none")

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.aligned(self.features(images, queries))

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and self.aligned.is_consistent(self.classes_seen)


class AlignedPrompts(AlignedMethod, PromptMethod):
    """Base of prompt methods whose head is aligned after each task and stays aligned."""

    def __init__(
        self,
        backbone: ViT,
        config: AlignedPromptConfig,
        prompts: Mapping[str, str],
        centroids: int = 1,
    ) -> None:
        super().__init__(backbone, config, prompts)
        width = backbone.config.width
        self.aligned = AlignedHead(width, config, kind="diagonal", centroids=centroids)

    def as_prefixes(self, prompts: Tensor) -> Prefixes:
        """Split prompts (blocks x (1 or B) x length x D) into keys and values."""
        keys, values = prompts.chunk(2, dim=2)
        return dict(zip(self.blocks, zip(keys, values, strict=True), strict=True))

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.aligned.fit(features, labels, self.head, self.task_rows)

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.aligned.generate(stage, generator, self.alignment_steps)

    @property
    def alignment_steps(self) -> int:
        """Steps of an epoch: as many as old classes, as in released code."""
        return max(int(self.task_sizes.rows[:-1].sum()), 1)

    def parameter_count(self) -> ParameterCount:
        """Without class Gaussians and the rows that alignments start from."""
        body = sum(
            tensor.numel()
            for name, tensor in self.learned_state().items()
            if tensor.is_floating_point() and "aligned." not in name and "head." not in name
        )
        return ParameterCount(body, self.aligned.weight.frozen.numel())

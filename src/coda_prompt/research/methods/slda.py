"""Streaming LDA: Gaussian classes with one shared covariance on frozen features.

Hayes and Kanan, CVPR Workshops 2020, https://arxiv.org/abs/1909.01520. The published form has
`shrinkage=1e-4, normalize=False`; the defaults also work with few images.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank, CPUModule
from coda_prompt.research.methods.base import MethodConfig, ParameterCount, TaskBrief
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.sums import Chunk, ClassSums
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import ViT
from coda_prompt.statistics.classifier import solve_shared
from coda_prompt.statistics.moments import LessonSums, Moments


@dataclass(frozen=True, config=STRICT)
class StreamingLDAConfig(MethodConfig):
    """Options of streaming LDA."""

    shrinkage: float | None = Field(default=None, gt=0, le=1)
    """Share of a multiple of the identity in the covariance. Default: the square root of the oracle
    approximating shrinkage, which falls with the number of images."""
    normalize: bool = True
    """Scale features to unit length."""


class MomentSums(ClassSums):
    """Counts, sums and second moments of the images of a task, in float64 on the CPU."""

    reduced = MappingProxyType({**ClassSums.reduced, "squares": "sum"})

    def __init__(self, sums: Bank, counts: Bank, scaled: Callable[[Tensor], Tensor]) -> None:
        """`scaled`: applied to features before they are added."""
        super().__init__(sums, counts)
        width = self.sums.shape[1]
        self.squares, self.scaled = torch.zeros(width, width, dtype=torch.float64), scaled

    def add(self, chunk: Chunk) -> None:
        features = self.scaled(chunk.features).cpu().double()
        super().add(chunk._replace(features=features, labels=chunk.labels.cpu()))
        self.squares.addmm_(features.T, features)

    def arrays(self) -> LessonSums:
        """Return the same sums as arrays."""
        lesson = LessonSums(self.sums.shape[1], len(self.counts))
        lesson.dtype = np.dtype(np.float64)
        lesson.counts, lesson.sums = self.counts.numpy(), self.sums.numpy()
        lesson.squares = self.squares.numpy()
        return lesson


class ClassMoments(CPUModule):
    """The banks of `Moments`, which stay on the CPU in float64, whatever the model is moved to."""

    within: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.counts, self.sums = Bank(dtype=torch.int64), Bank((width,), dtype=torch.float64)
        self.register_buffer("within", torch.zeros(width, width, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        """Add classes without images up to `classes`."""
        self.counts.grow(classes)
        self.sums.grow(classes)

    @property
    def value(self) -> Moments:
        counts, sums = self.counts.frozen.numpy(), self.sums.frozen.numpy()
        return Moments(counts, sums, self.within.numpy(), None)

    @value.setter
    def value(self, moments: Moments) -> None:
        self.counts.frozen, self.sums.frozen, self.within = (
            torch.from_numpy(array) for array in (moments.counts, moments.sums, moments.within)
        )


class StreamingLDA(ClosedForm):
    """Streaming LDA: class means and one shared covariance of frozen features."""

    Config = StreamingLDAConfig
    variants = MappingProxyType({"slda": {}})
    config: StreamingLDAConfig

    def __init__(self, backbone: ViT, config: StreamingLDAConfig) -> None:
        super().__init__(backbone, config)
        width = backbone.config.width
        self.moments = ClassMoments(width)
        self.weight, self.bias = Bank((width,)), Bank()

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        for each in (self.moments, self.weight, self.bias):
            each.grow(self.classes_seen)

    def task_sums(self, labels: Tensor) -> MomentSums:
        return MomentSums(self.moments.sums, self.moments.counts, self._scaled)

    def add_sums(self, sums: MomentSums) -> None:
        self.moments.value = moments = self.moments.value.with_sums(sums.arrays())
        weight, bias, _ = solve_shared(moments, self.config.shrinkage)
        bias[moments.counts == 0] = -np.inf
        self.weight.frozen = torch.from_numpy(weight).to(self.weight.frozen)
        self.bias.frozen = torch.from_numpy(bias).to(self.bias.frozen)

    def scores(self, features: Tensor) -> Tensor:
        features = self._scaled(features.to(self.weight.frozen.dtype))
        with full_precision(features.device):
            return F.linear(features, self.weight.frozen, self.bias.frozen)

    def _scaled(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) if self.config.normalize else features

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.weight.frozen.numel())

    def _is_consistent(self) -> bool:
        moments = self.moments
        rows = {len(each) for each in (moments.counts, moments.sums, self.weight, self.bias)}
        return super()._is_consistent() and rows == {self.classes_seen}

"""Streaming LDA: Gaussian classes with one shared covariance on frozen features.

Hayes and Kanan, CVPR Workshops 2020, https://arxiv.org/abs/1909.01520. The published form has
`shrinkage=1e-4, normalize=False`; the defaults also work with few images.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.additive import AdditiveMethod, AdditiveState
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, ParameterCount, TaskBrief, cosines
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.methods.moments import FeatureMoments, MomentSums
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.shrinkage import shrink_covariance
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import ViT


@dataclass(frozen=True, config=STRICT)
class StreamingLDAConfig(MethodConfig):
    """Options of streaming LDA."""

    shrinkage: float | None = Field(default=None, gt=0, le=1)
    """Share of a multiple of the identity in the covariance. Default: the square root of the oracle
    approximating shrinkage, which falls with the number of images."""
    normalize: bool = True
    """Scale features to unit length."""
    removable: bool = False
    """Store the second moments of each class apart, so that it can be forgotten."""


class StreamingLDA(AdditiveMethod, ClosedForm):
    """Streaming LDA: class means and one shared covariance of frozen features."""

    Config = StreamingLDAConfig
    variants = MappingProxyType({"slda": {}})
    removable_option = ("removable", True)
    config: StreamingLDAConfig

    def __init__(self, backbone: ViT, config: StreamingLDAConfig) -> None:
        super().__init__(backbone, config)
        width = backbone.config.width
        self.moments = FeatureMoments(width, removable=config.removable)
        self.weight, self.bias = Bank((width,)), Bank()

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        for each in (self.moments, self.weight, self.bias):
            each.grow(self.classes_seen)

    def task_sums(self, labels: Tensor) -> MomentSums | None:
        if self.config.removable:
            return None  # the moments of single classes do not add up over processes
        return MomentSums(self.moments, self._scaled)

    def add_sums(self, sums: MomentSums) -> None:
        self.moments.add_sums(sums)
        self.solve()

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.moments.add(self._scaled(features), labels)
        self.solve()

    def solve(self) -> None:
        means = self.moments.means()
        precision = torch.linalg.inv(
            shrink_covariance(*self.moments.covariance(), self.config.shrinkage)
        )
        weight = means @ precision
        bias = -(weight * means).sum(1) / 2
        bias[self.moments.counts.frozen == 0] = -torch.inf
        self.weight.frozen = weight.to(self.weight.frozen)
        self.bias.frozen = bias.to(self.bias.frozen)

    def statistics_parts(self) -> Sequence[AdditiveState]:
        return (self.moments,)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        super().move_images(self._scaled(features), source, labels)

    def scores(self, features: Tensor) -> Tensor:
        features = self._scaled(features.to(self.weight.frozen.dtype))
        with full_precision(features.device):
            return F.linear(features, self.weight.frozen, self.bias.frozen)

    def distances(self, features: Tensor) -> Tensor | None:
        return 1 - cosines(features, self.moments.means().to(features))

    def _scaled(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) if self.config.normalize else features

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.weight.frozen.numel())

    def _is_consistent(self) -> bool:
        rows = {len(self.weight), len(self.bias)}
        fits = self.moments.is_consistent(self.classes_seen)
        return super()._is_consistent() and fits and rows == {self.classes_seen}

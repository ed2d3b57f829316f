"""Yardsticks without training on the frozen features: nearest class mean and RanPAC."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.methods.base import (
    Method,
    MethodConfig,
    ParameterCount,
    TaskBrief,
    cosines,
)
from coda_prompt.methods.ridge import RidgeClassifier, RidgeConfig
from coda_prompt.model.vit import Images, ViT


class ClosedForm(Method):
    """The query is the feature, and a task is learned from all its queries at once."""

    needs_queries = True
    closed_form = True
    fits = True

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        assert queries is not None
        return queries

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.scores(self.queries(images) if queries is None else queries)

    def scores(self, queries: Tensor) -> Tensor:
        """B x classes seen."""
        raise NotImplementedError

    def _sizes_agree(self, state: Mapping[str, Tensor]) -> bool:
        per_class = {name: axis for name, axis in self.grows.items() if name != "task_sizes"}
        sizes = {state[name].shape[axis] for name, axis in per_class.items()}
        return super()._sizes_agree(state) and sizes == {int(state["task_sizes"].sum())}


class NearestClassMean(ClosedForm):
    """Nearest class mean: cosine similarity to the mean frozen feature of each class."""

    variants = MappingProxyType({"ncm": {}})
    temperature = 0.065
    grows: ClassVar[Mapping[str, int]] = {**ClosedForm.grows, "sums": 0, "counts": 0}

    sums: Tensor
    counts: Tensor

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.register_buffer("sums", torch.zeros(0, backbone.config.width))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        new = self.classes_seen - len(self.sums)
        self.sums = F.pad(self.sums, (0, 0, 0, new))
        self.counts = F.pad(self.counts, (0, new))

    def fit(self, features: Tensor, labels: Tensor) -> None:
        self.sums = self.sums.index_add(0, labels, features.to(self.sums.dtype))
        self.counts = self.counts + torch.bincount(labels, minlength=len(self.counts))

    def scores(self, queries: Tensor) -> Tensor:
        scores = cosines(queries, self.sums)
        return scores.masked_fill((self.counts == 0).to(scores.device), -1.0)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.sums.numel())


class RanPAC(RidgeClassifier, ClosedForm):
    """RanPAC: ridge regression on a random ReLU projection of frozen features."""

    Config: ClassVar[type[MethodConfig]] = RidgeConfig
    variants = MappingProxyType({"ranpac": {}})
    grows: ClassVar[Mapping[str, int]] = {**ClosedForm.grows, **RidgeClassifier.grows}

    def scores(self, queries: Tensor) -> Tensor:
        return self.statistics(queries)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.statistics.sums.numel())

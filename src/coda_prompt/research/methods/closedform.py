"""Methods that fit frozen features without training, and the nearest class mean."""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType

import torch
from torch import Tensor

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import (
    Method,
    MethodConfig,
    ParameterCount,
    TaskBrief,
    cosines,
)
from coda_prompt.research.methods.sums import ClassSums
from coda_prompt.research.vit.vit import Images, ViT


class ClosedForm(Method):
    """Base of methods that fit a task's frozen features (the queries) at once, without training."""

    needs_queries = True
    closed_form = True
    fits = True

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        assert queries is not None
        return queries

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.scores(self.queries(images) if queries is None else queries)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        sums = self.task_sums(labels)
        assert sums is not None
        sums.add_all(features, labels)
        self.add_sums(sums)

    @property
    def fixed_features(self) -> bool:
        return True

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """Compute the scores of a batch, B x classes seen."""


class NearestClassMean(ClosedForm):
    """Nearest class mean: cosine similarity to the mean frozen feature of each class."""

    variants = MappingProxyType({"ncm": {}})

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.sums = Bank((backbone.config.width,))
        self.counts = Bank(dtype=torch.int64)

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        self.sums.grow(self.classes_seen)
        self.counts.grow(self.classes_seen)

    def task_sums(self, labels: Tensor) -> ClassSums:
        return ClassSums(self.sums, self.counts)

    def add_sums(self, sums: ClassSums) -> None:
        sums.add_to(self.sums, self.counts)

    def scores(self, features: Tensor) -> Tensor:
        scores = cosines(features, self.sums.frozen)
        return scores.masked_fill((self.counts.frozen == 0).to(scores.device), -1.0)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.sums.frozen.numel())

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and {len(self.sums), len(self.counts)} == {
            self.classes_seen
        }

"""Methods that fit frozen features without training, and the nearest class mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from coda_prompt.methods.additive import (
    AdditiveMethod,
    AdditiveState,
    absorb_rows,
    drop_rows,
    unite_rows,
)
from coda_prompt.methods.bank import Bank
from coda_prompt.methods.base import Method, MethodConfig, ParameterCount, TaskBrief, cosines
from coda_prompt.methods.sums import Chunk, TaskSums
from coda_prompt.model.vit import Images, ViT


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

    @property
    def fixed_features(self) -> bool:
        return True

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """Compute the scores of a batch, B x classes seen."""


class ClassSums(TaskSums):
    """The sum of the features of each class, and its number of images."""

    reduced = MappingProxyType({"sums": "sum", "counts": "sum"})

    def __init__(self, sums: Tensor, counts: Tensor) -> None:
        self.sums, self.counts = torch.zeros_like(sums), torch.zeros_like(counts)

    def add(self, chunk: Chunk) -> None:
        features, classes = chunk.features.to(self.sums.dtype), len(self.counts)
        self.sums.index_add_(0, chunk.labels, features)
        self.counts += torch.bincount(chunk.labels, minlength=classes)


class NearestClassMean(AdditiveMethod, ClosedForm):
    """Nearest class mean: cosine similarity to the mean frozen feature of each class."""

    variants = MappingProxyType({"ncm": {}})
    removable_option = ("", None)
    temperature = 0.065

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.sums = Bank((backbone.config.width,))
        self.counts = Bank(dtype=torch.int64)
        self.class_banks = (self.sums, self.counts)

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        new = self.classes_seen - len(self.sums)
        self.sums.append(torch.zeros(new, self.vit_config.width))
        self.counts.append(torch.zeros(new))

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        sums = self.task_sums(labels)
        sums.add_all(features, labels)
        self.add_sums(sums)

    def task_sums(self, labels: Tensor) -> ClassSums:
        return ClassSums(self.sums.frozen, self.counts.frozen)

    def add_sums(self, sums: ClassSums) -> None:
        self.sums.frozen = self.sums.frozen + sums.sums
        self.counts.frozen = self.counts.frozen + sums.counts

    def statistics_parts(self) -> Sequence[AdditiveState]:
        return ()

    def solve(self) -> None:
        pass

    def drop_classes(self, rows: Sequence[int]) -> None:
        drop_rows(self.class_banks, rows)
        super().drop_classes(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        unite_rows(self.class_banks, rows, into)
        super().unite_classes(rows, into)

    def absorb(self, other: NearestClassMean, rows: Sequence[int]) -> None:
        super().absorb(other, rows)
        absorb_rows(self.class_banks, other.class_banks, rows)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        sums, sources = self.sums.frozen, torch.full_like(labels, source)
        features = features.to(sums)
        sums = sums.index_add(0, sources, features, alpha=-1)
        self.sums.frozen = sums.index_add(0, labels, features)
        moved = torch.bincount(labels, minlength=len(sums))
        moved[source] -= len(labels)
        self.counts.frozen = self.counts.frozen + moved

    def scores(self, features: Tensor) -> Tensor:
        scores = cosines(features, self.sums.frozen)
        return scores.masked_fill((self.counts.frozen == 0).to(scores.device), -1.0)

    def distances(self, features: Tensor) -> Tensor | None:
        return 1 - self.scores(features)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.sums.frozen.numel())

    def _is_consistent(self) -> bool:
        rows = {len(bank) for bank in self.class_banks}
        return super()._is_consistent() and rows == {self.classes_seen}

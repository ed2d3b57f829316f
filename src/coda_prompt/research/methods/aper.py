"""APER (ADAM) with adapters: adapt to the first task, then classify by prototypes.

Zhou et al., IJCV 2024, https://arxiv.org/abs/2303.07338.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from coda_prompt.research.methods.adapters import AdapterConfig, AdapterMethod
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import ParameterCount, TaskBrief, cosines
from coda_prompt.research.vit.vit import Images, ViT


class APER(AdapterMethod):
    """APER: prototypes of plain features and of features adapted to the first task, together."""

    Config = AdapterConfig
    variants = MappingProxyType({"aper": {}})
    needs_queries = True
    first_block = 0

    def __init__(self, backbone: ViT, config: AdapterConfig) -> None:
        super().__init__(backbone, config)
        self.sums, self.counts = Bank((2 * backbone.config.width,)), Bank(dtype=torch.int64)

    def adapts(self) -> bool:
        return super().adapts() and len(self.task_sizes) == 1

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        for bank in (self.sums, self.counts):
            bank.grow(self.classes_seen)

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.adapted(images)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        assert queries is not None
        sums, counts = self.sums.frozen, self.counts.frozen
        both = torch.cat([queries, features], dim=1).to(sums)
        self.sums.frozen = sums.index_add(0, labels, both)
        self.counts.frozen = counts + torch.bincount(labels, minlength=len(counts))

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        """cos([f_plain; f_adapted], w_c), scaled to unit length together."""
        images = self.backbone.start(images)
        plain = self.queries(images) if queries is None else queries
        scores = cosines(torch.cat([plain, self.adapted(images)], dim=1), self.sums.frozen)
        return scores.masked_fill((self.counts.frozen == 0).to(scores.device), -1.0)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(self.adapters.count(), self.sums.frozen.numel())

    def _is_consistent(self) -> bool:
        rows = {len(self.sums), len(self.counts)}
        return super()._is_consistent() and rows == {self.classes_seen}

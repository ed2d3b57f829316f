"""Counts, sums and second moments of frozen features: statistics that add up over tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coda_prompt.methods.bank import Bank


class FeatureMoments(nn.Module):
    """Counts, sums and second moments of the features of all classes: additive, in float64.

    They stay on the CPU in float64, whatever the model is moved to: the covariance is a small
    difference of large sums, and not every accelerator has float64.
    """

    total: Tensor
    """Sum of f f^T over all images, D x D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.counts = Bank(dtype=torch.int64)
        self.sums = Bank((width,), dtype=torch.float64)
        self.register_buffer("total", torch.zeros(width, width, dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> FeatureMoments:
        return self

    def add(self, features: Tensor, labels: Tensor) -> None:
        features, labels = features.cpu().double(), labels.cpu()
        counts, sums = self.counts.frozen, self.sums.frozen
        self.counts.frozen = counts + torch.bincount(labels, minlength=len(counts))
        self.sums.frozen = sums.index_add(0, labels, features)
        self.total = self.total + features.T @ features

    def means(self) -> Tensor:
        """Class means, C x D; zero for a class without images."""
        return self.sums.frozen / self.counts.frozen.clamp(min=1)[:, None]

    def covariance(self) -> tuple[Tensor, int]:
        """The covariance within classes, D x D, and its degrees of freedom."""
        freedom = int((self.counts.frozen - 1).clamp(min=0).sum())
        scatter = self.total - self.means().T @ self.sums.frozen
        return scatter / max(freedom, 1), freedom

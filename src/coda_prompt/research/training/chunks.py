"""Collects the features of batches into chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_prompt.research.methods.sums import CHUNK_SIZE, Chunk, TaskSums
from coda_prompt.research.training.loading import Batch


class Chunks:
    """Adds batches to sums, `CHUNK_SIZE` images at a time, however small the batches are.

    Args:
        sums: What the chunks are added to.
    """

    def __init__(self, sums: TaskSums) -> None:
        self.sums = sums
        self._features, self._labels = list[Tensor](), list[Tensor]()
        self._positions, self._room = list[int](), 0

    def add(self, features: Tensor, batch: Batch, nominal: int) -> None:
        """Add the features of a batch; `nominal` is the size of a full batch."""
        self._features.append(features)
        self._labels.append(batch.labels)
        self._positions += batch.positions
        self._room += nominal
        if self._room + nominal > CHUNK_SIZE:
            self.flush()

    def flush(self) -> None:
        """Add what has been collected."""
        if not self._features:
            return
        features, labels = torch.cat(self._features), torch.cat(self._labels)
        positions = torch.tensor(self._positions, dtype=torch.int64)
        self.sums.add(Chunk(features, labels, positions))
        self._features, self._labels, self._positions, self._room = [], [], [], 0

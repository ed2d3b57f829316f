"""Collects the features of batches into chunks and counts images that occur several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

from coda_prompt.research.methods.sums import CHUNK_SIZE, Chunk, TaskSums
from coda_prompt.research.training.loading import Batch


class Chunks:
    """Adds batches to sums, `CHUNK_SIZE` images at a time, however small the batches are.

    Args:
        sums: What the chunks are added to.
        gather: Returns the hashes of all processes. All processes add as many batches of the same
            nominal size, some of them smaller, so that their chunks end together.
    """

    def __init__(self, sums: TaskSums, gather: Callable[[Tensor], Tensor]) -> None:
        self.sums, self.gather = sums, gather
        self._features, self._labels = list[Tensor](), list[Tensor]()
        self._positions, self._room = list[int](), 0
        self._seen: Counter[int] = Counter()
        """How many images of the task have features with this hash."""

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
        copies = torch.ones_like(labels)
        if self.sums.counts_copies:
            copies = self._count_copies(features).to(labels)
        positions = torch.tensor(self._positions, dtype=torch.int64)
        self.sums.add(Chunk(features, labels, positions, copies))
        self._features, self._labels, self._positions, self._room = [], [], [], 0

    def _count_copies(self, features: Tensor) -> Tensor:
        """Return how often each row has occurred so far, in the chunks of all processes."""
        rows = features.detach().float().cpu().contiguous().numpy()
        hashes = [
            int.from_bytes(blake2b(row.tobytes(), digest_size=8).digest(), "big", signed=True)
            for row in rows
        ]
        padded = torch.zeros(self._room, dtype=torch.int64)
        padded[: len(hashes)] = torch.tensor(hashes, dtype=torch.int64)
        self._seen.update(self.gather(padded).tolist())
        return torch.tensor([self._seen[each] for each in hashes])

"""Selected images of splits, with their labels."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from coda_prompt.images.sources import Integers, Split


@dataclass(frozen=True, eq=False)
class Samples:
    """Selected images of a split, with the stream's labels (rows of the classifier head)."""

    split: Split
    indices: Integers
    labels: Integers

    def __post_init__(self) -> None:
        if self.indices.shape != self.labels.shape or self.indices.ndim != 1:
            raise ValueError(f"{self.indices.shape} indices, {self.labels.shape} labels")

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, position: int, min_side: int | None = None) -> Image.Image:
        return self.split.image(int(self.indices[position]), min_side)

    @property
    def domains(self) -> Integers | None:
        """Domain id of each image; None if the split has no domains."""
        return None if self.split.domains is None else self.split.domains[self.indices]

    def subset(self, positions: ArrayLike) -> Samples:
        """Select samples by positions, in this order, or by a boolean mask."""
        selected = np.asarray(positions)
        if not selected.size:
            selected = selected.astype(np.int64)  # an empty list becomes an array of floats
        return Samples(self.split, self.indices[selected], self.labels[selected])

    @staticmethod
    def concat(parts: Iterable[Samples]) -> Samples:
        """Concatenate samples, which may come from different splits.

        Splits without any remaining sample are not referenced by the result.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("nothing to concatenate")
        located = [pair for part in parts for pair in _locate(part)]
        splits = tuple(dict.fromkeys(split for split, _ in located)) or (parts[0].split,)
        joined = _JoinedSplit(splits)
        start = dict(zip(splits, joined.starts, strict=True))
        indices = np.array([start[split] + index for split, index in located], np.int64)
        labels = np.concatenate([part.labels for part in parts])
        return Samples(joined if len(splits) > 1 else splits[0], indices, labels)


class _JoinedSplit(Split):
    """Several splits as one."""

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self.splits = splits
        self.starts = [0, *itertools.accumulate(len(split) for split in splits[:-1])]
        self.labels = np.concatenate([split.labels for split in splits])
        domains = [split.domains for split in splits if split.domains is not None]
        self.domains = np.concatenate(domains) if len(domains) == len(splits) else None

    def locate(self, index: int) -> tuple[Split, int]:
        """Return the split of an image and its index there."""
        number = bisect.bisect_right(self.starts, index) - 1
        return self.splits[number], index - self.starts[number]

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        split, own_index = self.locate(index)
        return split.image(own_index, min_side)

    def fingerprint(self) -> str:
        return "+".join(split.fingerprint() for split in self.splits)


def _locate(samples: Samples) -> list[tuple[Split, int]]:
    """Return the original split of each sample and its index there."""
    split, indices = samples.split, samples.indices.tolist()
    if isinstance(split, _JoinedSplit):
        return [split.locate(index) for index in indices]
    return [(split, index) for index in indices]

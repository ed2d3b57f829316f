"""What a task adds to running sums, chunk by chunk: no table of the features of all its images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coda_prompt.research.methods.bank import Bank

CHUNK_SIZE = 4096
"""Images added at once."""


class Chunk(NamedTuple):
    """The features of some images of a task."""

    features: Tensor
    """n x D."""
    labels: Tensor
    positions: Tensor
    """The number of each image within the task."""


class TaskSums(ABC):
    """Sums over the images of one task; with several processes, each adds its share."""

    reduced: ClassVar[Mapping[str, str]]
    """Attribute -> how it is reduced over processes: `sum` or `max`."""

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add images."""

    def add_all(self, features: Tensor, labels: Tensor) -> None:
        """Add all images of a task."""
        positions = torch.arange(len(labels), device=labels.device)
        whole = (features, labels, positions)
        for parts in zip(*(each.split(CHUNK_SIZE) for each in whole), strict=True):
            self.add(Chunk(*parts))

    def reduce(self, reduce: Callable[[Tensor, str], Tensor]) -> None:
        """Replace the sums of this process by those of all processes."""
        for name, operation in self.reduced.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, reduce(value, operation))


class ClassSums(TaskSums):
    """The sum of the features of each class, and its number of images.

    Args:
        sums: What the sums will be added to.
        counts: What the numbers of images will be added to.
    """

    reduced: ClassVar[Mapping[str, str]] = MappingProxyType({"sums": "sum", "counts": "sum"})

    def __init__(self, sums: Bank, counts: Bank) -> None:
        self.axis = sums.axis
        self.sums, self.counts = torch.zeros_like(sums.frozen), torch.zeros_like(counts.frozen)

    def add(self, chunk: Chunk) -> None:
        features = chunk.features.to(self.sums.dtype).movedim(0, self.axis)
        self.sums.index_add_(self.axis, chunk.labels, features)
        self.counts += torch.bincount(chunk.labels, minlength=len(self.counts))

    def add_to(self, sums: Bank, counts: Bank) -> None:
        """Add the sums of the task to those of all tasks."""
        sums.frozen = sums.frozen + self.sums
        counts.frozen = counts.frozen + self.counts

"""From samples to batches of tensors, the same for any number of workers and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from coda_prompt.data.images import (
    Augmentation,
    eval_view,
    required_min_side,
    training_view,
    view_generator,
)
from coda_prompt.data.stream import Samples
from coda_prompt.errors import CodaError, ProcessDied
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.seeding import keyed_generator


@dataclass(frozen=True)
class Views:
    """How an image becomes a tensor, in training and in testing."""

    preprocessing: Preprocessing
    augmentation: Augmentation | None = field(default_factory=Augmentation)
    """None: training sees what testing sees."""
    resize: Literal["crop", "squash"] = "crop"
    """Testing: centre crop of the resized image, or the whole image made square."""


@dataclass(frozen=True)
class Epoch:
    """Keys the augmentation: the same image in the same epoch is seen the same way."""

    seed: int
    task: int
    epoch: int
    views: int | None = None
    """Augmented views of an image in all; None: a new one in every epoch."""

    @property
    def view(self) -> int:
        return self.epoch % self.views if self.views else self.epoch


TEST_VIEW, PLAIN_VIEW = -1, -2
"""The view of tests, and the same in training that does not augment."""


class Batch(NamedTuple):
    images: Tensor
    """B x C x H x W."""
    labels: Tensor
    positions: Tensor
    """Where each image stands among the samples."""
    view: int | None
    """Which view of its image each is: `TEST_VIEW`, `PLAIN_VIEW`, the number of a training view
    that comes again, or None for one that does not."""

    def part(self, rows: slice) -> Batch:
        return Batch(self.images[rows], self.labels[rows], self.positions[rows], self.view)


class _Failed(NamedTuple):
    """What a loader process sends where an image cannot be read: errors do not travel whole."""

    message: str


class _Views(Dataset[Any]):
    def __init__(self, samples: Samples, views: Views, epoch: Epoch | None) -> None:
        self.samples, self.views, self.epoch = samples, views, epoch
        self.augmented = epoch is not None and views.augmentation is not None
        self.min_side = required_min_side(
            views.preprocessing, views.augmentation if self.augmented else None
        )

    @property
    def view(self) -> int | None:
        if self.epoch is None:
            return TEST_VIEW
        if not self.augmented:
            return PLAIN_VIEW
        return self.epoch.view if self.epoch.views else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> tuple[Tensor, int, int] | _Failed:
        views, epoch = self.views, self.epoch
        try:
            image = self.samples.image(position, self.min_side)
        except CodaError as error:
            if get_worker_info() is None:
                raise
            return _Failed(str(error))
        if epoch is None or views.augmentation is None:
            view = eval_view(image, views.preprocessing, views.resize)
        else:
            random = view_generator(epoch.seed, epoch.task, epoch.view, position)
            view = training_view(image, views.preprocessing, views.augmentation, random)
        return view, int(self.samples.labels[position]), position

    def collate(self, items: Sequence[tuple[Tensor, int, int] | _Failed]) -> Batch | _Failed:
        if failed := [item for item in items if isinstance(item, _Failed)]:
            return failed[0]
        if not items:  # this process has no share of a small batch
            pixels = self.views.preprocessing
            empty = torch.zeros(0, dtype=torch.int64)
            none = torch.zeros(0, pixels.channels, pixels.size, pixels.size)
            return Batch(none, empty, empty, self.view)
        images, labels, positions = zip(*items, strict=True)
        return Batch(torch.stack(images), torch.tensor(labels), torch.tensor(positions), self.view)


def batches(
    samples: Samples,
    views: Views,
    order: list[list[int]],
    *,
    epoch: Epoch | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """One batch for each list of positions in `order`; augmented where an epoch is given."""
    dataset = _Views(samples, views, epoch)
    loader: DataLoader[Batch | _Failed] = DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=dataset.collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=keyed_generator(0, "workers"),
    )
    try:
        for batch in loader:
            if isinstance(batch, _Failed):
                raise CodaError(batch.message)
            yield batch
    except RuntimeError as error:
        if workers and "DataLoader worker" in str(error):
            cause = " ".join(str(error).split("\n", 1)[0].split())
            raise ProcessDied("reads images", cause, "with fewer training.workers") from error
        raise

"""Data loading: samples to batches of tensors, identical for any number of workers and ranks."""

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
    """How images are converted to tensors in training and in evaluation."""

    preprocessing: Preprocessing
    augmentation: Augmentation | None = field(default_factory=Augmentation)
    """Augmentation of training images. None: training uses the evaluation view."""
    resize: Literal["crop", "squash"] = "crop"
    """Evaluation: centre crop of the resized image, or the whole image squashed to a square."""


@dataclass(frozen=True)
class Epoch:
    """Seeds the augmentation: an image always gets the same view in the same epoch."""

    seed: int
    task: int
    epoch: int
    views: int | None = None
    """Number of augmented views per image. None: a new view every epoch."""

    @property
    def view(self) -> int:
        return self.epoch % self.views if self.views else self.epoch


TEST_VIEW, PLAIN_VIEW = -1, -2
"""View numbers of evaluation images and of un-augmented training images."""


class Batch(NamedTuple):
    """A batch of images with labels, positions and view number."""

    images: Tensor
    """B x C x H x W."""
    labels: Tensor
    positions: Tensor
    """Index of each image in the samples."""
    view: int | None
    """View of all images: `TEST_VIEW`, `PLAIN_VIEW`, the number of a recurring training view, or
    None for a view that does not recur."""

    def part(self, rows: slice) -> Batch:
        return Batch(self.images[rows], self.labels[rows], self.positions[rows], self.view)


class _ReadError(NamedTuple):
    """Sent by a worker for an unreadable image: its exception cannot be re-raised intact."""

    message: str


class _ViewDataset(Dataset[Any]):
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

    def __getitem__(self, position: int) -> tuple[Tensor, int, int] | _ReadError:
        views, epoch = self.views, self.epoch
        try:
            image = self.samples.image(position, self.min_side)
        except CodaError as error:
            if get_worker_info() is None:
                raise
            return _ReadError(str(error))
        if epoch is None or views.augmentation is None:
            view = eval_view(image, views.preprocessing, views.resize)
        else:
            random = view_generator(epoch.seed, epoch.task, epoch.view, position)
            view = training_view(image, views.preprocessing, views.augmentation, random)
        return view, int(self.samples.labels[position]), position

    def collate(self, items: Sequence[tuple[Tensor, int, int] | _ReadError]) -> Batch | _ReadError:
        if errors := [item for item in items if isinstance(item, _ReadError)]:
            return errors[0]
        if not items:  # a batch smaller than the number of processes
            preprocessing = self.views.preprocessing
            size = preprocessing.size
            no_images = torch.zeros(0, preprocessing.channels, size, size)
            no_labels = torch.zeros(0, dtype=torch.int64)
            return Batch(no_images, no_labels, no_labels, self.view)
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
    """Yield one batch for each list of positions in `order`.

    Args:
        samples: The images and labels.
        views: How images are converted to tensors.
        order: Positions of the images of each batch.
        epoch: Seeds the augmentation; None for evaluation views.
        workers: Number of processes that decode images; 0 decodes in this process.

    Raises:
        CodaError: An image cannot be read.
        ProcessDied: A worker died.
    """
    dataset = _ViewDataset(samples, views, epoch)
    loader: DataLoader[Batch | _ReadError] = DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=dataset.collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=keyed_generator(0, "workers"),
    )
    try:
        for batch in loader:
            if isinstance(batch, _ReadError):
                raise CodaError(batch.message)
            yield batch
    except RuntimeError as error:
        if workers and "DataLoader worker" in str(error):
            cause = " ".join(str(error).split("\n", 1)[0].split())
            raise ProcessDied("reads images", cause, "with fewer training.workers") from error
        raise

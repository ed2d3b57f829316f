"""Data loading: samples to batches of tensors, identical for any number of workers and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from coda_prompt.errors import CodaError, ProcessDied
from coda_prompt.images.preprocessing import Preprocessing, eval_view, required_min_side
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.streams.samples import Samples
from coda_prompt.research.training.augmentation import (
    Augmentation,
    augmented_min_side,
    training_view,
    view_generator,
)

Item = TypeVar("Item")


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


TEST_VIEW, PLAIN_VIEW = -1, -2
"""View numbers of evaluation images and of un-augmented training images."""


class Batch(NamedTuple):
    """A batch of images with labels, positions and view number."""

    images: Tensor
    """B x C x H x W."""
    labels: Tensor
    positions: list[int]
    """Index of each image in the samples; a list stays with the host when a batch is moved."""
    view: int | None
    """View of all images: `TEST_VIEW`, `PLAIN_VIEW`, the number of a recurring training view, or
    None for a view that does not recur."""


class _ReadError(NamedTuple):
    """Sent by a worker for an unreadable image: its exception cannot be re-raised intact."""

    message: str


@dataclass(frozen=True)
class _BatchReader(Dataset[Any]):
    """Reads the images at a list of positions as one batch."""

    samples: Samples
    views: Views
    augmentation: Augmentation | None
    view_key: tuple[int, int, int]
    """Seed, task and number of the augmented view."""
    view: int | None
    dtype: torch.dtype

    def __getitem__(self, positions: list[int]) -> Batch | _ReadError:
        samples, preprocessing, images = self.samples, self.views.preprocessing, []
        augmentation = self.augmentation
        min_side = (
            augmented_min_side(preprocessing, augmentation)
            if augmentation
            else required_min_side(preprocessing)
        )
        try:
            for position in positions:
                image = samples.image(position, min_side)
                if augmentation is None:
                    pixels = eval_view(image, preprocessing, self.views.resize)
                else:
                    random = view_generator(*self.view_key, position)
                    pixels = training_view(image, preprocessing, augmentation, random)
                images.append(torch.from_numpy(pixels))
        except CodaError as error:
            if get_worker_info() is None:
                raise
            return _ReadError(str(error))
        if not images:  # the batch is smaller than the number of processes
            empty = torch.zeros(0, preprocessing.channels, preprocessing.size, preprocessing.size)
        stacked = torch.stack(images) if images else empty
        labels = torch.tensor(samples.labels[positions], dtype=torch.int64)
        return Batch(stacked.to(self.dtype), labels, positions, self.view)


def batches(
    samples: Samples,
    views: Views,
    order: list[list[int]],
    *,
    epoch: Epoch | None = None,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    read_ahead: bool = False,
) -> Iterator[Batch]:
    """Yield one batch for each list of positions in `order`.

    Args:
        samples: The images and labels.
        views: How images are converted to tensors.
        order: Positions of the images of each batch.
        epoch: Seeds the augmentation; None for evaluation views.
        workers: Number of processes that decode images; 0 decodes in this process.
        dtype: Of the images.
        read_ahead: Without workers, decode the next batch in a thread while this one is used.

    Raises:
        CodaError: An image cannot be read.
        ProcessDied: A worker died.
    """
    if epoch is None or views.augmentation is None:
        view: int | None = TEST_VIEW if epoch is None else PLAIN_VIEW
        reader = _BatchReader(samples, views, None, (0, 0, 0), view, dtype)
    else:
        number = epoch.epoch % epoch.views if epoch.views else epoch.epoch
        key, view = (epoch.seed, epoch.task, number), number if epoch.views else None
        reader = _BatchReader(samples, views, views.augmentation, key, view, dtype)
    loader: DataLoader[Batch | _ReadError] = DataLoader(
        reader,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=keyed_generator(0, "workers"),
    )
    try:
        ahead = read_ahead and not workers and len(order) > 1
        for batch in _read_ahead(loader) if ahead else loader:
            if isinstance(batch, _ReadError):
                raise CodaError(batch.message)
            yield batch
    except RuntimeError as error:
        if workers and "DataLoader worker" in str(error):
            cause = " ".join(str(error).split("\n", 1)[0].split())
            raise ProcessDied("reads images", cause, "with fewer training.workers") from error
        raise


def _read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, each computed in a thread while the one before it is used."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, iterator, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, iterator, None)
            yield item

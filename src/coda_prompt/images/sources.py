"""Splits of labelled images (in arrays or files), and the source that joins train and test."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from coda_prompt.errors import BadOption
from coda_prompt.images.reading import open_image

Integers = NDArray[np.int64]


class Split(Protocol):
    """Labelled images, decoded one by one; base class of the splits below.

    Implementations have no open files, so that loader workers can copy them.
    """

    labels: Integers
    """Class id of each image."""
    domains: Integers | None = None
    """Domain id of each image; None if the split has no domains."""
    thread_safe: bool = False
    """Whether several threads may decode images at the same time."""

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        """Decode an image; with `min_side` it may be reduced to a shorter side of that size."""
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes with the images or labels."""
        ...


def _check_integers(owner: str, field: str, values: ArrayLike, count: int) -> Integers:
    array = np.asarray(values)
    if array.shape != (count,):
        problem = f"needs one number for each of {count} images, got shape {array.shape}"
        raise BadOption(owner, field, problem)
    if count and not np.issubdtype(array.dtype, np.integer):
        raise BadOption(owner, field, f"needs integers, got {array.dtype}")
    return array.astype(np.int64)


class ArraySplit(Split):
    """Images in memory: uint8, N x H x W (grey) or N x H x W x 3 (RGB)."""

    thread_safe = True

    def __init__(
        self, images: NDArray[np.uint8], labels: ArrayLike, domains: ArrayLike | None = None
    ) -> None:
        self.images = np.asarray(images)
        shape, dtype = self.images.shape, self.images.dtype
        valid_shape = len(shape) > 2 and shape[3:] in ((), (3,)) and 0 not in shape[1:]
        if dtype != np.uint8 or not valid_shape:
            problem = f"needs uint8 of N x H x W or N x H x W x 3, got {dtype} of shape {shape}"
            raise BadOption("ArraySplit", "images", problem)
        self.labels = _check_integers("ArraySplit", "labels", labels, len(images))
        if domains is not None:
            self.domains = _check_integers("ArraySplit", "domains", domains, len(images))

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return Image.fromarray(self.images[index])

    def fingerprint(self) -> str:
        """Hash all pixels and labels."""
        digest = hashlib.sha256(f"{self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(self.labels.data)
        return digest.hexdigest()


class FileSplit(Split):
    """Image files, decoded on access; an unreadable file raises `BadImage` with its path."""

    thread_safe = True

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        labels: ArrayLike,
        domains: ArrayLike | None = None,
    ) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)
        self.labels = _check_integers("FileSplit", "labels", labels, len(self.paths))
        if domains is not None:
            self.domains = _check_integers("FileSplit", "domains", domains, len(self.paths))

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return open_image(self.paths[index], min_side)

    def fingerprint(self) -> str:
        """Hash the files' names, sizes and labels; their content is not read."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            try:
                size = os.stat(path).st_size
            except OSError:  # the lesson reports it with the other unreadable images
                size = -1
            digest.update(f"{os.path.basename(path)}/{size}/{label}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Source:
    """A dataset: class names, a training and a test split, and notes for reports."""

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split
    domain_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Hash the class names and both splits."""
        parts = (*self.class_names, self.train.fingerprint(), self.test.fingerprint())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __post_init__(self) -> None:
        owner = f"source '{self.name}'"
        for ids_field, field in (("labels", "class_names"), ("domains", "domain_names")):
            names: tuple[str, ...] = getattr(self, field)
            if len(set(names)) < len(names):
                duplicate = next(name for name in names if names.count(name) > 1)
                raise BadOption(owner, field, f"'{duplicate}' occurs twice")
            for part in ("train", "test"):
                ids = getattr(getattr(self, part), ids_field)
                if ids is None or not len(ids) or (ids.min() >= 0 and ids.max() < len(names)):
                    continue
                count = f"{field} has {len(names)} names (for 0 to {len(names) - 1})"
                problem = f"run from {ids.min()} to {ids.max()}, but {count}"
                raise BadOption(owner, f"{part} {ids_field}", problem)

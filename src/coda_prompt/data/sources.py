"""Splits of labelled images (in arrays or files), and the source that joins train and test."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from coda_prompt.data.images import open_image
from coda_prompt.errors import BadOption

Integers = NDArray[np.int64]


class Split(Protocol):
    """Labelled images, decoded one by one.

    Implementations have no open files, so that loader workers can copy them.
    """

    @property
    def labels(self) -> Integers:
        """Class id of each image."""
        ...

    @property
    def domains(self) -> Integers | None:
        """Domain id of each image; None if the split has no domains."""
        ...

    def __len__(self) -> int: ...

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        """Decode an image; with `min_side` it may be reduced to a shorter side of that size."""
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes with the images or labels."""
        ...


class ArraySplit:
    """Images in memory: uint8, N x H x W (grey) or N x H x W x 3 (RGB)."""

    def __init__(
        self, images: NDArray[np.uint8], labels: ArrayLike, domains: ArrayLike | None = None
    ) -> None:
        images = np.asarray(images)
        valid_shape = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not valid_shape or 0 in images.shape[1:]:
            raise BadOption(
                "ArraySplit",
                "images",
                "needs uint8 of N x H x W or N x H x W x 3, "
                f"got {images.dtype} of shape {images.shape}",
            )
        self.images = images
        self.labels = _check_integers("ArraySplit", "labels", labels, len(images))
        self.domains = (
            None
            if domains is None
            else _check_integers("ArraySplit", "domains", domains, len(images))
        )

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return Image.fromarray(self.images[index])

    def fingerprint(self) -> str:
        """Hash all pixels and labels."""
        digest = hashlib.sha256(f"{self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(self.labels.data)
        return digest.hexdigest()


class FileSplit:
    """Image files, decoded on access; an unreadable file raises `BadImage` with its path."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        labels: ArrayLike,
        domains: ArrayLike | None = None,
    ) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)
        self.labels = _check_integers("FileSplit", "labels", labels, len(self.paths))
        self.domains = (
            None
            if domains is None
            else _check_integers("FileSplit", "domains", domains, len(self.paths))
        )

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return open_image(self.paths[index], min_side)

    def subset(self, indices: Sequence[int]) -> FileSplit:
        """Select images by their indices."""
        domains = None if self.domains is None else self.domains[indices]
        return FileSplit([self.paths[index] for index in indices], self.labels[indices], domains)

    def fingerprint(self) -> str:
        """Hash the files' names, sizes and labels; their content is not read."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            size = os.stat(path).st_size
            digest.update(f"{os.path.basename(path)}/{size}/{label}\n".encode())
        return digest.hexdigest()


def _check_integers(owner: str, field: str, values: ArrayLike, count: int) -> Integers:
    array = np.asarray(values)
    if array.shape != (count,):
        raise BadOption(
            owner, field, f"needs one number for each of {count} images, got shape {array.shape}"
        )
    if count and not np.issubdtype(array.dtype, np.integer):
        raise BadOption(owner, field, f"needs integers, got {array.dtype}")
    return array.astype(np.int64)


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
        for field, names in (
            ("class_names", self.class_names),
            ("domain_names", self.domain_names),
        ):
            if len(set(names)) < len(names):
                duplicate = next(name for name in names if names.count(name) > 1)
                raise BadOption(owner, field, f"'{duplicate}' occurs twice")
        for split_name, split in (("train", self.train), ("test", self.test)):
            _check_range(
                owner, f"{split_name} labels", split.labels, "class_names", self.class_names
            )
            if split.domains is not None:
                _check_range(
                    owner, f"{split_name} domains", split.domains, "domain_names", self.domain_names
                )


def _check_range(
    owner: str, field: str, ids: Integers, names_field: str, names: Sequence[str]
) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(names)):
        raise BadOption(
            owner,
            field,
            f"run from {ids.min()} to {ids.max()}, but {names_field} has {len(names)} names "
            f"(for 0 to {len(names) - 1})",
        )


def array_source(
    name: str,
    train_images: NDArray[np.uint8],
    train_labels: ArrayLike,
    test_images: NDArray[np.uint8],
    test_labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    train_domains: ArrayLike | None = None,
    test_domains: ArrayLike | None = None,
    domain_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Source:
    """Make a source of uint8 arrays; unnamed classes and domains are called 0, 1, 2, ..."""
    train = ArraySplit(train_images, train_labels, train_domains)
    test = ArraySplit(test_images, test_labels, test_domains)
    if class_names is None:
        class_names = _default_names(train.labels, test.labels)
    if domain_names is None:
        domain_names = _default_names(train.domains, test.domains)
    return Source(name, tuple(class_names), train, test, tuple(domain_names), tuple(notes))


def _default_names(*arrays: Integers | None) -> tuple[str, ...]:
    largest = max(
        (int(array.max()) for array in arrays if array is not None and len(array)), default=-1
    )
    return tuple(str(number) for number in range(largest + 1))

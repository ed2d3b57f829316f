"""Datasets of the Hugging Face hub by name, through the `datasets` package (an extra)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from PIL import Image

from coda_prompt.data.images import open_image
from coda_prompt.data.sources import Integers, Source
from coda_prompt.errors import BadImage, MissingData, MissingExtra

PREFIX = "hub:"
TESTS = ("test", "validation")
"""Splits that are tests: the first one there is."""


class HubSplit:
    """A split of a hub dataset; images are decoded when asked for."""

    domains: Integers | None = None

    def __init__(self, name: str, rows: Any, image: str, label: str) -> None:
        self.name, self.rows, self.image_column = name, rows, image
        self.labels: Integers = np.asarray(rows[label][:], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        name = f"{self.name}[{index}]"
        return open_image(_content(self.rows[index][self.image_column], name), min_side, name)

    def fingerprint(self) -> str:
        """A hash of the name and all labels; images are not read."""
        return hashlib.sha256(f"{self.name}\n".encode() + self.labels.tobytes()).hexdigest()


class StreamedHubSplit:
    """A split that is read from its beginning to its end and kept nowhere."""

    def __init__(self, name: str, rows: Any, image: str, label: str) -> None:
        self.name, self.rows, self.image_column, self.label_column = name, rows, image, label

    @property
    def state(self) -> str:
        """What the hub tells of it: sizes and checksums, where it does."""
        info = self.rows.info
        return f"{info.version} {info.splits} {info.download_checksums}"

    def examples(self, first: int) -> Iterator[tuple[bytes, int]]:
        """Files and labels from a number on."""
        for number, row in enumerate(self.rows.skip(first), first):
            name, label = f"{self.name}[{number}]", row[self.label_column]
            if label is None or label < 0:
                raise _misfit(self.name, f"image {number} has no class")
            yield _content(row[self.image_column], name), int(label)


def hub_source(name: str) -> Source:
    """A dataset with an image column, a class column and the splits train and test.

    Of several class columns the finest counts: CIFAR-100 also has one of 20 superclasses.
    """
    parts = _trained_and_tested(name, _parts(name))
    (train, names), (test, _) = (split_from_rows(*part) for part in parts)
    return Source(name, names, train, test)


def open_hub_split(name: str, part: str) -> tuple[HubSplit, tuple[str, ...]]:
    """One part of a dataset as a split, and the names of its classes."""
    parts = _parts(name)
    if part not in parts:
        raise _misfit(name, f"it has no split {part} (but {', '.join(sorted(parts))})")
    return split_from_rows(f"{name}/{part}", parts[part])


def stream_hub_splits(
    name: str,
) -> tuple[tuple[str, ...], tuple[StreamedHubSplit, StreamedHubSplit]]:
    """The names of the classes, and train and test as they come."""
    parts = _trained_and_tested(name, _parts(name, streaming=True))
    (names, *train), (_, *test) = (_columns(*part) for part in parts)
    return names, (StreamedHubSplit(*train), StreamedHubSplit(*test))


def split_from_rows(name: str, rows: Any) -> tuple[HubSplit, tuple[str, ...]]:
    """A part of a dataset as a split, and the names of its classes."""
    names, *columns = _columns(name, rows)
    return HubSplit(*columns), names


def _parts(name: str, **how: Any) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as problem:
        raise MissingExtra(f"{PREFIX}{name}", "datasets") from problem
    try:
        return datasets.load_dataset(name, **how)
    except Exception as problem:  # the package raises many kinds, of its own and of the network
        raise MissingData(
            f"{PREFIX}{name}",
            f"the dataset could not be loaded ({problem})",
            "Check its name (owner/dataset) and the network, or fetch it first on a machine that "
            "has one.",
        ) from problem


def _trained_and_tested(name: str, parts: Any) -> list[tuple[str, Any]]:
    """Name and rows of the two splits."""
    test = next((part for part in TESTS if part in parts), None)
    if "train" not in parts or test is None:
        raise _misfit(name, "it has not both splits train and test (or validation)")
    return [(f"{name}/{part}", parts[part]) for part in ("train", test)]


def _columns(name: str, rows: Any) -> tuple[tuple[str, ...], str, Any, str, str]:
    """The names of the classes; then the split's name, its rows with images as files, and what
    the columns of images and classes are called."""
    datasets = importlib.import_module("datasets")
    features = rows.features or {}
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not (images and classes):
        raise _misfit(name, "it has not both an image and a class column")
    label = max(classes, key=lambda key: features[key].num_classes)
    files = rows.with_format(None).cast_column(images[0], datasets.Image(decode=False))
    return tuple(features[label].names), name, files, images[0], label


def _content(held: Any, name: str) -> bytes:
    """The file of an image, which is in the row or where the row says."""
    try:
        if held["bytes"] is not None:
            return bytes(held["bytes"])
        with fsspec.open(held["path"], "rb") as file:
            content: bytes = file.read()
            return content
    except Exception as problem:  # disks and networks fail in many ways; or there is no image
        raise BadImage(name, f"it cannot be read ({problem})") from problem


def _misfit(name: str, problem: str) -> MissingData:
    remedy = "Name another dataset, or save its images to folders and point at them."
    return MissingData(f"{PREFIX}{name}", problem, remedy)

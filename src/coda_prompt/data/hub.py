"""Datasets of the Hugging Face hub by name, through the `datasets` package (an extra)."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import numpy as np
from PIL import Image

from coda_prompt.data.sources import Integers, Source
from coda_prompt.errors import BadImage, MissingData, MissingExtra

PREFIX = "hub:"


class HubSplit:
    """A split of a hub dataset; images are decoded when asked for."""

    domains: Integers | None = None

    def __init__(self, name: str, rows: Any, image: str, label: str) -> None:
        self.name, self.rows, self.image_column = name, rows, image
        self.labels: Integers = np.asarray(rows[label][:], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, shortest: int | None = None) -> Image.Image:
        try:
            image: Image.Image = self.rows[index][self.image_column]
            if shortest is not None:
                image.draft(None, (shortest, shortest))
            image.load()
        except (OSError, SyntaxError, ValueError) as problem:
            raise BadImage(f"{self.name}[{index}]", f"cannot be decoded ({problem})") from problem
        return image

    def fingerprint(self) -> str:
        """A hash of the name and all labels; images are not read."""
        return hashlib.sha256(f"{self.name}\n".encode() + self.labels.tobytes()).hexdigest()


def hub_source(name: str) -> Source:
    """A dataset with an image column, a class column and the splits train and test.

    Of several class columns the finest counts: CIFAR-100 also has one of 20 superclasses.
    """
    parts = _parts(name)
    if not {"train", "test"} <= set(parts):
        raise _misfit(name, "it has not both splits train and test")
    (train, names), (test, _) = (
        labelled_rows(f"{name}/{part}", parts[part]) for part in ("train", "test")
    )
    return Source(name, names, train, test)


def hub_part(name: str, part: str) -> tuple[HubSplit, tuple[str, ...]]:
    """One part of a dataset as a split, and the names of its classes."""
    parts = _parts(name)
    if part not in parts:
        raise _misfit(name, f"it has no split {part} (but {', '.join(sorted(parts))})")
    return labelled_rows(f"{name}/{part}", parts[part])


def _parts(name: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as problem:
        raise MissingExtra(f"{PREFIX}{name}", "datasets") from problem
    try:
        return datasets.load_dataset(name)
    except Exception as problem:  # the package raises many kinds, of its own and of the network
        raise MissingData(
            f"{PREFIX}{name}",
            f"the dataset could not be loaded ({problem})",
            "Check its name (owner/dataset) and the network, or fetch it first on a machine that "
            "has one.",
        ) from problem


def labelled_rows(name: str, rows: Any) -> tuple[HubSplit, tuple[str, ...]]:
    """A part of a dataset as a split, and the names of its classes."""
    datasets = importlib.import_module("datasets")
    features = rows.features
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not (images and classes):
        raise _misfit(name, "it has not both an image and a class column")
    label = max(classes, key=lambda key: features[key].num_classes)
    return HubSplit(name, rows, images[0], label), tuple(features[label].names)


def _misfit(name: str, problem: str) -> MissingData:
    remedy = "Name another dataset, or save its images to folders and point at them."
    return MissingData(f"{PREFIX}{name}", problem, remedy)

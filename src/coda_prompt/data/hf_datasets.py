"""Datasets of the Hugging Face Hub by name, through the `datasets` package (an extra)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from coda_prompt.data.images import open_image
from coda_prompt.data.sources import Source, Split
from coda_prompt.errors import BadImage, MissingData, MissingExtra

PREFIX = "hub:"
TEST_SPLITS = ("test", "validation")
"""Names of test splits; the first that exists is used."""


class _Rows(NamedTuple):
    """Rows of a dataset whose images are encoded files."""

    name: str
    rows: Any
    image_column: str
    label_column: str
    class_names: tuple[str, ...]


class HubSplit(Split):
    """A downloaded split of a dataset; images are decoded on access."""

    def __init__(self, dataset: _Rows) -> None:
        self.name, self.rows, self.image_column = dataset.name, dataset.rows, dataset.image_column
        self.labels = np.asarray(dataset.rows[dataset.label_column][:], np.int64)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        name = f"{self.name}[{index}]"
        content = _read_file(self.rows[index][self.image_column], name)
        return open_image(content, min_side, name)

    def fingerprint(self) -> str:
        """Hash the name and all labels; images are not read."""
        return hashlib.sha256(f"{self.name}\n".encode() + self.labels.tobytes()).hexdigest()


class StreamedHubSplit:
    """A split that is read sequentially and not stored on disk."""

    def __init__(self, dataset: _Rows) -> None:
        self._dataset = dataset

    def fingerprint(self) -> str:
        """Return the version, sizes and checksums that the hub states."""
        info = self._dataset.rows.info
        return f"{info.version} {info.splits} {info.download_checksums}"

    def examples(self, first: int) -> Iterator[tuple[bytes, int]]:
        """Yield image files and class ids, starting at position `first`."""
        for number, row in enumerate(self._dataset.rows.skip(first), first):
            label = row[self._dataset.label_column]
            if label is None or label < 0:
                raise _unsuitable(self._dataset.name, f"image {number} has no class")
            name = f"{self._dataset.name}[{number}]"
            yield _read_file(row[self._dataset.image_column], name), int(label)


def hub_source(name: str) -> Source:
    """Open a dataset with an image column, a class column and the splits train and test.

    Of several class columns the one with the most classes is used: CIFAR-100 also has a column of
    20 superclasses.
    """
    train, test = _train_and_test(name, _load_dataset(name))
    return Source(name, train.class_names, HubSplit(train), HubSplit(test))


def open_hub_split(name: str, split: str) -> tuple[HubSplit, tuple[str, ...]]:
    """Open one split of a dataset; returns it and its class names."""
    splits = _load_dataset(name)
    if split not in splits:
        raise _unsuitable(name, f"it has no split {split} (but {', '.join(sorted(splits))})")
    return split_from_rows(f"{name}/{split}", splits[split])


def stream_hub_splits(
    name: str,
) -> tuple[tuple[str, ...], tuple[StreamedHubSplit, StreamedHubSplit]]:
    """Return the class names and the splits train and test for sequential reading."""
    train, test = _train_and_test(name, _load_dataset(name, streaming=True))
    return train.class_names, (StreamedHubSplit(train), StreamedHubSplit(test))


def split_from_rows(name: str, rows: Any) -> tuple[HubSplit, tuple[str, ...]]:
    """Make a split of a `datasets.Dataset`; returns it and its class names."""
    dataset = _find_columns(name, rows)
    return HubSplit(dataset), dataset.class_names


def image_files(name: str, rows: Any) -> list[bytes]:
    """Return the image files of a `datasets.Dataset`, with or without a class column."""
    column, encoded = _encoded_images(name, rows)
    values = enumerate(encoded[column])
    return [_read_file(value, f"{name}[{number}]") for number, value in values]


def _load_dataset(name: str, **options: Any) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra(f"{PREFIX}{name}", "datasets") from error
    try:
        return datasets.load_dataset(name, **options)
    except Exception as error:  # the package and the network raise many types
        problem = f"the dataset could not be loaded ({error})"
        remedy = "Check its name (owner/dataset) and the network. Without a network, download it "
        remedy += "on another machine first."
        raise MissingData(f"{PREFIX}{name}", problem, remedy) from error


def _train_and_test(name: str, splits: Any) -> list[_Rows]:
    test = next((split for split in TEST_SPLITS if split in splits), None)
    if "train" not in splits or test is None:
        raise _unsuitable(name, "it does not have both splits train and test (or validation)")
    return [_find_columns(f"{name}/{split}", splits[split]) for split in ("train", test)]


def _find_columns(name: str, rows: Any) -> _Rows:
    datasets = importlib.import_module("datasets")
    features = rows.features or {}
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not classes:
        raise _unsuitable(name, "it does not have both an image and a class column")
    label = max(classes, key=lambda key: features[key].num_classes)
    image, encoded = _encoded_images(name, rows)
    return _Rows(name, encoded, image, label, tuple(features[label].names))


def _encoded_images(name: str, rows: Any) -> tuple[str, Any]:
    """Return the name of the image column, and the rows with encoded files in it."""
    datasets = importlib.import_module("datasets")
    features = rows.features or {}
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise _unsuitable(name, "it does not have both an image and a class column")
    return images[0], rows.with_format(None).cast_column(images[0], datasets.Image(decode=False))


def _read_file(value: Any, name: str) -> bytes:
    """Return an image file, which is in the row or at the path in the row."""
    try:
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        import fsspec  # slow to import

        with fsspec.open(value["path"], "rb") as file:
            return file.read()
    except Exception as error:  # a missing image, or any error of a disk or network
        raise BadImage(name, f"it cannot be read ({error})") from error


def _unsuitable(name: str, problem: str) -> MissingData:
    remedy = "Use another dataset, or save its images to class folders and use those."
    return MissingData(f"{PREFIX}{name}", problem, remedy)

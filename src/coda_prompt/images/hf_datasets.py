"""Datasets of the Hugging Face Hub, folders and object stores, by the `datasets` package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coda_prompt.errors import BadImage, MissingData, MissingExtra, WrongType
from coda_prompt.images.reading import open_image
from coda_prompt.images.sources import Source, Split
from coda_prompt.storage.hub import request_metadata

PREFIX = "hub:"
TEST_SPLITS = ("test", "validation")
"""Names of test splits; the first that exists is used."""


class HubSplit(Split):
    """A split of a dataset; images are read and decoded on access."""

    def __init__(self, name: str, rows: Any, class_names: tuple[str, ...] = ()) -> None:
        """Find the columns with the images and with their classes.

        Args:
            name: What messages and the fingerprint call it.
            rows: A `datasets.Dataset`; the image files of an `IterableDataset` are read into one.
            class_names: The classes, if another split decides them.
        """
        self.name = name
        self.image_column, self.rows = _encoded_images(name, _indexable(name, rows))
        column, names = _class_column(name, self.rows)
        self.class_names = class_names or names
        labels = self.rows[column][:]
        if any(isinstance(label, str) for label in labels):
            positions = {each: row for row, each in enumerate(self.class_names)}
            labels = [positions.get(label) for label in labels]
        missing = next((at for at, row in enumerate(labels) if row is None or row < 0), None)
        if missing is not None:
            raise _unsuitable(self.name, f"image {missing} has no class")
        self.labels = np.asarray(labels, np.int64)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        name = f"{self.name}[{index}]"
        content = _read_file(self.rows[index][self.image_column], name)
        return open_image(content, min_side, name)

    def fingerprint(self) -> str:
        """Hash the name and all labels; images are not read."""
        return hashlib.sha256(f"{self.name}\n".encode() + self.labels.tobytes()).hexdigest()


def hub_source(name: str) -> Source:
    """Open a dataset with an image column, a class column and the splits train and test.

    Of several class columns the one with the most classes is used: CIFAR-100 also has a column of
    20 superclasses.

    Args:
        name: `owner/name` on the hub; a folder, of files or as `save_to_disk` writes it, which is
            memory-mapped; or the URL of a folder of Parquet files, such as `s3://bucket/photos`.
    """
    splits = _load_dataset(name)
    part = next((each for each in TEST_SPLITS if each in splits), None)
    if "train" not in splits or part is None:
        raise _unsuitable(name, "it does not have both splits train and test (or validation)")
    train = HubSplit(f"{name}/train", splits["train"])
    test = HubSplit(f"{name}/{part}", splits[part], train.class_names)
    return Source(name, train.class_names, train, test)


def open_hub_split(name: str, split: str) -> HubSplit:
    """Open one split of a dataset."""
    splits = _load_dataset(name)
    if split not in splits:
        raise _unsuitable(name, f"it has no split {split} (but {', '.join(sorted(splits))})")
    return HubSplit(f"{name}/{split}", splits[split])


def is_dataset(data: object) -> bool:
    """Return whether this is a `datasets.Dataset` or `IterableDataset`.

    Raises:
        WrongType: It is a `DatasetDict`, of which one split has to be chosen.
    """
    if isinstance(data, dict) and hasattr(data, "column_names"):
        splits = ", ".join(f"data['{split}']" for split in data)
        raise WrongType(data, "images", f"one of its splits ({splits})")
    return hasattr(data, "features") and hasattr(data, "column_names")


def image_files(name: str, rows: Any) -> list[bytes]:
    """Return the image files of a dataset, with or without a class column."""
    column, encoded = _encoded_images(name, _indexable(name, rows))
    values = enumerate(encoded[column])
    return [_read_file(value, f"{name}[{number}]") for number, value in values]


def _load_dataset(name: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra(f"{PREFIX}{name}", "datasets") from error
    unreachable = None
    try:
        if "://" in name:
            patterns = datasets.data_files.get_data_patterns(name)
            files = {part: [f"{name}/{each}" for each in found] for part, found in patterns.items()}
            return datasets.load_dataset("parquet", data_files=files)
        if Path(name, "dataset_dict.json").exists():
            return datasets.load_from_disk(name)
        unreachable = None if Path(name).exists() else _network_problem(name)
        with _offline(datasets) if unreachable else contextlib.nullcontext():
            return datasets.load_dataset(name)
    except Exception as error:  # the package and the network raise many types
        problem = f"the dataset could not be loaded ({unreachable or error})"
        remedy = "Check its name (owner/dataset) and the network. Without a network, download it "
        remedy += "on another machine first."
        raise MissingData(f"{PREFIX}{name}", problem, remedy) from error


def _network_problem(name: str) -> str | None:
    """Return why the hub cannot be reached; None if it answers."""
    from huggingface_hub import errors, hf_hub_url

    try:
        request_metadata(hf_hub_url(name, "README.md", repo_type="dataset"))
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return None  # it answers, or the name is wrong: the package has a message for that
    except Exception as error:  # noqa: BLE001 (of any HTTP library)
        return f"the hub cannot be reached: {' '.join(str(error).split())}"
    return None


@contextlib.contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Let the package use its cache at once: without a network it retries for 25 seconds."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _class_column(name: str, rows: Any) -> tuple[str, tuple[str, ...]]:
    """Return the name of the class column, and the names of the classes."""
    datasets, features = importlib.import_module("datasets"), rows.features
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if classes:
        label = max(classes, key=lambda key: features[key].num_classes)
        return label, tuple(features[label].names)
    texts = [key for key, kind in features.items() if kind == datasets.Value("string")]
    if len(texts) > 1 and "label" in texts:
        texts = ["label"]
    if len(texts) != 1:
        problem = f"it has no class column (a ClassLabel) among {', '.join(features)}"
        raise _unsuitable(name, f"{problem}; dataset.class_encode_column(NAME) makes one")
    return texts[0], tuple(sorted({text for text in rows[texts[0]] if text is not None}))


def _indexable(name: str, rows: Any) -> Any:
    """Return a `datasets.Dataset`; the image files of an `IterableDataset` are read into it."""
    if hasattr(rows, "__len__"):
        return rows
    datasets = importlib.import_module("datasets")
    _, encoded = _encoded_images(name, rows)
    return datasets.Dataset.from_list(list(encoded), features=encoded.features)


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

        filesystem, path = fsspec.core.url_to_fs(value["path"])
        return bytes(filesystem.cat_file(path))
    except Exception as error:  # a missing image, or any error of a disk or network
        raise BadImage(name, f"it cannot be read ({error})") from error


def _unsuitable(name: str, problem: str) -> MissingData:
    remedy = "Use another dataset, or save its images to class folders and use those."
    return MissingData(f"{PREFIX}{name}", problem, remedy)

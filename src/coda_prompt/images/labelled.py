"""Labelled images from what a user names: folders, datasets, arrays with labels."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.console import class_name
from coda_prompt.errors import (
    BadImage,
    BadOption,
    CodaError,
    MissingData,
    WrongFolder,
    WrongType,
    counted,
)
from coda_prompt.images import folders, hf_datasets
from coda_prompt.images.hf_datasets import HubSplit
from coda_prompt.images.inputs import (
    DEPTHS,
    PAIRS,
    Channels,
    as_image,
    image_items,
    is_loader,
    is_tensor,
    loader_items,
    local_path,
)
from coda_prompt.images.kinds import is_drawing
from coda_prompt.images.reading import FULL_SIZE, heic_hint
from coda_prompt.images.sources import FileSplit, Integers, Split

MAX_SAMPLES = 40
"""Images of a lesson whose size and kind are examined."""
CHECKED_SIDE = 128
"""Pixels at which JPEGs are decoded to find unreadable ones."""


class MemorySplit(Split):
    """Images in memory, or items of a dataset that are decoded when needed."""

    def __init__(self, images: Any, labels: Integers) -> None:
        self.images, self.labels = images, labels
        self.thread_safe = isinstance(images, list | np.ndarray)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return as_image(self.images[index], min_side)

    def fingerprint(self) -> str:
        """Return a hash of all pixels and labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in range(len(self)):
            image = self.image(index)
            digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
        return digest.hexdigest()


class _SelectedSplit(Split):
    """Some of the images of a split."""

    def __init__(self, whole: Split, positions: Integers, labels: Integers) -> None:
        self.whole, self.positions, self.labels = whole, positions, labels

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return self.whole.image(int(self.positions[index]), min_side)

    def fingerprint(self) -> str:
        """Return a hash of the whole split and of what is selected."""
        digest = hashlib.sha256(self.whole.fingerprint().encode())
        digest.update(self.positions.tobytes() + self.labels.tobytes())
        return digest.hexdigest()


def _located(split: Split, index: int) -> tuple[Split, int]:
    """Return the split that an image was selected from, and its position there."""
    while isinstance(split, _SelectedSplit):
        index = int(split.positions[index]) if len(split.positions) else 0
        split = split.whole
    return split, index


class Sample(NamedTuple):
    """Size and kind of an image."""

    size: tuple[int, int]
    drawing: bool
    """Whether it is a drawing and not a photograph."""


@dataclass(frozen=True)
class Labelled:
    """Images with their classes; a split's labels are positions in `names`."""

    split: Split
    names: tuple[str, ...]
    left_out: tuple[CodaError, ...] = ()
    """Classes that cannot be used, which were left out."""
    remarks: tuple[str, ...] = ()
    """Other things that were left out, and why."""
    integers: bool = False
    """Whether the classes were given as integers."""

    @cached_property
    def samples(self) -> list[Sample]:
        """Images at equal distances over the whole split."""
        count = len(self.split.labels)
        indices = np.unique(np.linspace(0, count - 1, min(count, MAX_SAMPLES)).astype(int))
        # one at a time: a decoded photograph takes tens of megabytes
        samples = []
        for index in indices.tolist():
            with contextlib.suppress(BadImage):  # the lesson reports it
                image = self.decode(index, CHECKED_SIDE, threading.Lock())
                samples.append(Sample(image.info.get(FULL_SIZE, image.size), is_drawing(image)))
        return samples

    def name(self, index: int) -> str:
        """Return the path of an image; its class and number if it is no file."""
        split, position = _located(self.split, index)
        if isinstance(split, FileSplit):
            return split.paths[position]
        return f"image {position} ({self.names[self.split.labels[index]]})"

    def decode(self, index: int, min_side: int, lock: threading.Lock) -> Image.Image:
        """Decode an image; called from several threads.

        Args:
            index: Position of the image.
            min_side: Pixels that its shorter side needs.
            lock: Held while a dataset is asked, which may not be made for threads.

        Raises:
            BadImage: It cannot be read.
            BadOption: Its array cannot be used, a mistake that concerns all images.
        """
        safe = _located(self.split, 0)[0].thread_safe
        try:
            with contextlib.nullcontext() if safe else lock:
                return self.split.image(index, min_side)
        except CodaError:
            raise
        except Exception as error:  # decoders and datasets may raise anything
            reason = " ".join(str(error).split()).rstrip(".")
            raise BadImage(f"image {index}", reason) from error

    def selected(self, positions: NDArray[np.int64]) -> Labelled:
        """Keep the images at these positions, and the classes that have one of them."""
        count = len(self.split.labels)
        if len(positions) == count:
            return self
        labels = self.split.labels[positions]
        present = np.unique(labels)
        split = _SelectedSplit(self.split, positions, np.searchsorted(present, labels))
        return replace(self, split=split, names=tuple(self.names[row] for row in present))

    def of_classes(self, names: Sequence[str]) -> Labelled | None:
        """Keep the images of some classes; None if there are none."""
        rows = [row for row, name in enumerate(self.names) if name in names]
        return self.selected(np.flatnonzero(np.isin(self.split.labels, rows))) if rows else None

    def only(self, names: Sequence[str]) -> Labelled:
        """Leave out the classes that are not among `names`, and say so."""
        counts, kept = self.counts(), self.of_classes(names)
        reasons = [
            MissingData(f"class '{name}'", f"{counts[name]} images", "It has not been learned.")
            for name in self.names
            if name not in names
        ]
        return replace(kept or self, left_out=(*self.left_out, *reasons))

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes with the images or labels; every file is looked at for it."""
        return self.split.fingerprint()

    @property
    def files_fingerprint(self) -> str | None:
        """The fingerprint of files; None if the images are in no files."""
        split, _ = _located(self.split, 0)
        return self.fingerprint if isinstance(split, FileSplit) else None

    def counts(self) -> dict[str, int]:
        """Return the number of images of each class."""
        counts = np.bincount(self.split.labels, minlength=len(self.names))
        return {name: int(count) for name, count in zip(self.names, counts, strict=True)}


def labelled(
    data: Any,
    labels: Any = None,
    *,
    part: str = "train",
    skip_bad: bool = False,
    channels: Channels = "rgb",
) -> Labelled:
    """Open images to learn or to evaluate. Image files are decoded once to find unreadable ones.

    Args:
        data: A folder of class folders, `hub:owner/name`, a `DataLoader`, dataset or generator of
            (image, label) pairs, or what `labelled` returned. Together with `labels`: images, as
            `image_items` accepts them.
        labels: Class names, one for each image, or one name for all of them.
        part: The split of a hub dataset.
        skip_bad: Leave out images that cannot be read instead of failing.
        channels: Order of the colours in arrays that are passed with labels.

    Raises:
        BadImages: Images that cannot be read, without `skip_bad`.
        BadOption: The data or labels cannot be used.
        MissingData: The data are not there.
        WrongType: The data or labels are of another type.
    """
    if isinstance(data, Labelled):
        return data
    if not isinstance(data, str | os.PathLike):
        images = _open_items(data, labels, skip_bad, channels)
    elif labels is not None:
        problem = "a folder names its classes itself; leave them out"
        raise BadOption("the images", "labels", problem)
    elif isinstance(data, str) and data.startswith(hf_datasets.PREFIX):
        name = data.removeprefix(hf_datasets.PREFIX)
        split = hf_datasets.open_hub_split(name, part)
        images = Labelled(split, split.class_names)
    else:
        images = _open_folder(local_path(data), skip_bad)
    images = _with_class_names(images)
    present = np.unique(images.split.labels)
    if not len(present):
        raise BadOption("the images", "data", "there is none")
    if len(present) < len(images.names):  # a dataset may name classes without images
        images.split.labels = np.searchsorted(present, images.split.labels)
        images = replace(images, names=tuple(images.names[row] for row in present))
    return images


def _with_class_names(images: Labelled) -> Labelled:
    """Join classes whose names look alike, under the one spelling of `class_name`."""
    names, rows = _number([class_name(name) for name in images.names])
    if names == images.names:
        return images
    images.split.labels = rows[images.split.labels]
    return replace(images, names=names)


def _open_items(data: Any, labels: Any, skip_bad: bool, channels: Channels) -> Labelled:
    """Open a dataset, or images with labels."""
    if labels is None:
        return _open_dataset(data, skip_bad)
    grey_stack = isinstance(data, np.ndarray) and data.ndim == 3 and data.shape[2] not in DEPTHS
    # as many labels as rows: not one image of C x H x W
    items = data if grey_stack and len(data) == len(labels) else image_items(data, channels)
    if isinstance(labels, str):
        labels = [labels] * len(items)
    names, rows = _number([str(label) for label in _check_labels(labels)])
    if len(rows) != len(items):
        problem = f"{counted(len(rows), 'label')} for {counted(len(items), 'image')}"
        raise BadOption("the images", "labels", problem)
    split: FileSplit | MemorySplit = MemorySplit(items, rows)
    if all(isinstance(item, str | os.PathLike) for item in items):
        split = FileSplit([local_path(item) for item in items], rows)
    return Labelled(split, names, integers=_are_integers(labels))


def _open_folder(root: Path, skip_bad: bool) -> Labelled:
    if not root.is_dir():
        problem = "this is not a folder" if root.exists() else "there is no such folder"
        raise MissingData(root, problem, "Name a folder with one folder of images per class.")
    listed = folders.class_folders(root)
    names = list(listed.paths)
    if set(names) <= folders.SPLIT_NAMES:
        training = root / ("train" if "train" in names else names[0])
        problem = f"it contains {', '.join(names)}, which are splits of a dataset and not classes"
        raise WrongFolder(root, problem, "", [training])
    files, others = folders.Files(), list[str]()
    for name, path in listed.paths.items():
        files[name], others_here = folders.files_below(path, listed.ancestors)
        others += others_here
    folders.refuse_nested(listed, files)
    hint = heic_hint(others) if others else None
    split = folders.file_split(files)
    remedy = "Add images, remove the folder, or pass --skip-bad (skip_bad=True)"
    empty = [
        MissingData(
            root / name, f"class '{name}' has no image", f"{remedy}; {hint}." if hint else remedy
        )
        for name, paths in files.items()
        if not paths and not skip_bad
    ]
    if empty:
        raise empty[0]
    images = Labelled(split, tuple(files))
    remarks = [
        f"class '{name}' has no image: left out" for name, paths in files.items() if not paths
    ]
    if listed.loose_images:
        remarks.append(
            f"{listed.loose_images} images beside the class folders are skipped: they have no class"
        )
    if others:
        endings = Counter(os.path.splitext(other)[1].lower() or "no ending" for other in others)
        kinds = ", ".join(f"{count} with {ending}" for ending, count in endings.most_common(5))
        remarks.append(f"files without the extension of an image are left out ({kinds})")
    if hint is not None:
        remarks.append(hint)
    return replace(images, remarks=tuple(remarks))


def _open_dataset(data: Any, skip_bad: bool) -> Labelled:
    """Open (image, label) pairs or a `datasets.Dataset`."""
    if hf_datasets.is_dataset(data):
        split = HubSplit("the dataset", data)
        return Labelled(split, split.class_names)
    inner = data
    if is_loader(data):
        data = list(loader_items(data))
    elif isinstance(data, Iterator):
        data = list(data)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, dict):
        raise WrongType(data, "labelled images", PAIRS)
    if not len(data):
        raise BadOption("the images", "data", "there is none")
    first = None
    with contextlib.suppress(BadImage):  # reported later, with all other unreadable images
        first = data[0]
    if isinstance(first, str | os.PathLike | Image.Image | bytes):
        raise BadOption("the images", "labels", "paths and images need labels: pass them")
    try:
        targets = getattr(data, "targets", None)
        if targets is None:
            targets = [data[index][1] for index in range(len(data))]
    except (TypeError, IndexError, KeyError) as error:
        problem = "without labels, it must contain pairs of an image and its class"
        raise BadOption("the images", "data", problem) from error
    class_names = getattr(inner, "classes", None)
    while class_names is None and hasattr(inner, "dataset"):  # a subset of another dataset
        inner = inner.dataset
        class_names = getattr(inner, "classes", None)
    names, rows = _number(
        [
            str(class_names[label]) if class_names and isinstance(label, int) else str(label)
            for label in _check_labels(targets)
        ]
    )
    return Labelled(
        MemorySplit(data, rows), names, integers=class_names is None and _are_integers(targets)
    )


def _are_integers(labels: Any) -> bool:
    return not isinstance(labels, str) and all(
        isinstance(each, int) and not isinstance(each, bool) for each in _check_labels(labels)
    )


def _number(names: Sequence[str]) -> tuple[tuple[str, ...], Integers]:
    """Return the distinct names in order, and the position of each name among them."""
    rows = {name: row for row, name in enumerate(dict.fromkeys(names))}
    return tuple(rows), np.array([rows[name] for name in names], np.int64)


def _check_labels(labels: Any) -> list[str | int]:
    if not hasattr(labels, "__iter__"):
        raise WrongType(labels, "labels", "class names, one for each image")
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    values = [v.item() if is_tensor(v) or isinstance(v, np.generic) else v for v in values]
    if not all(isinstance(value, str | int) for value in values):
        raise BadOption("the images", "labels", "class names are strings or integers")
    return values

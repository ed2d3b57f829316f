"""What people hand over as images: folders, paths, PIL images, arrays, datasets."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset

from coda_prompt.data import hf_datasets, shards
from coda_prompt.data.folders import (
    class_folders,
    images_below,
    images_by_class,
    is_valid_class_name,
    other_files,
)
from coda_prompt.data.hf_datasets import HubSplit
from coda_prompt.data.images import SUPPORTED_MODES, apply_exif_orientation, open_image
from coda_prompt.data.shards import ShardSplit
from coda_prompt.data.sources import ArraySplit, FileSplit, Integers
from coda_prompt.errors import BadImage, BadImages, BadOption, MissingData

Paths = str | os.PathLike[str]


class MemorySplit:
    """Images that are in memory, or that a dataset gives one by one."""

    domains: Integers | None = None

    def __init__(self, images: Any, labels: Integers) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        held = self.images[index]
        return as_image(held[0] if isinstance(held, tuple | list) else held)

    def only(self, places: Sequence[int]) -> MemorySplit:
        chosen = self.images if len(places) == len(self) else Subset(self.images, places)
        return MemorySplit(chosen, self.labels[np.asarray(places, np.int64)])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.labels.tobytes())
        for index in range(len(self)):
            image = self.image(index)
            digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Labelled:
    """Images with their classes; a split's labels are positions in `names`."""

    split: FileSplit | ArraySplit | MemorySplit | HubSplit | ShardSplit
    names: tuple[str, ...]
    bad: tuple[BadImage, ...] = ()
    """Images that cannot be read and were left out."""
    remarks: tuple[str, ...] = ()
    """What else was left out, and why."""

    def counts(self) -> dict[str, int]:
        counted = np.bincount(self.split.labels, minlength=len(self.names))
        return {name: int(count) for name, count in zip(self.names, counted, strict=True)}


def labelled(
    data: Any, labels: Any = None, *, part: str = "train", skip_bad: bool = False
) -> Labelled:
    """Images to learn or to test on. Every file is decoded once before anything begins.

    `part` is which part of a dataset of the hub is meant by its name.
    """
    if isinstance(data, Labelled):
        return data
    found = _labelled(data, labels, part, skip_bad)
    present = np.unique(found.split.labels)
    if not len(present):
        raise BadOption("the images", "data", "there is none")
    if len(present) < len(found.names):  # classes a dataset only knows by name
        found.split.labels = np.searchsorted(present, found.split.labels)
        found = replace(found, names=tuple(found.names[row] for row in present))
    return found


def _labelled(data: Any, labels: Any, part: str, skip_bad: bool) -> Labelled:
    if isinstance(data, str | os.PathLike) and labels is not None:
        raise BadOption("the images", "labels", "a folder names its classes itself; leave them out")
    if isinstance(data, str) and data.startswith(hf_datasets.PREFIX):
        return Labelled(*hf_datasets.open_hub_split(data.removeprefix(hf_datasets.PREFIX), part))
    if isinstance(data, str) and data.startswith(shards.PREFIX):
        return Labelled(*shards.open_shard_split(data.removeprefix(shards.PREFIX), part))
    if isinstance(data, str | os.PathLike):
        return _folder(Path(data), skip_bad)
    if labels is None:
        return _dataset(data, skip_bad)
    split = unlabelled(data)
    named = [str(label) for label in _checked_labels(labels)]
    if len(named) != len(split):
        raise BadOption("the images", "labels", f"{len(named)} labels for {len(split)} images")
    names, rows = _numbered(named)
    if isinstance(split, FileSplit):
        return _readable(split.paths, rows, names, skip_bad)
    split.labels = rows
    if isinstance(split, MemorySplit):
        return _decodable(split, names, skip_bad)
    return Labelled(split, names)


def unlabelled(data: Any) -> FileSplit | ArraySplit | MemorySplit:
    """Images without classes: one or many paths, PIL images, arrays or tensors.

    One image is an array of H x W or H x W x 3, or a tensor of H x W or C x H x W.
    """
    if isinstance(data, Image.Image) or _is_one(data):
        data = [data]
    if isinstance(data, str | os.PathLike):
        data = image_paths([data])
    grey_or_rgb = isinstance(data, np.ndarray) and (data.ndim == 3 or data.shape[3:] == (3,))
    if grey_or_rgb and data.dtype == np.uint8:
        return ArraySplit(data, np.zeros(len(data), np.int64))
    data = list(data)
    nothing = np.zeros(len(data), np.int64)
    if data and all(isinstance(item, str | os.PathLike) for item in data):
        return FileSplit(data, nothing)
    return MemorySplit(data, nothing)


def _is_one(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return data.dim() == 2 or (data.dim() == 3 and data.shape[0] in (1, 3, 4))
    if isinstance(data, np.ndarray):
        return data.ndim == 2 or (data.ndim == 3 and data.shape[2] in (1, 3, 4))
    return False


def image_paths(places: Iterable[Paths]) -> list[str]:
    """Files, the images in and below folders, and what patterns like `*.png` stand for.

    A name that stands for nothing stays, to be told with the files that cannot be read.
    """
    paths: list[str] = []
    for place in places:
        root = Path(place).expanduser()
        there = root.exists() or root.is_symlink()
        matches = [str(root)] if there else sorted(glob.glob(str(root), recursive=True))
        for match in matches or [str(root)]:
            if not os.path.isdir(match):
                paths.append(match)
            elif found := images_below(Path(match)):
                paths += found
            elif there:
                raise MissingData(root, "there is no image in it", "Name files or folders.")
    return paths


def as_image(value: Any) -> Image.Image:
    """A PIL image from what a list or a dataset holds."""
    if isinstance(value, Image.Image):
        if not (value.width and value.height):
            raise BadOption("an image", "shape", "it has no pixel")
        if value.mode not in SUPPORTED_MODES:
            raise BadOption("an image", "mode", f"'{value.mode}' cannot be turned into RGB")
        return apply_exif_orientation(value.copy())
    if isinstance(value, str | os.PathLike):
        return open_image(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        if value.ndim == 3 and value.shape[0] in (1, 3, 4):
            value = value.transpose(1, 2, 0)  # H x W x C
    array = np.asarray(value)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if np.issubdtype(array.dtype, np.floating) and array.size and np.isfinite(array).all():
        if array.min() < 0 or array.max() > 1:
            raise BadOption("an image", "values", "floating-point pixels have to be in [0, 1]")
        array = np.rint(array * 255).astype(np.uint8)
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not shaped or not array.size:
        raise BadOption(
            "an image", "shape", f"cannot take {array.dtype} of shape {array.shape} for an image"
        )
    return Image.fromarray(array)


def _folder(root: Path, skip_bad: bool) -> Labelled:
    root = root.expanduser()
    if not root.is_dir():
        problem = "this is not a folder" if root.exists() else "there is no such folder"
        raise MissingData(root, problem, "Point at a folder with one folder of images per class.")
    folders, loose = class_folders(root)
    if folders.keys() and folders.keys() <= {"train", "test", "val", "valid", "validation"}:
        training = root / ("train" if "train" in folders else next(iter(folders)))
        raise MissingData(
            root,
            f"it holds {', '.join(folders)}, which are parts of a dataset and no classes",
            f"Point at the one to learn from: {training}.",
        )
    files = images_by_class(root, lenient=True)  # what is wrong is told together
    empty = [name for name, paths in files.items() if not paths]
    if empty and not skip_bad:
        remedy = "Put images in it, remove the folder, or pass --skip-bad (skip_bad=True)."
        raise MissingData(root / empty[0], f"class '{empty[0]}' has no image", remedy)
    rows = np.repeat(np.arange(len(files)), [len(paths) for paths in files.values()])
    paths = tuple(path for group in files.values() for path in group)
    found = _readable(paths, rows, tuple(files), skip_bad)
    remarks = list(found.remarks)
    if loose:
        remarks.append(f"{loose} images beside the class folders are left out: they have no class")
    if others := other_files(root):
        kinds = ", ".join(f"{count} with {ending}" for ending, count in others.most_common(5))
        remarks.append(f"files that are no images by their names are left out ({kinds})")
    return replace(found, remarks=tuple(remarks))


def _readable(
    paths: Sequence[str], rows: Integers, names: tuple[str, ...], skip_bad: bool
) -> Labelled:
    """All files that cannot be read are told together, or left out where that is wanted."""
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(_problem, paths))
    good, bad, remarks = _sorted_out(problems, rows, names, skip_bad)
    return Labelled(FileSplit([paths[place] for place in good], rows[good]), names, bad, remarks)


def _decodable(split: MemorySplit, names: tuple[str, ...], skip_bad: bool) -> Labelled:
    """As `_readable`, for what a list or a dataset holds."""

    def problem(place: int) -> BadImage | None:
        try:
            split.image(place).load()
        except BadImage as found:
            return found
        except BadOption:
            raise  # the caller's mistake, the same for all images
        except Exception as found:  # noqa: BLE001 (a decoder, or a dataset of others, may raise anything)
            return BadImage(f"image {place}", " ".join(str(found).split()).rstrip("."))
        return None

    problems = [problem(place) for place in range(len(split))]
    good, bad, remarks = _sorted_out(problems, split.labels, names, skip_bad)
    return Labelled(split.only(good), names, bad, remarks)


def _sorted_out(
    problems: Sequence[BadImage | None], rows: Integers, names: tuple[str, ...], skip_bad: bool
) -> tuple[list[int], tuple[BadImage, ...], tuple[str, ...]]:
    """Places of good images, the bad ones, and a word on classes that have none left."""
    bad = tuple(problem for problem in problems if problem is not None)
    if bad and not skip_bad:
        raise BadImages(bad)
    good = [place for place, problem in enumerate(problems) if problem is None]
    present = {int(rows[place]) for place in good}
    empty = [name for row, name in enumerate(names) if row not in present]
    if bad and not good:
        raise BadImages(bad)
    remarks = tuple(f"class '{name}' has no image that can be read: left out" for name in empty)
    return good, bad, remarks


def _problem(path: str) -> BadImage | None:
    try:
        open_image(path)
    except BadImage as problem:
        return problem
    return None


def _dataset(data: Any, skip_bad: bool) -> Labelled:
    """Anything with a length that gives (image, label) pairs, or a dataset of the hub's package."""
    if hasattr(data, "features") and hasattr(data, "column_names"):
        return Labelled(*hf_datasets.split_from_rows("the dataset", data))
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise BadOption(
            "the images", "data", f"cannot take {type(data).__name__} for labelled images"
        )
    if not len(data):
        raise BadOption("the images", "data", "there is none")
    first = None
    with contextlib.suppress(BadImage):  # it is told with all others that cannot be read
        first = data[0]
    if isinstance(first, str | os.PathLike | Image.Image):
        raise BadOption("the images", "labels", "paths and images do not say their class: give it")
    try:
        targets = getattr(data, "targets", None)
        found = [data[index][1] for index in range(len(data))] if targets is None else targets
    except (TypeError, IndexError, KeyError) as error:
        raise BadOption(
            "the images", "data", "without labels it has to give pairs of an image and its class"
        ) from error
    known, inner = getattr(data, "classes", None), data
    while known is None and hasattr(inner, "dataset"):  # a part of another dataset
        inner = inner.dataset
        known = getattr(inner, "classes", None)
    labels = _checked_labels(found)
    names, rows = _numbered(
        [str(known[label]) if known and isinstance(label, int) else str(label) for label in labels]
    )
    return _decodable(MemorySplit(data, rows), names, skip_bad)


def _numbered(names: Sequence[str]) -> tuple[tuple[str, ...], Integers]:
    """The names without repetition, and where each stands among them."""
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return tuple(order), np.array([order[name] for name in names], np.int64)


def _checked_labels(labels: Any) -> list[str | int]:
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    values = [v.item() if isinstance(v, torch.Tensor | np.generic) else v for v in values]
    if not all(isinstance(value, str | int) for value in values):
        raise BadOption("the images", "labels", "classes are named by strings or whole numbers")
    for value in values:
        if isinstance(value, str) and not is_valid_class_name(value):
            raise BadOption("the images", "labels", f"{value!r} cannot be the name of a class")
    return values

"""Where labelled images come from: arrays in memory, and folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from coda_prompt.data.folders import EXPECTED_LAYOUT, class_folders, images_by_class
from coda_prompt.data.images import open_image
from coda_prompt.errors import BadOption, MissingData

Integers = NDArray[np.int64]


class Split(Protocol):
    """Labelled images, decoded one by one. It holds no open file, so workers can have a copy."""

    @property
    def labels(self) -> Integers: ...

    @property
    def domains(self) -> Integers | None: ...

    def __len__(self) -> int: ...

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        """`min_side`: how long the shorter side has to be; a smaller image may come then."""
        ...

    def fingerprint(self) -> str: ...


class ArraySplit:
    """Images in memory: uint8, N x H x W (grey) or N x H x W x 3 (RGB)."""

    def __init__(
        self, images: NDArray[np.uint8], labels: ArrayLike, domains: ArrayLike | None = None
    ) -> None:
        images = np.asarray(images)
        shaped = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not shaped or 0 in images.shape[1:]:
            found = f"{images.dtype} of shape {images.shape}"
            raise BadOption(
                "ArraySplit", "images", f"needs uint8 of N x H x W or N x H x W x 3, got {found}"
            )
        self.images = images
        self.labels = _integers("ArraySplit", "labels", labels, len(images))
        self.domains = (
            None if domains is None else _integers("ArraySplit", "domains", domains, len(images))
        )

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return Image.fromarray(self.images[index])

    def fingerprint(self) -> str:
        """A hash of all pixels and labels."""
        digest = hashlib.sha256(f"{self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(self.labels.data)
        return digest.hexdigest()


class FileSplit:
    """Image files, opened when asked for; one that cannot be read is a `BadImage` with its path."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        labels: ArrayLike,
        domains: ArrayLike | None = None,
    ) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)
        self.labels = _integers("FileSplit", "labels", labels, len(self.paths))
        self.domains = (
            None if domains is None else _integers("FileSplit", "domains", domains, len(self.paths))
        )

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        return open_image(self.paths[index], min_side)

    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and labels; their bytes are not read."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            size = os.stat(path).st_size
            digest.update(f"{os.path.basename(path)}/{size}/{label}\n".encode())
        return digest.hexdigest()


def _integers(owner: str, field: str, values: ArrayLike, count: int) -> Integers:
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
    """A dataset: its classes, its two splits, and what a report has to say about them."""

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split
    domain_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """A hash that another dataset, split or labelling would not have."""
        parts = (*self.class_names, self.train.fingerprint(), self.test.fingerprint())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __post_init__(self) -> None:
        owner = f"source '{self.name}'"
        for field, names in (
            ("class_names", self.class_names),
            ("domain_names", self.domain_names),
        ):
            if len(set(names)) < len(names):
                double = next(name for name in names if names.count(name) > 1)
                raise BadOption(owner, field, f"'{double}' is there twice")
        for part, split in (("train", self.train), ("test", self.test)):
            _check_range(owner, f"{part} labels", split.labels, "class_names", self.class_names)
            if split.domains is not None:
                _check_range(
                    owner, f"{part} domains", split.domains, "domain_names", self.domain_names
                )


def _check_range(
    owner: str, field: str, values: Integers, named: str, names: Sequence[str]
) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < len(names)):
        raise BadOption(
            owner,
            field,
            f"run from {values.min()} to {values.max()}, but {named} has {len(names)} names "
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
    """A source of uint8 arrays; classes and domains without names are called 0, 1, 2, ..."""
    train = ArraySplit(train_images, train_labels, train_domains)
    test = ArraySplit(test_images, test_labels, test_domains)
    if class_names is None:
        class_names = _numbered(train.labels, test.labels)
    if domain_names is None:
        domain_names = _numbered(train.domains, test.domains)
    return Source(name, tuple(class_names), train, test, tuple(domain_names), tuple(notes))


def _numbered(*arrays: Integers | None) -> tuple[str, ...]:
    most = max(
        (int(array.max()) for array in arrays if array is not None and len(array)), default=-1
    )
    return tuple(str(number) for number in range(most + 1))


_SPLIT_NAMES = frozenset(("train", "test", "val", "valid", "validation", "dev"))


def folder_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """Images in folders named after their classes: `train|test/class/...`, or `class/...`.

    Without `train/` and `test/`, a fifth of each class, drawn by the seed, is set apart for the
    test.
    """
    root = Path(os.path.expanduser(path))
    if not os.path.isdir(root):
        problem = "this is not a folder" if os.path.exists(root) else "there is no such folder"
        raise MissingData(root, problem, EXPECTED_LAYOUT)
    name = root.resolve().name or str(root)
    folders, loose = class_folders(root)
    if {"train", "test"} <= folders.keys():
        return _split_folders(name, root, folders.keys() - {"train", "test"})
    if folders and folders.keys() <= _SPLIT_NAMES:
        raise MissingData(
            root,
            f"it has {_slashed(folders)} but not both train/ and test/",
            "Name the two parts train and test, or point at a folder of class folders to have "
            "it split 80/20.",
        )
    files = images_by_class(root)
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for class_name, paths in files.items():
        shuffled = sorted(paths, key=lambda path: _draw(seed, os.path.relpath(path, root)))
        kept = round(0.8 * len(paths))  # 1 of 1
        train[class_name], test[class_name] = sorted(shuffled[:kept]), sorted(shuffled[kept:])
    notes = [f"a random 80/20 split of each class (seed {seed}), as the folder has none of its own"]
    if loose:
        notes.append(f"{loose} images ignored that are in no class folder")
    if untested := sum(not paths for paths in test.values()):
        notes.append(f"{untested} classes too small to have a test image")
    return Source(name, tuple(files), _file_split(train), _file_split(test), notes=tuple(notes))


def _draw(seed: int, name: str) -> bytes:
    """A random number for a file: another file more or less hardly changes the split."""
    key = f"{seed}\0{name.replace(os.sep, '/')}"
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _split_folders(name: str, root: Path, ignored: Iterable[str]) -> Source:
    train, test = images_by_class(root / "train"), images_by_class(root / "test")
    if train.keys() != test.keys():
        differences = [
            f"only in {part}/: {', '.join(sorted(only)[:5])}{' ...' if len(only) > 5 else ''}"
            for part, only in (
                ("train", train.keys() - test.keys()),
                ("test", test.keys() - train.keys()),
            )
            if only
        ]
        raise MissingData(
            root,
            f"train/ and test/ have different classes ({'; '.join(differences)})",
            "Give both the same class folders.",
        )
    beside = _slashed(ignored)
    notes = (f"{beside} ignored beside train/ and test/",) if beside else ()
    return Source(name, tuple(train), _file_split(train), _file_split(test), notes=notes)


def _slashed(names: Iterable[str]) -> str:
    return ", ".join(f"{name}/" for name in sorted(names))


def _file_split(files: dict[str, list[str]]) -> FileSplit:
    """Labels are positions in the order of the mapping."""
    sizes = [len(paths) for paths in files.values()]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return FileSplit((path for paths in files.values() for path in paths), labels)

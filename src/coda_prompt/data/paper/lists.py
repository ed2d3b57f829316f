"""Datasets whose split is a pair of lists: image files with the ids of their classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coda_prompt.data.sources import FileSplit, Source
from coda_prompt.errors import CorruptFile, MissingData


class ListEntry(NamedTuple):
    """One line of a list."""

    path: str
    """Below the dataset's folder, with slashes: .../class/file."""
    label: int
    list: Path
    """The list it is from."""


def source_from_lists(
    name: str,
    folder: Path,
    train: Sequence[ListEntry],
    test: Sequence[ListEntry],
    domain_of: Callable[[str], str],
) -> Source:
    """The listed images in the lists' order and under the lists' class ids.

    A class is called after the folder of its images, a domain as `domain_of` says for a path.
    """
    everything = [*train, *test]
    class_names = _class_names(everything)
    _check_once(everything)
    _check_files(folder, everything)
    domain_names = tuple(sorted({domain_of(image.path) for image in everything}))
    number = {domain: index for index, domain in enumerate(domain_names)}

    def split(images: Sequence[ListEntry]) -> FileSplit:
        return FileSplit(
            (os.path.join(folder, image.path) for image in images),
            np.array([image.label for image in images], int),
            np.array([number[domain_of(image.path)] for image in images], int),
        )

    return Source(name, class_names, split(train), split(test), domain_names)


def check_path(path: str, listed_in: Path, depth: int) -> str:
    """The path, if it names a file `depth` folders below the dataset's and nothing outside."""
    parts = path.split("/")
    if len(parts) != depth + 1 or any(part in ("", ".", "..") for part in parts):
        wanted = "/".join(["folder"] * depth)
        raise CorruptFile(listed_in, f"'{path}' in it is not a path like {wanted}/file.jpg")
    return path


def _class_names(images: Iterable[ListEntry]) -> tuple[str, ...]:
    """The folder of each class id; the ids are 0, 1, ... without a gap."""
    images = list(images)
    folder_of: dict[int, str] = {}
    label_of: dict[str, int] = {}
    count = len({image.label for image in images})
    for image in images:
        if not 0 <= image.label < count:
            raise CorruptFile(
                image.list,
                f"label {image.label} of '{image.path}' is out of range: the lists have {count} "
                f"labels, for classes 0 to {count - 1}",
            )
        folder = image.path.split("/")[-2]
        one = folder_of.setdefault(image.label, folder)
        other = label_of.setdefault(folder, image.label)
        if one != folder or other != image.label:
            raise CorruptFile(
                image.list,
                f"'{image.path}' has label {image.label}, but elsewhere '{folder}' is {other} "
                f"and {image.label} is '{one}'",
            )
    return tuple(folder_of[label] for label in range(count))


def _check_once(images: Iterable[ListEntry]) -> None:
    seen: dict[str, Path] = {}
    for image in images:
        if image.path in seen:
            first = seen[image.path].name
            raise CorruptFile(image.list, f"'{image.path}' is in {first} already")
        seen[image.path] = image.list


def _check_files(folder: Path, images: Sequence[ListEntry]) -> None:
    """Folders are listed once each: to ask for every file takes minutes on a slow disk."""
    names: dict[str, frozenset[str]] = {}
    missing = []
    for image in images:
        parent, _, file = image.path.rpartition("/")
        if parent not in names:
            names[parent] = _names_in(folder / parent)
        if file not in names[parent]:
            missing.append(image)
    if missing:
        raise MissingData(
            folder / missing[0].path,
            f"{missing[0].list.name} lists this file, but it is not there ({len(missing)} of "
            f"{len(images)} listed files are missing)",
            "Extract the archives again, all of them, or use the lists that belong to them.",
        )


def _names_in(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()

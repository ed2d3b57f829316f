"""Sources whose splits are lists of image files and class ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coda_prompt.errors import CorruptFile, MissingData
from coda_prompt.images.sources import FileSplit, Source


class ListEntry(NamedTuple):
    """One line of a list."""

    path: str
    """Relative to the dataset's folder, with slashes: .../class/file."""
    label: int
    list: Path
    """The list that contains it."""


def source_from_lists(
    name: str,
    folder: Path,
    train: Sequence[ListEntry],
    test: Sequence[ListEntry],
    domain_of: Callable[[str], str],
) -> Source:
    """Make a source with the order and class ids of its lists.

    Args:
        name: name of the source.
        folder: the dataset's folder.
        train: entries of the training lists.
        test: entries of the test lists.
        domain_of: as in `with_domains`.

    Raises:
        CorruptFile: the class ids have gaps or contradict the folders, or an image is listed twice.
        MissingData: a listed file does not exist.
    """
    entries = [*train, *test]
    class_names = _class_names(entries)
    _check_unique(entries)
    _check_files(folder, entries)
    splits = [
        FileSplit(
            (os.path.join(folder, entry.path) for entry in part),
            np.array([entry.label for entry in part], int),
        )
        for part in (train, test)
    ]
    return with_domains(Source(name, class_names, splits[0], splits[1]), domain_of)


def with_domains(source: Source, domain_of: Callable[[str], str]) -> Source:
    """Return a source of files with domains, each of which `domain_of` finds from a path."""
    splits = [split for split in (source.train, source.test) if isinstance(split, FileSplit)]
    domains = [[domain_of(path) for path in split.paths] for split in splits]
    names = sorted(set().union(*domains))
    for split, each in zip(splits, domains, strict=True):
        split.domains = np.searchsorted(names, each)
    return replace(source, domain_names=tuple(names))


def check_path(path: str, listed_in: Path, depth: int) -> str:
    """Return the path if it is a file `depth` folders below the dataset's, else raise."""
    parts = path.split("/")
    if len(parts) != depth + 1 or any(part in ("", ".", "..") for part in parts):
        expected = "/".join(["folder"] * depth)
        raise CorruptFile(listed_in, f"'{path}' in it is not a path like {expected}/file.jpg")
    return path


def _class_names(entries: Sequence[ListEntry]) -> tuple[str, ...]:
    """Return the folder name of each class id; ids must be 0, 1, ... without gaps."""
    folder_of: dict[int, str] = {}
    label_of: dict[str, int] = {}
    count = len({entry.label for entry in entries})
    for entry in entries:
        if not 0 <= entry.label < count:
            problem = f"label {entry.label} of '{entry.path}' is out of range: the lists have "
            raise CorruptFile(entry.list, f"{problem}{count} labels, for classes 0 to {count - 1}")
        folder = entry.path.split("/")[-2]
        first_folder = folder_of.setdefault(entry.label, folder)
        first_label = label_of.setdefault(folder, entry.label)
        if first_folder != folder or first_label != entry.label:
            problem = f"'{entry.path}' has label {entry.label}, but elsewhere '{folder}' has label "
            problem += f"{first_label} and label {entry.label} is '{first_folder}'"
            raise CorruptFile(entry.list, problem)
    return tuple(folder_of[label] for label in range(count))


def _check_unique(entries: Iterable[ListEntry]) -> None:
    seen: dict[str, Path] = {}
    for entry in entries:
        if entry.path in seen:
            first = seen[entry.path].name
            raise CorruptFile(entry.list, f"'{entry.path}' is already in {first}")
        seen[entry.path] = entry.list


def _check_files(folder: Path, entries: Sequence[ListEntry]) -> None:
    """Check that all files exist; listing each folder once is much faster on a slow disk."""
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    present = {f"{parent}/{name}" for parent in folders for name in _list_folder(folder / parent)}
    missing = [entry for entry in entries if entry.path not in present]
    if missing:
        counts = f"{len(missing)} of {len(entries)} listed files are missing"
        problem = f"{missing[0].list.name} lists this file, but it does not exist ({counts})"
        remedy = "Extract all archives again, or use the lists that belong to them."
        raise MissingData(folder / missing[0].path, problem, remedy)


def _list_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []

"""Image files on disk, by class folder. Links are followed; hidden files are not seen."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from coda_prompt.console import escape_control_characters
from coda_prompt.data.images import SUFFIXES
from coda_prompt.errors import MissingData

EXPECTED_LAYOUT = "Point at a folder with one folder of images per class, or with train/ and test/."

Identities = frozenset[tuple[int, int]]  # device and inode


def class_folders(root: Path) -> tuple[dict[str, str], int]:
    """The folders in `root` by name, sorted, and how many images lie beside them."""
    above = _identities_above(root)
    folders, loose = {}, 0
    for entry in _entries(root):
        if _is_folder(entry):
            if _identity(entry.path) not in above:
                folders[_named(root, entry.name)] = entry.path
        elif _is_image(entry):
            loose += 1
    return dict(sorted(folders.items())), loose


def images_by_class(root: Path, *, lenient: bool = False) -> dict[str, list[str]]:
    """The images in and below each class folder, both sorted.

    A class without one and a link to a file that is not there are errors, unless the caller is
    lenient and sees to them itself.
    """
    folders, loose = class_folders(root)
    if not folders:
        found = f"{loose} images but no class folder" if loose else "no class folder"
        raise MissingData(root, f"there is {found} in it", EXPECTED_LAYOUT)
    above = _identities_above(root)
    files = {name: sorted(_images_below(folder, above)) for name, folder in folders.items()}
    if lenient:
        return files
    for name, paths in files.items():
        for path in paths:
            if os.path.islink(path) and not os.path.exists(path):
                raise MissingData(
                    path,
                    "this is a link to a file that is not there",
                    "Fetch the file or remove the link.",
                )
        if not paths:
            raise MissingData(
                folders[name],
                f"class '{name}' has no image",
                f"Put images in it ({', '.join(sorted(SUFFIXES))}) or remove the folder.",
            )
    return files


def other_files(root: Path) -> Counter[str]:
    """How many files below the class folders have which other ending than an image's."""
    above = _identities_above(root)
    endings: Counter[str] = Counter()
    for folder in class_folders(root)[0].values():
        for entry in _files_below(folder, above):
            if not _is_image(entry):
                endings[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1
    return endings


def images_below(root: Path) -> list[str]:
    """All images in and below a folder, sorted."""
    return sorted(_images_below(str(root), frozenset()))


def _images_below(folder: str, above: Identities) -> Iterator[str]:
    return (entry.path for entry in _files_below(folder, above) if _is_image(entry))


def _files_below(folder: str, above: Identities) -> Iterator[os.DirEntry[str]]:
    """Links lead neither to a folder above, which holds other classes, nor twice into one."""
    seen = set(above)
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        identity = _identity(current)
        if identity in seen:
            continue
        seen.add(identity)
        folders = []
        for entry in _entries(current):
            if _is_folder(entry):
                folders.append(entry.path)
            else:
                yield entry
        waiting += sorted(folders, reverse=True)  # which of two links counts is not left to chance


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [
                entry
                for entry in entries
                if not entry.name.startswith(".") and entry.name != "__MACOSX"
            ]
    except OSError as problem:
        raise MissingData(
            folder,
            f"the folder cannot be read ({problem.strerror})",
            "Check its permissions and that its disk is there.",
        ) from problem


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # DirEntry.is_dir() raises on a link to itself.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_image(entry: os.DirEntry[str]) -> bool:
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
        return False
    if not entry.is_symlink():
        return entry.is_file()
    return os.path.isfile(entry.path) or not os.path.exists(entry.path)


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _identities_above(root: Path) -> Identities:
    """The folder itself and all that it lies in."""
    resolved = root.resolve()
    return frozenset(_identity(folder) for folder in (resolved, *resolved.parents))


def is_valid_class_name(text: str) -> bool:
    """Whether this can be the name of a class: Unicode, no control character, not empty."""
    return bool(text) and "\n" not in text and escape_control_characters(text) == text


def _named(root: Path, name: str) -> str:
    if not is_valid_class_name(name):
        problem = f"the folder name {os.fsencode(name)!r} is not Unicode or has control characters"
        raise MissingData(root, problem, "Rename the folder.")
    return name

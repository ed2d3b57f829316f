"""Class folders as a source. Symbolic links are followed, hidden files are ignored."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from coda_prompt.console import escape_control_characters
from coda_prompt.data.images import SUFFIXES
from coda_prompt.data.sources import FileSplit, Source
from coda_prompt.errors import MissingData

EXPECTED_LAYOUT = "Point at a folder with one folder of images per class, or with train/ and test/."
_SPLIT_NAMES = frozenset(("train", "test", "val", "valid", "validation", "dev"))

FolderIds = frozenset[tuple[int, int]]  # device and inode


def folder_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """Open images in folders named after their classes.

    Args:
        path: a folder with `train/<class>/...` and `test/<class>/...`, or with `<class>/...`; of
            the latter, a random fifth of each class becomes the test split.
        seed: seed of that random split.

    Raises:
        MissingData: the folder or a class is missing or empty, or train and test disagree.
    """
    root = Path(os.path.expanduser(path))
    if not os.path.isdir(root):
        problem = "this is not a folder" if os.path.exists(root) else "there is no such folder"
        raise MissingData(root, problem, EXPECTED_LAYOUT)
    name = root.resolve().name or str(root)
    folders, loose_images = class_folders(root)
    if {"train", "test"} <= folders.keys():
        return _open_train_and_test(name, root, folders.keys() - {"train", "test"})
    if folders and folders.keys() <= _SPLIT_NAMES:
        raise MissingData(
            root,
            f"it has {_join_folder_names(folders)} but not both train/ and test/",
            "Name the two folders train and test, or point at a folder of class folders to have "
            "it split 80/20.",
        )
    files = images_by_class(root)
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for class_name, paths in files.items():
        shuffled = sorted(paths, key=lambda path: _random_key(seed, os.path.relpath(path, root)))
        count = round(0.8 * len(paths))  # 1 of 1
        train[class_name], test[class_name] = sorted(shuffled[:count]), sorted(shuffled[count:])
    notes = [f"random 80/20 split of each class (seed {seed}): there is no train/ and test/"]
    if loose_images:
        notes.append(f"{loose_images} images outside class folders ignored")
    if untested := sum(not paths for paths in test.values()):
        notes.append(f"{untested} classes too small to have a test image")
    return Source(name, tuple(files), _file_split(train), _file_split(test), notes=tuple(notes))


def _random_key(seed: int, name: str) -> bytes:
    """Hash a file's name, so that adding or removing other files hardly changes the split."""
    key = f"{seed}\0{name.replace(os.sep, '/')}"
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _open_train_and_test(name: str, root: Path, ignored: Collection[str]) -> Source:
    train, test = images_by_class(root / "train"), images_by_class(root / "test")
    if train.keys() != test.keys():
        differences = [
            f"only in {folder}/: {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"
            for folder, names in (
                ("train", train.keys() - test.keys()),
                ("test", test.keys() - train.keys()),
            )
            if names
        ]
        raise MissingData(
            root,
            f"train/ and test/ have different classes ({'; '.join(differences)})",
            "Create the same class folders in both.",
        )
    notes = (f"{_join_folder_names(ignored)} ignored next to train/ and test/",) if ignored else ()
    return Source(name, tuple(train), _file_split(train), _file_split(test), notes=notes)


def _join_folder_names(names: Iterable[str]) -> str:
    return ", ".join(f"{name}/" for name in sorted(names))


def _file_split(files: dict[str, list[str]]) -> FileSplit:
    """Make a split of the files of each class; labels are positions in the mapping."""
    sizes = [len(paths) for paths in files.values()]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return FileSplit((path for paths in files.values() for path in paths), labels)


def class_folders(root: Path) -> tuple[dict[str, str], int]:
    """Return the folders in `root` by name, sorted, and the number of images outside of them."""
    ancestors = _ancestor_ids(root)
    folders, loose_images = {}, 0
    for entry in _entries(root):
        if _is_folder(entry):
            if _folder_id(entry.path) not in ancestors:
                folders[_check_class_name(root, entry.name)] = entry.path
        elif _is_image(entry):
            loose_images += 1
    return dict(sorted(folders.items())), loose_images


def images_by_class(root: Path, *, lenient: bool = False) -> dict[str, list[str]]:
    """Return the images in and below each class folder, both sorted.

    Args:
        root: a folder of class folders.
        lenient: also return empty classes and dangling links instead of raising `MissingData`.
    """
    folders, loose_images = class_folders(root)
    if not folders:
        content = (
            f"{loose_images} images but no class folder" if loose_images else "no class folder"
        )
        raise MissingData(root, f"there is {content} in it", EXPECTED_LAYOUT)
    ancestors = _ancestor_ids(root)
    files = {name: sorted(_images_below(folder, ancestors)) for name, folder in folders.items()}
    if lenient:
        return files
    for name, paths in files.items():
        for path in paths:
            if os.path.islink(path) and not os.path.exists(path):
                raise MissingData(
                    path,
                    "the target of this link does not exist",
                    "Restore the file or remove the link.",
                )
        if not paths:
            raise MissingData(
                folders[name],
                f"class '{name}' has no image",
                f"Put images in it ({', '.join(sorted(SUFFIXES))}) or remove the folder.",
            )
    return files


def other_files(root: Path) -> Counter[str]:
    """Count the files below the class folders that are not images, by file extension."""
    ancestors = _ancestor_ids(root)
    extensions: Counter[str] = Counter()
    for folder in class_folders(root)[0].values():
        for entry in _files_below(folder, ancestors):
            if not _is_image(entry):
                extensions[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1
    return extensions


def images_below(root: Path) -> list[str]:
    """Return all images in and below a folder, sorted."""
    return sorted(_images_below(str(root), frozenset()))


def _images_below(folder: str, ancestors: FolderIds) -> Iterator[str]:
    return (entry.path for entry in _files_below(folder, ancestors) if _is_image(entry))


def _files_below(folder: str, ancestors: FolderIds) -> Iterator[os.DirEntry[str]]:
    """Follow links, but not to an ancestor (it has other classes) and to no folder twice."""
    seen = set(ancestors)
    pending = [folder]
    while pending:
        current = pending.pop()
        folder_id = _folder_id(current)
        if folder_id in seen:
            continue
        seen.add(folder_id)
        folders = []
        for entry in _entries(current):
            if _is_folder(entry):
                folders.append(entry.path)
            else:
                yield entry
        pending += sorted(folders, reverse=True)  # of two links to a folder, always take the same


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [
                entry
                for entry in entries
                if not entry.name.startswith(".") and entry.name != "__MACOSX"
            ]
    except OSError as error:
        raise MissingData(
            folder,
            f"the folder cannot be read ({error.strerror})",
            "Check its permissions and that its disk is mounted.",
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # DirEntry.is_dir() raises on a link to itself.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_image(entry: os.DirEntry[str]) -> bool:
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
        return False
    if not entry.is_symlink():
        return entry.is_file()
    return os.path.isfile(entry.path) or not os.path.exists(entry.path)


def _folder_id(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _ancestor_ids(root: Path) -> FolderIds:
    """Return the ids of the folder and all its ancestors."""
    resolved = root.resolve()
    return frozenset(_folder_id(folder) for folder in (resolved, *resolved.parents))


def is_valid_class_name(text: str) -> bool:
    """Return whether a class can have this name: not empty, Unicode, no control characters."""
    return bool(text) and "\n" not in text and escape_control_characters(text) == text


def _check_class_name(root: Path, name: str) -> str:
    if not is_valid_class_name(name):
        problem = f"the folder name {os.fsencode(name)!r} is not Unicode or has control characters"
        raise MissingData(root, problem, "Rename the folder.")
    return name

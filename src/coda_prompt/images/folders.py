"""Class folders as a source. Symbolic links are followed, hidden files are ignored."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from coda_prompt.console import is_valid_class_name
from coda_prompt.errors import MissingData, WrongFolder, counted, join_names
from coda_prompt.images.reading import image_suffixes
from coda_prompt.images.sources import FileSplit, Source

DOMAIN_PREFIX = "domains:"
EXPECTED_LAYOUT = "Point at a folder with one folder of images per class, or with train/ and test/."
SPLIT_NAMES = frozenset(("train", "test", "val", "valid", "validation", "dev"))
_HIDDEN = re.compile(r"\.|__MACOSX$")

Files = dict[str, list[str]]
"""The paths of the images of each class."""


@dataclass(frozen=True)
class ClassFolders:
    """The folders in a root folder; one that links to the root or above is left out."""

    root: Path
    paths: dict[str, str]
    """By class name, sorted."""
    loose_images: int
    """Number of images beside the folders."""
    ancestors: frozenset[str]
    """The resolved paths of the root and of the folders above it."""


def folder_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """Open images in folders named after their classes.

    Args:
        path: a folder with `train/<class>/...` and `test/<class>/...`, or with `<class>/...`; of
            the latter, a random fifth of each class becomes the test split.
        seed: seed of that random split.

    Raises:
        MissingData: the folder or a class is missing or empty, or train and test disagree.
    """
    root, name = _existing_folder(path)
    folders = class_folders(root)
    names = folders.paths.keys()
    if names >= {"train", "test"}:
        return _open_train_and_test(name, root, names - {"train", "test"})
    if names and names <= SPLIT_NAMES:
        problem = f"it has {_join_folder_names(names)} but not both train/ and test/"
        remedy = "Name the two folders train and test, or point at a folder of class folders to "
        raise MissingData(root, problem, f"{remedy}have it split 80/20.")
    files = _complete_classes(folders)
    refuse_groups(folders, files, benchmark=True)
    train, test = _random_split(files, root, seed)
    notes = [f"random 80/20 split of each class (seed {seed}): there is no train/ and test/"]
    if nested := nested_images(folders, files):
        notes.append(f"{counted(len(nested), 'image')} in folders below class folders included")
    if folders.loose_images:
        notes.append(f"{folders.loose_images} images outside class folders ignored")
    if untested := sum(not paths for paths in test.values()):
        notes.append(f"{untested} classes too small to have a test image")
    return Source(name, tuple(files), file_split(train), file_split(test), notes=tuple(notes))


def domain_source(path: str | os.PathLike[str], *, seed: int = 0) -> Source:
    """Open images in folders of domains, each with folders named after the classes.

    This is the layout of DomainNet, Office-Home and PACS, and of CORe50 with sessions as domains.

    Args:
        path: A folder with `<domain>/<class>/...`, of which a random fifth of each class in each
            domain becomes the test split, or with `train/<domain>/...` and `test/<domain>/...`.
        seed: Seed of that random split.

    Raises:
        MissingData: The folder, a domain or a class is missing or empty.
    """
    root, name = _existing_folder(path)
    notes: tuple[str, ...] = ()
    if class_folders(root).paths.keys() >= {"train", "test"}:
        train, test = (_files_of_domains(root / part) for part in ("train", "test"))
    else:
        notes = (f"random 80/20 split of each class in each domain (seed {seed})",)
        train, test = {}, {}
        for domain, files in _files_of_domains(root).items():
            train[domain], test[domain] = _random_split(files, root, seed)
    domains = sorted(train.keys() | test.keys())
    classes = sorted({each for part in (train, test) for files in part.values() for each in files})
    return Source(
        name,
        tuple(classes),
        _domain_split(train, domains, classes),
        _domain_split(test, domains, classes),
        tuple(domains),
        notes,
    )


def _files_of_domains(root: Path) -> dict[str, Files]:
    """Return the images of each class in each domain."""
    domains = class_folders(root).paths
    return {name: _complete_classes(class_folders(Path(path))) for name, path in domains.items()}


def _domain_split(files: dict[str, Files], domains: list[str], classes: list[str]) -> FileSplit:
    rows = [
        (path, classes.index(name), domains.index(domain))
        for domain, by_class in sorted(files.items())
        for name, paths in by_class.items()
        for path in paths
    ]
    paths, labels, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    return FileSplit(paths, np.array(labels, np.int64), np.array(numbers, np.int64))


def _existing_folder(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return a folder and its name."""
    root = Path(os.path.expanduser(path))
    if not os.path.isdir(root):
        problem = "this is not a folder" if os.path.exists(root) else "there is no such folder"
        raise MissingData(root, problem, EXPECTED_LAYOUT)
    return root, root.resolve().name or str(root)


def _random_split(files: Files, root: Path, seed: int) -> tuple[Files, Files]:
    """Return four fifths of the files of each class, and the others."""
    train, test = Files(), Files()
    for name, paths in files.items():
        shuffled = sorted(paths, key=lambda path: _random_key(seed, os.path.relpath(path, root)))
        count = round(0.8 * len(paths))  # 1 of 1
        train[name], test[name] = sorted(shuffled[:count]), sorted(shuffled[count:])
    return train, test


def _random_key(seed: int, name: str) -> bytes:
    """Hash a file's name, so that adding or removing other files hardly changes the split."""
    key = f"{seed}\0{name.replace(os.sep, '/')}"
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _open_train_and_test(name: str, root: Path, ignored: Collection[str]) -> Source:
    train = _complete_classes(class_folders(root / "train"))
    test = _complete_classes(class_folders(root / "test"))
    if train.keys() != test.keys():
        only = {"train": train.keys() - test.keys(), "test": test.keys() - train.keys()}
        differences = "; ".join(
            f"only in {folder}/: {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"
            for folder, names in only.items()
            if names
        )
        problem = f"train/ and test/ have different classes ({differences})"
        raise MissingData(root, problem, "Create the same class folders in both.")
    notes = (f"{_join_folder_names(ignored)} ignored next to train/ and test/",) if ignored else ()
    return Source(name, tuple(train), file_split(train), file_split(test), notes=notes)


def _join_folder_names(names: Iterable[str]) -> str:
    return ", ".join(f"{name}/" for name in sorted(names))


def file_split(files: Files) -> FileSplit:
    """Make a split of the files of each class; labels are positions in the mapping."""
    sizes = [len(paths) for paths in files.values()]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return FileSplit((path for paths in files.values() for path in paths), labels)


def class_folders(root: Path) -> ClassFolders:
    """List the folders in `root`, which are its classes.

    Raises:
        MissingData: There is no folder in it, it cannot be read, or a name in it is not valid for
            a class.
    """
    resolved = root.resolve()
    ancestors = frozenset(str(folder) for folder in (resolved, *resolved.parents))
    _, folders, files = next(os.walk(root, onerror=_cannot_read))
    paths = {
        name: str(root / name)
        for name in sorted(folders)
        if not _HIDDEN.match(name) and os.path.realpath(root / name) not in ancestors
    }
    images = [
        name
        for name in files
        if not _HIDDEN.match(name) and os.path.splitext(name)[1].lower() in image_suffixes()
    ]
    for name in paths:
        if not is_valid_class_name(name):
            problem = f"the folder name {os.fsencode(name)!r} is not Unicode, has control "
            problem += "characters or nothing visible"
            raise MissingData(root, problem, "Rename the folder.")
    if not paths:
        beside = f" ({len(images)} images are directly in it)" if images else ""
        raise MissingData(root, f"there is no class folder in it{beside}", EXPECTED_LAYOUT)
    return ClassFolders(root, paths, len(images), ancestors)


def _complete_classes(folders: ClassFolders) -> Files:
    """Return the images of each class, none of which may be empty or have a dangling link."""
    files = {name: files_below(path, folders.ancestors)[0] for name, path in folders.paths.items()}
    for name, paths in files.items():
        for path in paths:
            if os.path.islink(path) and not os.path.exists(path):
                problem = "the target of this link does not exist"
                raise MissingData(path, problem, "Restore the file or remove the link.")
        if not paths:
            remedy = (
                f"Put images in it ({', '.join(sorted(image_suffixes()))}) or remove the folder."
            )
            raise MissingData(folders.paths[name], f"class '{name}' has no image", remedy)
    return files


def nested_images(folders: ClassFolders, files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the images that are in folders below their class folder.

    Args:
        folders: The class folders.
        files: The images in and below each of them.
    """
    return [
        path
        for name, images in files.items()
        for path in images
        if os.path.dirname(path) != folders.paths[name]
    ]


def refuse_nested(folders: ClassFolders, files: Mapping[str, Sequence[str]]) -> None:
    """Check that all images are directly in their class folders; see `nested_images`.

    Raises:
        MissingData: Some are below, so their class is not certain.
        WrongFolder: All are below: there are folders of class folders.
    """
    refuse_groups(folders, files)
    if nested := nested_images(folders, files):
        places = sorted({os.path.relpath(os.path.dirname(path), folders.root) for path in nested})
        number = f"{counted(len(nested), 'image')} in folders below class folders"
        remedy = "Move these images up into the class folder, or, if their folder is a class of "
        remedy += "its own, move that beside the other classes."
        raise MissingData(folders.root, f"{number} ({join_names(places)})", remedy)


def refuse_groups(
    folders: ClassFolders, files: Mapping[str, Sequence[str]], *, benchmark: bool = False
) -> None:
    """Check that not all folders have folders of images instead of images.

    Args:
        folders: The class folders.
        files: The images in and below each of them.
        benchmark: Whether folders of domains, and of train/ and test/, can be opened instead.

    Raises:
        WrongFolder: They have: the classes are one level further down, or more.
    """
    groups = {name: images for name, images in files.items() if images}
    nested = nested_images(folders, groups)
    places = sorted({os.path.dirname(path) for path in nested})
    splits_of_classes = {os.path.basename(place) for place in places} <= SPLIT_NAMES
    if splits_of_classes or len(nested) < sum(map(len, groups.values())):
        return
    instead = []
    for images in groups.values():
        parents = {os.path.dirname(os.path.dirname(path)) for path in images}
        train = {each for each in parents if os.path.basename(each) == "train"}
        instead.append(os.path.commonpath(parents if benchmark else train or parents))
    if benchmark and len(groups) > 1:
        instead = [f"{DOMAIN_PREFIX}{folders.root}"]
    shown = join_names(os.path.relpath(place, folders.root) for place in places)
    names = join_names(f"'{name}'" for name in groups)
    one = len(groups) == 1
    remedy = f"If {names} {'is a class' if one else 'are classes'}, move the images up into "
    problem = f"the images are in folders of folders ({shown})"
    raise WrongFolder(folders.root, problem, f"{remedy}{'it' if one else 'them'}.", instead)


def files_below(
    folder: str, ancestors: frozenset[str] = frozenset()
) -> tuple[list[str], list[str]]:
    """Return images and other files in and below a folder, both sorted; hidden ones are left out.

    Links are followed, but not to an ancestor (it has other classes) and to no folder twice. A
    dangling link counts as an image if it is named like one.
    """
    seen = set(ancestors)
    images: list[str] = []
    others: list[str] = []
    for current, folders, files in os.walk(folder, onerror=_cannot_read, followlinks=True):
        resolved = os.path.realpath(current)
        if resolved in seen:
            folders.clear()
            continue
        seen.add(resolved)
        # of two links to a folder, always take the first
        folders[:] = sorted(name for name in folders if not _HIDDEN.match(name))
        for name in files:
            path = os.path.join(current, name)
            if not _HIDDEN.match(name):
                named_so = os.path.splitext(name)[1].lower() in image_suffixes()
                is_image = named_so and (os.path.isfile(path) or not os.path.exists(path))
                (images if is_image else others).append(path)
    return sorted(images), sorted(others)


def _cannot_read(error: OSError) -> NoReturn:
    problem = f"the folder cannot be read ({error.strerror})"
    remedy = "Check its permissions and that its disk is mounted."
    raise MissingData(error.filename, problem, remedy) from error

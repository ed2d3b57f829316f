"""Earlier and undone versions of a model, in memory or in `versions/` of a model folder.

Every version has a number that is never used again, and names its parent. Versions with a smaller
number than the current one were replaced by it, those with a larger number were undone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coda_prompt.storage.files import check_regular, final_name, read_regular, write_atomically

if TYPE_CHECKING:
    from coda_prompt.learner.store import Description, Model

FOLDER = "versions"
_FILE = re.compile(r"[0-9]{6,}\.safetensors")
KEPT = 10
"""Versions that are stored beside the current one."""


@dataclass(frozen=True)
class StoredVersion:
    """A version in a model folder, read when it is needed."""

    path: Path
    number: int

    def read(self) -> Model:
        """Read the version.

        Raises:
            CorruptFile: It is damaged.
            MissingData: Another process has removed it.
        """
        from coda_prompt.learner import store

        return store.read_file(self.path)


@dataclass
class History:
    """The versions before the current one, oldest first, and the undone ones after it."""

    before: list[StoredVersion | Model] = field(default_factory=list)
    after: list[StoredVersion | Model] = field(default_factory=list)

    def replaced(self, current: Model) -> None:
        """Record that a new version replaces the current one; undone versions are dropped."""
        self.before = [*self.before, current][-KEPT:]
        self.after = []

    def go_to(self, number: int, current: Model) -> Model | None:
        """Return the version to restore instead of the current one; None if there is none."""
        everything = [*self.before, current, *self.after]
        numbers = [each.number for each in everything]
        if number == current.number or number not in numbers:
            return None
        place = numbers.index(number)
        chosen = everything[place]
        model = chosen.read() if isinstance(chosen, StoredVersion) else chosen
        self.before, self.after = everything[:place], everything[place + 1 :]
        return model

    def read_all(self) -> None:
        """Read every version into memory."""
        for versions in (self.before, self.after):
            versions[:] = [
                each.read() if isinstance(each, StoredVersion) else each for each in versions
            ]


def version_path(folder: Path, number: int) -> Path:
    """Return the path of a stored version."""
    return folder / FOLDER / f"{number:06}.safetensors"


def version_files(folder: Path) -> list[Path]:
    """List the files of stored versions, temporary ones included; other files are nobody's.

    Raises:
        CorruptFile: The folder of the versions is a link or a file.
    """
    check_regular(folder / FOLDER, folder=True)
    files = (folder / FOLDER).glob("*")
    return [path for path in files if _FILE.fullmatch(final_name(path.name))]


def stored_versions(folder: Path, current: Description | None) -> History:
    """List the versions of a folder beside the current one.

    Args:
        folder: A model folder.
        current: Description of its current version; None if that is damaged: then all are earlier.
    """
    paths = [path for path in version_files(folder) if path.suffix == ".safetensors"]
    found = [StoredVersion(path, int(path.stem)) for path in paths]
    found.sort(key=lambda version: version.number)
    if current is None:
        return History(list(found))
    number, parent = current.number, current.parent
    # Versions between parent and current were undone when the current one was made.
    before = [
        each for each in found if each.number < number and (parent is None or each.number <= parent)
    ]
    return History(list(before[-KEPT:]), [each for each in found if each.number > number])


def write_versions(folder: Path, history: History, encode: Callable[[Model], bytes]) -> None:
    """Write the versions that are not in the folder yet; after this, all of them are stored."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for versions in (history.before, history.after):
        for index, version in enumerate(versions):
            path = version_path(folder, version.number)
            if isinstance(version, StoredVersion):
                if version.path != path:
                    write_atomically(path, read_regular(version.path))
            else:
                write_atomically(path, encode(version))
            versions[index] = StoredVersion(path, version.number)


def preserve(folder: Path, model: Path, number: int) -> None:
    """Store the current file as a version too."""
    path = version_path(folder, number)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_atomically(path, read_regular(model))


def remove_others(folder: Path, history: History) -> None:
    """Delete stored versions that are not part of the history."""
    kept = {version_path(folder, each.number) for each in (*history.before, *history.after)}
    for path in version_files(folder):
        if path not in kept:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER).rmdir()  # if it is empty

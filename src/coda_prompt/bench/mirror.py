"""Run folders behind an address (`s3://...`): worked on in a copy here, kept up to date there.

Every checkpoint is brought there, what it names before itself, so that a run which is lost with
its machine goes on from there. The address holds what counts; one command at a time may use it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from coda_prompt.errors import BadOption, MissingData
from coda_prompt.files import own_cache

LOCAL = "file://"
OWN = (".lock", ".tmp", ".owner")
"""Endings of files that mean something here alone."""
LAST = ("checkpoint-", "result.json")
"""Files that name others go after them."""


def copy_of(out: str) -> tuple[Path, str | None]:
    """The folder to work in, and the address it is a copy of, if `out` is one."""
    if out.startswith(LOCAL):
        return Path(out.removeprefix(LOCAL)), None
    if "://" not in out:
        return Path(out), None
    return own_cache() / f"runs-{hashlib.sha256(out.encode()).hexdigest()[:16]}", out.rstrip("/")


class Mirror:
    """A folder here and its twin there."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        try:
            self._files, self._root = url_to_fs(address)
        except (ValueError, ImportError) as error:
            problem = f"'{address}' is no address that can be used here ({error})"
            raise BadOption("coda bench", "out", problem) from error
        self._made: set[str] = set()
        """Folders that are there, where the place has such."""
        self._there: dict[str, tuple[int, int]] = {}
        """Size and time of each file as it was when it was last the same in both places."""

    def pull(self) -> None:
        """Make the folder here what it is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._there = {}
        for name, path in self._listed().items():
            place = self.folder / name
            if not place.resolve().is_relative_to(self.folder.resolve()):
                raise MissingData(self.address, f"'{name}' leads out of it", "Use another address.")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self._asked("cat_file", path))
            self._there[name] = _state(place)

    def push(self) -> None:
        """Bring there what has changed here; what is gone here goes last."""
        here = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.endswith(OWN)
        }
        for name in sorted(here, key=lambda name: (_order(name), name)):
            state = _state(here[name])
            if self._there.get(name) != state:
                folder = f"{self._root}/{name}".rpartition("/")[0]
                if folder not in self._made:
                    self._asked("makedirs", folder, True)
                    self._made.add(folder)
                self._asked("pipe_file", f"{self._root}/{name}", here[name].read_bytes())
                self._there[name] = state
        for name in self._there.keys() - here.keys():
            self._asked("rm_file", f"{self._root}/{name}")
            del self._there[name]

    def _listed(self) -> dict[str, str]:
        try:
            paths = self._asked("find", self._root)
        except FileNotFoundError:
            return {}
        root = self._root.rstrip("/") + "/"
        return {path.removeprefix(root): path for path in paths if path.startswith(root)}

    def _asked(self, what: str, *arguments: Any) -> Any:
        try:
            return getattr(self._files, what)(*arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # networks fail in many ways
            remedy = "Check the address, your credentials and the network; then run this again."
            raise MissingData(self.address, f"it cannot be used ({error})", remedy) from error


def _order(name: str) -> int:
    return next(
        (place + 1 for place, start in enumerate(LAST) if name.split("/")[-1].startswith(start)), 0
    )


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns

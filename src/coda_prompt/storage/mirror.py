"""Run folders behind an address (`s3://...`): worked on in a copy here, kept up to date there.

Every checkpoint is brought there, what it names before itself, so that a run which is lost with
its machine goes on from there. The address holds what counts; one command at a time may use it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from coda_prompt.errors import MissingData
from coda_prompt.storage.files import user_cache_dir
from coda_prompt.storage.remote import RemotePath

LOCAL = "file://"
OWN = (".lock", ".tmp", ".owner")
"""Endings of files that mean something here alone."""
LAST = ("checkpoint-", "result.json")
"""Files that name others go after them."""


def local_copy(out: str) -> tuple[Path, str | None]:
    """The folder to work in, and the address it is a copy of, if `out` is one."""
    if out.startswith(LOCAL):
        return Path(out.removeprefix(LOCAL)), None
    if "://" not in out:
        return Path(out), None
    return user_cache_dir() / f"runs-{hashlib.sha256(out.encode()).hexdigest()[:16]}", out.rstrip(
        "/"
    )


class Mirror:
    """A folder here and its twin there."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self._home = folder, RemotePath(address, "coda bench")
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
                raise MissingData(
                    self._home.address, f"'{name}' leads out of it", "Use another address."
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self._home.ask("cat_file", path))
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
                folder = f"{self._home.root}/{name}".rpartition("/")[0]
                if folder not in self._made:
                    self._home.ask("makedirs", folder, True)
                    self._made.add(folder)
                self._home.ask("pipe_file", f"{self._home.root}/{name}", here[name].read_bytes())
                self._there[name] = state
        for name in self._there.keys() - here.keys():
            self._home.ask("rm_file", f"{self._home.root}/{name}")
            del self._there[name]

    def _listed(self) -> dict[str, str]:
        try:
            paths = self._home.ask("find", self._home.root)
        except FileNotFoundError:
            return {}
        root = f"{self._home.root}/"
        return {path.removeprefix(root): path for path in paths if path.startswith(root)}


def _order(name: str) -> int:
    return next(
        (place + 1 for place, start in enumerate(LAST) if name.split("/")[-1].startswith(start)), 0
    )


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns

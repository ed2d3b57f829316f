"""Files that are never half-written, and their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
from pydantic import BaseModel, ConfigDict

LOCK = ".lock"
OWNER = f"{LOCK}.owner"


class FileSchema(BaseModel):
    """What a file of this program says; a field that is unknown or of another type is damage."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds the old content or the new, whenever the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, content)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a full disk names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Where the system can: the new name, too, is there after a power cut."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def exclusive_lock(folder: Path, busy: Callable[[Path, str], Exception]) -> Iterator[None]:
    """One writer at a time. The system frees the lock of a process that died."""
    lock, owner = filelock.FileLock(folder / LOCK, timeout=0), folder / OWNER
    try:
        lock.acquire()
    except filelock.Timeout:
        raise busy(folder, _text(owner)) from None
    try:
        write_atomically(owner, f"{os.getpid()}".encode())
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")[:100]
    except OSError:
        return "?"


def as_json(value: Any) -> Any:
    """A value as a JSON file gives it back: tuples as lists, keys as text."""
    return json.loads(json.dumps(value))


def user_cache_dir() -> Path:
    """What this user's runs keep for later and can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coda-prompt"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

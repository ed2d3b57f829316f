"""Atomic files, folder locks, file hashes and the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from coda_prompt.errors import CorruptFile

LOCK = ".lock"
OWNER = f"{LOCK}.owner"
MAX_NOTE_BYTES = 2**24
"""Of the small JSON files in a model folder."""
REPLACE_RETRIES = 40 if os.name == "nt" else 0
"""Two seconds on Windows, far more than a reader of one file needs."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9]+\.tmp")


class FileSchema(BaseModel):
    """Base class for the content of JSON files; unknown fields and wrong types are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that has the old or the new content even after a crash or power loss."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _errors_naming(path):
            temporary.unlink(missing_ok=True)  # of a killed process with the same id
            with temporary.open("xb") as file:  # does not follow a link
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def final_name(name: str) -> str:
    """Return the name that a temporary file of `write_atomically` would get; others unchanged."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else name


def check_regular(path: Path, *, folder: bool = False) -> None:
    """Check that a path is a regular file, or a folder, or nothing; links are not followed.

    Raises:
        CorruptFile: It is a symbolic link, a pipe, or otherwise not what is expected.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if (stat.S_ISDIR if folder else stat.S_ISREG)(mode):
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(mode), "a pipe, socket or device")
    expected = "folder" if folder else "regular file"
    problem = f"this is {kind}, and a {expected} is expected"
    raise CorruptFile(path, problem, f"Remove it, or put the {expected} itself in its place.")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a link is not followed and a pipe not waited for.

    Raises:
        CorruptFile: It is something else.
        OSError: It cannot be opened.
    """
    check_regular(path)
    safely = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | safely))


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file; as `open_regular`.

    Raises:
        CorruptFile: It is something else, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise CorruptFile(path, f"it has more than {max_bytes:,} bytes", "Remove it.")
        return file.read()


@contextlib.contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Let errors of the file system name what a user knows, and not a temporary file or a lock."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(temporary: Path, path: Path) -> None:
    """Rename a file over another one; Windows refuses while a reader has that one open."""
    for _ in range(REPLACE_RETRIES):
        try:
            temporary.replace(path)
        except PermissionError:
            time.sleep(0.05)
        else:
            return
    temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, on systems that can sync a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(
    folder: Path, busy: Callable[[Path, str], Exception]
) -> Iterator[contextlib.ExitStack]:
    """Lock a folder for one process at a time.

    The operating system releases the lock of a process that dies.

    Args:
        folder: An existing folder.
        busy: Makes the exception to raise from the folder and the pid that has the lock.

    Yields:
        Runs its callbacks last, when nothing but the lock is left to release.

    Raises:
        CorruptFile: A file of the lock is a link, a pipe or a device.
    """
    import filelock  # slow to import

    lock, owner = filelock.FileLock(folder / LOCK, timeout=0), folder / OWNER
    for path in (folder / LOCK, owner):
        check_regular(path)
    try:
        with _errors_naming(folder):
            lock.acquire()
    except filelock.Timeout:
        raise busy(folder, _read_pid(owner)) from None
    with contextlib.ExitStack() as at_end:
        at_end.callback(lock.release)
        try:
            with _errors_naming(folder):
                write_atomically(owner, f"{os.getpid()}".encode())
            yield at_end
        finally:
            owner.unlink(missing_ok=True)


def _read_pid(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(100).decode("utf-8", "replace")
    except OSError:
        return "?"


def as_json(value: Any) -> Any:
    """Return a value as a JSON file would give it back: tuples as lists, keys as strings."""
    return json.loads(json.dumps(value))


def user_cache_dir() -> Path:
    """Return the folder for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coda-prompt"


def file_sha256(path: Path) -> str:
    """Hash a file in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

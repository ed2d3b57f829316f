"""Remote paths (`s3://...`, `gs://...`) through fsspec, and run folders mirrored to one.

A remote run folder is worked on in a local copy. Every checkpoint is uploaded, its files before
the file that names them, so that a run whose machine is lost resumes from the remote path. Only
one command at a time may use a remote path.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from coda_prompt.errors import BadOption, MissingData
from coda_prompt.storage.files import user_cache_dir

LOCAL_SCHEME = "file://"
LOCAL_ONLY_SUFFIXES = (".lock", ".tmp", ".owner")
"""Files that are not mirrored."""
UPLOADED_LAST = ("checkpoint-", "result.json")
"""Names of files that refer to others, in the order in which they follow them."""


def open_filesystem(root: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and its path there."""
    if "://" in root:
        return url_to_fs(root)
    return LocalFileSystem(), root  # unlike `url_to_fs`, also for names with "::" in them


class RemotePath:
    """A URL or local path that fsspec can open. Raises readable errors when it cannot be used."""

    def __init__(self, url: str, command: str) -> None:
        """
        Args:
            url: For example `s3://bucket/folder`.
            command: The command whose option `out` named it, for error messages.
        """
        self.url = url
        try:
            self._filesystem, root = open_filesystem(url)
        except (ValueError, ImportError) as error:
            problem = f"'{url}' is not a URL that can be used here ({error})"
            raise BadOption(command, "out", problem) from error
        self.root = root.rstrip("/")

    def call(self, operation: str, *arguments: Any) -> Any:
        """Call a method of the fsspec file system.

        Raises:
            FileNotFoundError: The file does not exist.
            MissingData: Anything else went wrong.
        """
        try:
            return getattr(self._filesystem, operation)(*arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own exceptions
            remedy = "Check the URL, your credentials and the network, then run this again."
            raise MissingData(self.url, f"it cannot be used ({error})", remedy) from error


def local_folder(out: str) -> tuple[Path, str | None]:
    """Return the local folder to work in and, if `out` is remote, the URL it is a copy of."""
    if out.startswith(LOCAL_SCHEME):
        return Path(out.removeprefix(LOCAL_SCHEME)), None
    if "://" not in out:
        return Path(out), None
    key = hashlib.sha256(out.encode()).hexdigest()[:16]
    return user_cache_dir() / f"runs-{key}", out.rstrip("/")


class Mirror:
    """Synchronises a local folder with a remote one."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._remote = folder, RemotePath(url, "coda bench")
        self._created: set[str] = set()
        """Remote folders that exist."""
        self._synced: dict[str, tuple[int, int]] = {}
        """Size and modification time of each local file when it was last synchronised."""

    def pull(self) -> None:
        """Replace the local folder by the remote one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._synced = {}
        for name, remote_path in self._remote_files().items():
            path = self.folder / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                problem = f"'{name}' is outside of it"
                raise MissingData(self._remote.url, problem, "Use another remote path.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._remote.call("cat_file", remote_path))
            self._synced[name] = _size_and_time(path)

    def push(self) -> None:
        """Upload changed files, then delete remote files that are gone locally."""
        local = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.endswith(LOCAL_ONLY_SUFFIXES)
        }
        for name in sorted(local, key=lambda name: (_upload_rank(name), name)):
            state = _size_and_time(local[name])
            if self._synced.get(name) != state:
                self._upload(name, local[name].read_bytes())
                self._synced[name] = state
        for name in self._synced.keys() - local.keys():
            self._remote.call("rm_file", f"{self._remote.root}/{name}")
            del self._synced[name]

    def _upload(self, name: str, content: bytes) -> None:
        path = f"{self._remote.root}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in self._created:
            self._remote.call("makedirs", folder, True)
            self._created.add(folder)
        self._remote.call("pipe_file", path, content)

    def _remote_files(self) -> dict[str, str]:
        try:
            paths = self._remote.call("find", self._remote.root)
        except FileNotFoundError:
            return {}
        root = f"{self._remote.root}/"
        return {path.removeprefix(root): path for path in paths if path.startswith(root)}


def _upload_rank(path: str) -> int:
    name = path.split("/")[-1]
    ranks = (rank for rank, prefix in enumerate(UPLOADED_LAST, 1) if name.startswith(prefix))
    return next(ranks, 0)


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns

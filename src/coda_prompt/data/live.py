"""Images in the class folders of a folder that grows."""

from __future__ import annotations

import os
from pathlib import Path

from coda_prompt.data.images import image_suffixes
from coda_prompt.errors import MissingData

POLL_SECONDS = 0.5
FileState = tuple[int, int]
"""Size and modification time (ns) of a file."""


def labelled_files(folder: Path) -> dict[str, FileState]:
    """Return the images in the class folders of a folder, by path relative to it.

    Raises:
        MissingData: There is no such folder.
    """
    if not folder.is_dir():
        raise MissingData(folder, "there is no such folder", "Create it, or name another one.")
    classes = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    return {
        os.path.relpath(path, folder): state
        for each in classes
        for path, state in sorted(_image_files(each).items())
        if state[0]
    }


def _image_files(folder: Path) -> dict[str, FileState]:
    """Return size and modification time of each image in a folder."""
    files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            is_image = os.path.splitext(entry.name)[1].lower() in image_suffixes()
            if is_image and not entry.name.startswith(".") and entry.is_file():
                status = entry.stat()
                files[entry.path] = (status.st_size, status.st_mtime_ns)
    return files

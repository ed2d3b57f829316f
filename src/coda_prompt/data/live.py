"""Images that arrive while a command runs: new files of a folder, frames of a camera."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from coda_prompt.data.images import image_suffixes
from coda_prompt.errors import MissingData, MissingExtra

POLL_SECONDS = 0.5
FileState = tuple[int, int]
"""Size and modification time (ns) of a file."""


def new_files(folder: Path, stop: Callable[[], bool], poll: float = POLL_SECONDS) -> Iterator[str]:
    """Yield the images that are written to a folder from now on, in the order of their names.

    A file is complete once its size and time have not changed between two polls of the folder.

    Args:
        folder: The folder; folders in it are not watched.
        stop: Polled before each look; once true, this ends.
        poll: Seconds between two polls.

    Raises:
        MissingData: There is no such folder.
    """
    if not folder.is_dir():
        raise MissingData(folder, "there is no such folder", "Create it, or name another one.")
    done, seen = _image_files(folder), dict[str, FileState]()
    while not stop():
        current = _image_files(folder)
        for path, status in sorted(current.items()):
            if done.get(path) != status and seen.get(path) == status and status[0]:
                done[path] = status
                yield path
        seen = current
        time.sleep(poll)


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


def camera_frames(
    number: int, stop: Callable[[], bool], interval: float = 1.0
) -> Iterator[NDArray[Any]]:
    """Yield frames of a camera as BGR arrays, H x W x 3.

    Args:
        number: Number of the camera; the first is 0.
        stop: Polled before each frame; once true, this ends.
        interval: Seconds between two frames.

    Raises:
        MissingData: The camera cannot be opened, or gives no frame.
        MissingExtra: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise MissingExtra("The camera", "camera") from error
    camera = cv2.VideoCapture(number)
    try:
        if not camera.isOpened():
            remedy = "Check that it is connected and that no other program uses it."
            raise MissingData(f"camera {number}", "cannot be opened", remedy)
        while not stop():
            complete, frame = camera.read()
            if not complete:
                raise MissingData(f"camera {number}", "gives no frame", "Is it still connected?")
            yield frame
            time.sleep(interval)
    finally:
        camera.release()

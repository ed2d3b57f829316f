"""The files of a checkpointer in a folder, and how they are deleted without reading them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from coda_prompt.storage.files import check_regular

OWN_NAME = re.compile(
    r"\.?(checkpoint-[0-9]{6,9}\.json|(learned|training)-[0-9]{6,12}\.safetensors)(\.[0-9]+\.tmp)?"
)
"""Files of a checkpointer, complete or being written."""


def own_files(folder: Path) -> list[Path]:
    """List the files of a checkpointer; other files are nobody's."""
    return [path for path in folder.glob("*") if OWN_NAME.fullmatch(path.name)]


def remove_checkpoints(folder: Path) -> None:
    """Delete all checkpoints in a folder, and the folder if nothing else is in it."""
    check_regular(folder, folder=True)
    for path in own_files(folder):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: somebody else's files are in it
        folder.rmdir()

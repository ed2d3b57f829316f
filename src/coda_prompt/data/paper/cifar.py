"""CIFAR-100: the published python archive, packed or extracted, or the same images in folders."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coda_prompt.data.folders import folder_source
from coda_prompt.data.paper.cifar_pickle import read_cifar_pickle
from coda_prompt.data.sources import ArraySplit, Source
from coda_prompt.errors import CorruptFile, MissingData

FOLDER = "cifar-100-python"
PLACES = (FOLDER, f"{FOLDER}.tar.gz", "cifar-100")
PARTS = ("meta", "train", "test")
MOST_BYTES = 1 << 28
"""The largest file, train, has 155 million."""
_SIDE = 32


def cifar_source(place: Path) -> Source:
    """The source in one of `PLACES`; class ids are the published fine labels."""
    if not place.is_file() and place.name != FOLDER:
        return folder_source(place)
    contents = _from_archive(place) if place.is_file() else _from_folder(place)
    meta = read_cifar_pickle(contents["meta"], place / "meta")
    class_names = _names(meta.get("fine_label_names"), place / "meta")
    train, test = (
        _split(read_cifar_pickle(contents.pop(part), place / part), len(class_names), place / part)
        for part in ("train", "test")
    )
    return Source("cifar-100", class_names, train, test)


def _from_folder(folder: Path) -> dict[str, bytes]:
    contents = {}
    for part in PARTS:
        path = folder / part
        if not path.is_file():
            raise MissingData(
                path,
                f"the file is not there, so {FOLDER} is extracted in part only",
                f"Extract {FOLDER}.tar.gz again.",
            )
        _check_size(path, os.path.getsize(path))
        contents[part] = path.read_bytes()
    return contents


def _from_archive(archive: Path) -> dict[str, bytes]:
    """The three files, read in the archive: nothing is written to disk."""
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for part in PARTS:
                member = tar.getmember(f"{FOLDER}/{part}")
                _check_size(archive / part, member.size)
                file = tar.extractfile(member) if member.isreg() else None
                if file is None:
                    raise CorruptFile(archive, f"{member.name} in it is not a file")
                contents[part] = file.read()
    except KeyError as problem:
        raise CorruptFile(archive, f"{problem.args[0]}") from problem
    except (tarfile.TarError, EOFError, OSError, zlib.error) as problem:
        raise CorruptFile(archive, f"it cannot be unpacked ({problem})") from problem
    return contents


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise CorruptFile(path, f"{size:,} bytes are more than any file of CIFAR-100 has")


def _names(values: Any, path: Path) -> tuple[str, ...]:
    if not (isinstance(values, list) and all(isinstance(value, str | bytes) for value in values)):
        raise CorruptFile(path, "it has no list 'fine_label_names'")
    return tuple(value.decode("latin-1") if isinstance(value, bytes) else value for value in values)


def _split(values: dict[str, Any], classes: int, path: Path) -> ArraySplit:
    rows, labels = values.get("data"), values.get("fine_labels")
    if not (isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == 3 * _SIDE**2):
        raise CorruptFile(path, f"it has no array 'data' with {3 * _SIDE**2} values an image")
    if not (isinstance(labels, list) and len(labels) == len(rows)):
        raise CorruptFile(path, f"it has no list 'fine_labels' for its {len(rows)} images")
    _check_labels(labels, classes, path)
    planes = rows.reshape(-1, 3, _SIDE, _SIDE)  # images x channels x rows x columns
    return ArraySplit(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, int))


def _check_labels(labels: Sequence[Any], classes: int, path: Path) -> None:
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            raise CorruptFile(path, f"its label {label!r} is none of 0 to {classes - 1}")

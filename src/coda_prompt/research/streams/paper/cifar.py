"""CIFAR-100: the published python archive, as it is or extracted, or class folders."""

from __future__ import annotations

import os
import reprlib
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from coda_prompt.errors import BadOption, CorruptFile, MissingData
from coda_prompt.images.folders import folder_source
from coda_prompt.images.sources import ArraySplit, Source
from coda_prompt.research.streams.paper.cifar_pickle import read_cifar_pickle

FOLDER = "cifar-100-python"
LOCATIONS = (FOLDER, f"{FOLDER}.tar.gz", "cifar-100")
FILES = ("meta", "train", "test")
MAX_BYTES = 1 << 28
"""Limit for one file; the largest, train, has 155 million bytes."""
_SIDE = 32


def cifar_source(path: Path, lists: Path | None = None) -> Source:
    """Open CIFAR-100 at one of `LOCATIONS`; class ids are the published fine labels."""
    if lists is not None:
        raise BadOption("cifar-100", "lists", "its split is part of the data; remove this option")
    if not path.is_file() and path.name != FOLDER:
        return folder_source(path)
    contents = _read_archive(path) if path.is_file() else _read_folder(path)
    meta = read_cifar_pickle(contents["meta"], path / "meta")
    class_names = _class_names(meta.get("fine_label_names"), path / "meta")
    train, test = (
        _make_split(contents.pop(name), len(class_names), path / name) for name in ("train", "test")
    )
    return Source("cifar-100", class_names, train, test)


def _read_folder(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in FILES:
        path = folder / name
        if not path.is_file():
            problem = f"there is no such file: {FOLDER} was not extracted completely"
            raise MissingData(path, problem, f"Extract {FOLDER}.tar.gz again.")
        _check_size(path, os.path.getsize(path))
        contents[name] = path.read_bytes()
    return contents


def _read_archive(archive: Path) -> dict[str, bytes]:
    """Read the three files from the archive; nothing is written to disk."""
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in FILES:
                member = tar.getmember(f"{FOLDER}/{name}")
                _check_size(archive / name, member.size)
                file = tar.extractfile(member) if member.isreg() else None
                if file is None:
                    raise CorruptFile(archive, f"{member.name} in it is not a file")
                contents[name] = file.read()
    except KeyError as error:
        raise CorruptFile(archive, f"{error.args[0]}") from error
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise CorruptFile(archive, f"it cannot be unpacked ({error})") from error
    return contents


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise CorruptFile(path, f"it has {size:,} bytes, more than any file of CIFAR-100")


def _class_names(values: Any, path: Path) -> tuple[str, ...]:
    if not (isinstance(values, list) and all(isinstance(value, str | bytes) for value in values)):
        raise CorruptFile(path, "it has no list 'fine_label_names'")
    return tuple(value.decode("latin-1") if isinstance(value, bytes) else value for value in values)


def _make_split(content: bytes, classes: int, path: Path) -> ArraySplit:
    values = read_cifar_pickle(content, path)
    rows, labels = values.get("data"), values.get("fine_labels")
    if not (isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == 3 * _SIDE**2):
        raise CorruptFile(path, f"it has no array 'data' with {3 * _SIDE**2} values per image")
    if not (isinstance(labels, list) and len(labels) == len(rows)):
        raise CorruptFile(path, f"it has no list 'fine_labels' for its {len(rows)} images")
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            raise CorruptFile(path, f"its label {reprlib.repr(label)} is not in 0 to {classes - 1}")
    planes = rows.reshape(-1, 3, _SIDE, _SIDE)  # images x channels x rows x columns
    return ArraySplit(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, int))

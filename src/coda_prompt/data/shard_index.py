"""Index of tar shards: where each image is, built from the tar headers once and then cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from coda_prompt.console import ProgressBar, is_valid_class_name
from coda_prompt.data.images import SUFFIXES
from coda_prompt.data.sources import Integers
from coda_prompt.errors import CorruptFile, MissingData
from coda_prompt.storage.files import user_cache_dir
from coda_prompt.storage.remote import open_filesystem
from coda_prompt.storage.tensors import read_tensors, write_tensors

INDEX_NAME = ".coda-index-{}.safetensors"
PACKING_STATE = "packing.json"
"""File next to shards that are still being written by `coda shards`."""
COLUMNS = ("label", "shard", "offset", "size")
MAX_LABEL_BYTES = 1 << 16
"""Limit for a .cls or .json file."""
REMOTE_THREADS = 8
"""Remote shards whose headers are read at the same time."""
EXPECTED_LAYOUT = (
    "Point at a folder with train-*.tar and test-*.tar in which every image has a .cls or .json "
    "file or a class folder; `coda shards FOLDER OUT` makes one from class folders."
)


@dataclass(frozen=True)
class ShardIndex:
    """Position of each image of a split, sorted by key."""

    names: tuple[str, ...]
    """Class labels as the shards write them."""
    label: NDArray[np.int32]
    shard: NDArray[np.int32]
    offset: Integers
    size: Integers

    def is_valid(self, shard_sizes: Sequence[int]) -> bool:
        """Return whether class names are valid and all images are inside the shards."""
        arrays, names = [getattr(self, name) for name in COLUMNS], self.names
        if any(array.shape != self.label.shape or array.ndim != 1 for array in arrays):
            return False
        if not len(self.label) or any(array.dtype.kind != "i" for array in arrays):
            return False
        return bool(
            all(is_valid_class_name(name) for name in names)
            and len(set(names)) == len(names)
            and min(array.min() for array in arrays) >= 0
            and self.label.max() < len(names)
            and self.shard.max() < len(shard_sizes)
            and (self.offset + self.size <= np.array(shard_sizes)[self.shard]).all()
        )


def load_index(root: str, split: str) -> tuple[list[str], ShardIndex]:
    """Return the shards of a split and their index, from the cache if it is up to date.

    Raises:
        MissingData: there are no shards, they cannot be read or are still being written.
        CorruptFile: a shard is damaged.
    """
    try:
        filesystem, path = open_filesystem(root)
        files = sorted(str(file) for file in filesystem.ls(path, detail=False))
        shards = [file for file in files if fnmatch(file.rpartition("/")[2], f"{split}-*.tar")]
        sizes = [int(filesystem.size(shard)) for shard in shards]
        states = [str(filesystem.ukey(shard)) for shard in shards]
    except Exception as error:  # each file system has its own exceptions
        raise MissingData(root, f"it cannot be read ({error})", EXPECTED_LAYOUT) from error
    if any(file.endswith(f"/{PACKING_STATE}") for file in files):
        problem = "'coda shards' has not finished writing it"
        raise MissingData(root, problem, "Run that command again.")
    if not shards:
        raise MissingData(root, f"there is no {split}-*.tar", EXPECTED_LAYOUT)
    names = [os.path.basename(shard) for shard in shards]
    shard_states = [list(state) for state in zip(names, sizes, states, strict=True)]
    cache_paths = _cache_paths(root, split)
    for cache_path in cache_paths:
        cached = read_index(cache_path, shard_states)
        if cached is not None and cached.is_valid(sizes):
            return shards, cached
    index = build_index(filesystem, shards, split)
    if not index.is_valid(sizes):
        raise CorruptFile(root, f"the shards of {split} refer to images outside of them")
    for cache_path in cache_paths:
        with contextlib.suppress(OSError):  # read-only: try the next path
            cache_path.parent.mkdir(parents=True, exist_ok=True)
            write_index(cache_path, index, shard_states)
            break
    return shards, index


def _cache_paths(root: str, split: str) -> list[Path]:
    """Return where an index may be cached: next to local shards, or in the user's cache."""
    key = hashlib.sha256(root.encode()).hexdigest()[:16]
    user_path = user_cache_dir() / f"shards-{key}-{split}.safetensors"
    return [user_path] if "://" in root else [Path(root) / INDEX_NAME.format(split), user_path]


def write_index(path: Path, index: ShardIndex, shard_states: list[list[Any]]) -> None:
    """Write an index; `shard_states` identifies the shards it belongs to."""
    tensors = {name: torch.from_numpy(getattr(index, name)) for name in COLUMNS}
    write_tensors(path, tensors, {"shards": shard_states, "names": list(index.names)})


def read_index(path: Path, shard_states: list[list[Any]]) -> ShardIndex | None:
    """Read a cached index; None if it is missing, damaged or of other shards."""
    try:
        file = read_tensors(path)
    except (OSError, CorruptFile):
        return None
    description = file.description or {}
    names = description.get("names")
    if description.get("shards") != shard_states or file.tensors.keys() != set(COLUMNS):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return ShardIndex(tuple(names), **{name: file.tensors[name].numpy() for name in COLUMNS})


def build_index(filesystem: Any, shards: Sequence[str], split: str) -> ShardIndex:
    """Read all tar headers and label files."""
    keys: list[str] = []
    label_ids: dict[str, int] = {}
    tables: list[Integers] = []
    pool = ThreadPoolExecutor(1 if isinstance(filesystem, LocalFileSystem) else REMOTE_THREADS)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        bar = stack.enter_context(ProgressBar())
        progress = bar.add_task(f"indexing the shards of {split}", total=len(shards))
        results = pool.map(lambda shard: list(_read_shard(filesystem, shard)), shards)
        for number, images in enumerate(results):
            keys += [key for key, *_ in images]
            rows = [
                (label_ids.setdefault(label, len(label_ids)), number, offset, size)
                for _, label, offset, size in images
            ]
            tables.append(np.array(rows, np.int64).reshape(-1, 4))
            bar.update(progress, completed=number + 1)
    if not keys:
        problem = f"there is no image in the shards of {split}"
        raise MissingData(shards[0], problem, EXPECTED_LAYOUT)
    order = np.argsort(np.array(keys, object), kind="stable")
    del keys  # most of the memory if there are many images
    label, shard, offset, size = (
        np.concatenate([table[:, column] for table in tables])[order] for column in range(4)
    )
    names = sorted(label_ids)
    ranks = {name: rank for rank, name in enumerate(names)}
    label = np.array([ranks[name] for name in label_ids])[label]  # ids were in order of appearance
    return ShardIndex(tuple(names), label.astype(np.int32), shard.astype(np.int32), offset, size)


def _read_shard(filesystem: Any, shard: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, label, first byte and size of each image."""
    images: dict[str, list[tarfile.TarInfo]] = {}
    label_files: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with filesystem.open(shard, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
            for member in archive:
                key, extension = _split_name(member.name)
                if not member.isreg() or not key:
                    continue
                if member.sparse is not None:
                    raise CorruptFile(shard, f"'{member.name}' in it is sparse; pack it again")
                if f".{extension.rpartition('.')[2]}" in SUFFIXES:
                    images.setdefault(key, []).append(member)
                elif extension in ("cls", "json"):
                    label_files[key] = member
            raw.seek(archive.offset)
            if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise CorruptFile(shard, "is damaged or truncated")
            for key in images.keys() & label_files.keys():
                labels[key] = _read_label(archive, label_files[key], shard)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise CorruptFile(shard, f"cannot be read as a tar file ({error})") from error
    for key, members in images.items():
        if labels.get(key) and len(members) > 1:
            raise CorruptFile(shard, f"has several images of '{key}', but one label")
        for member in members:
            folder = member.name.rpartition("/")[0].rpartition("/")[2]
            label = labels.get(key) or folder
            if not is_valid_class_name(label) or label in (".", ".."):
                raise CorruptFile(shard, f"has no label for '{key}'")
            name = key if labels.get(key) else member.name
            yield name, label, member.offset_data, member.size


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its base name into key and extension."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return (f"{folder}/{stem}" if folder and stem else stem), extension.lower()


def _read_label(archive: tarfile.TarFile, member: tarfile.TarInfo, shard: str) -> str:
    file = archive.extractfile(member) if member.size <= MAX_LABEL_BYTES else None
    try:
        if file is None:
            raise ValueError
        text = file.read().decode().strip()
        if member.name.lower().endswith(".json"):
            fields = json.loads(text)
            present = [field for field in ("label", "cls", "class") if field in fields]
            label = fields[present[0]] if present else None
            usable = isinstance(label, str | int) and not isinstance(label, bool)
            text = str(label) if usable else ""
        return str(int(text)) if is_class_number(text) else text
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptFile(shard, f"'{member.name}' in it is not a label") from error


def is_class_number(text: str) -> bool:
    """Return whether a label is a number, which refers to a line of classes.txt."""
    return text.isascii() and text.isdigit() and len(text) < 10

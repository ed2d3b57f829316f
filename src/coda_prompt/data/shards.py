"""Images in tar shards (webdataset's layout), on a disk or behind any fsspec address.

    train-000000.tar   000000007.jpg, 000000007.cls, ...
    test-000000.tar
    classes.txt        names, one a line: what the numbers in .cls files stand for

Headers are read once; an index remembers where each image lies, which is then one read of its
bytes. So shards are seen in the very order, shuffled or not, in which a folder of the same images
is, by any number of processes and loader workers, and nothing is unpacked or copied.
"""

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
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from PIL import Image
from rich.progress import TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coda_prompt.console import ProgressBar, stderr_console
from coda_prompt.data.folders import is_valid_class_name
from coda_prompt.data.images import SUFFIXES, open_image
from coda_prompt.data.sources import Integers, Source
from coda_prompt.errors import BadImage, CorruptFile, MissingData
from coda_prompt.storage.files import user_cache_dir, write_atomically

PREFIX = "shards:"
PARTS = ("train", "test")
CLASSES, INDEX = "classes.txt", ".coda-index-{}.safetensors"
READERS = 8
"""Shards whose headers are read at the same time: a network answers many as fast as one."""
NOTE = "packing.json"
"""Beside shards that are still being written."""
LONGEST_LABEL = 1 << 16
"""Bytes of a .cls or .json file."""
WANTED = (
    "Point at a place with train-*.tar and test-*.tar in which every image has a .cls or .json "
    "file or a class folder; `coda shards FOLDER OUT` makes one from class folders."
)


@dataclass(frozen=True)
class Index:
    """Where the images of a part lie, in the order of their keys."""

    names: tuple[str, ...]
    """Classes as the shards call them."""
    label: NDArray[np.int32]
    shard: NDArray[np.int32]
    offset: Integers
    size: Integers

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in ("label", "shard", "offset", "size")}

    def digest(self) -> str:
        digest = hashlib.sha256(json.dumps(self.names).encode())
        for array in self.columns.values():
            digest.update(array.tobytes())
        return digest.hexdigest()

    def valid(self, sizes: Sequence[int]) -> bool:
        """Whether its names are names, and all it says is inside shards of these sizes."""
        arrays = self.columns.values()
        if any(array.shape != self.label.shape or array.ndim != 1 for array in arrays):
            return False
        if any(array.dtype.kind != "i" for array in arrays):
            return False
        names = self.names
        if not all(is_valid_class_name(name) for name in names) or len(set(names)) < len(names):
            return False
        if not len(self.label):
            return False
        if min(array.min() for array in arrays) < 0 or self.label.max() >= len(self.names):
            return False
        if self.shard.max() >= len(sizes):
            return False
        return bool((self.offset + self.size <= np.array(sizes)[self.shard]).all())


class ShardSplit:
    """One part of the shards. It holds no open file, so workers can have a copy."""

    domains: Integers | None = None

    def __init__(self, address: str, shards: Sequence[str], index: Index, labels: Integers) -> None:
        self.address, self.shards, self.labels = address, tuple(shards), labels
        self._index = index

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        shard = self.shards[self._index.shard[index]]
        first = int(self._index.offset[index])
        name = f"{shard} at byte {first}"
        size = int(self._index.size[index])
        try:
            if "://" in self.address:
                files, _ = _opened(self.address)
                content = files.cat_file(shard, start=first, end=first + size)
            else:
                with open(shard, "rb") as raw:
                    raw.seek(first)
                    content = raw.read(size)
        except Exception as problem:  # disks and networks fail in many ways
            raise BadImage(name, f"it cannot be read ({problem})") from problem
        return open_image(content, min_side, name)

    def fingerprint(self) -> str:
        """A hash of the shards' names, of where in them the images lie, and of the labels."""
        digest = hashlib.sha256("\n".join(os.path.basename(name) for name in self.shards).encode())
        for array in (self._index.shard, self._index.offset, self._index.size, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()


def shard_source(address: str) -> Source:
    """Shards `train-*.tar` and `test-*.tar` at a path or address (`s3://...`, `hf://...`)."""
    place = address if "://" in address else str(Path(address).expanduser().absolute())
    name = place.rstrip("/").rpartition("/")[2]
    found = [_part(place, part) for part in PARTS]
    names = _class_names(place, {text for _, index in found for text in index.names})
    rows = {text: row for row, text in enumerate(names[0])}
    train, test = (
        ShardSplit(
            place, shards, index, np.array([rows[text] for text in index.names])[index.label]
        )
        for shards, index in found
    )
    return Source(name, names[1], train, test)


def open_shard_split(address: str, part: str) -> tuple[ShardSplit, tuple[str, ...]]:
    """One part, and the names of its classes."""
    source = shard_source(address)
    split = source.train if part == "train" else source.test
    assert isinstance(split, ShardSplit)
    return split, source.class_names


# -- the index


def _part(place: str, part: str) -> tuple[list[str], Index]:
    """The shards of a part, and its index: as it was kept, or made and kept."""
    try:
        files, root = _opened(place)
        listed = sorted(str(path) for path in files.ls(root, detail=False))
        shards = [path for path in listed if fnmatch(path.rpartition("/")[2], f"{part}-*.tar")]
        sizes = [int(files.size(shard)) for shard in shards]
        states = [str(files.ukey(shard)) for shard in shards]
    except Exception as problem:  # disks and networks fail in many ways
        raise MissingData(place, f"it cannot be read ({problem})", WANTED) from problem
    if any(path.endswith(f"/{NOTE}") for path in listed):
        remedy = "Run that command again to its end."
        raise MissingData(place, "'coda shards' has not written all of it", remedy)
    if not shards:
        raise MissingData(place, f"there is no {part}-*.tar", WANTED)
    names = [os.path.basename(shard) for shard in shards]
    made_of = json.dumps(list(zip(names, sizes, states, strict=True)))
    homes = _homes(place, part)
    for home in homes:
        kept = _kept(home, made_of)
        if kept is not None and kept.valid(sizes):
            return shards, kept
    index = _made(files, shards, part)
    if not index.valid(sizes):
        raise CorruptFile(place, f"the shards of {part} name images that are not inside them")
    for home in homes:
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(home, _packed(index, made_of))
            break
        except OSError:  # a place for reading only: the next one
            continue
    return shards, index


def _opened(place: str) -> tuple[Any, str]:
    """The files of a place, and what it is called among them."""
    if "://" in place:
        found: tuple[Any, str] = url_to_fs(place)
        return found
    return LocalFileSystem(), place


def _homes(place: str, part: str) -> list[Path]:
    """Where an index is kept: beside the shards, or in the user's cache."""
    key = hashlib.sha256(place.encode()).hexdigest()[:16]
    own = user_cache_dir() / f"shards-{key}-{part}.safetensors"
    return [own] if "://" in place else [Path(place) / INDEX.format(part), own]


def _packed(index: Index, made_of: str) -> bytes:
    told = {"shards": made_of, "names": json.dumps(index.names), "sha256": index.digest()}
    return save(index.columns, told)


def _kept(home: Path, made_of: str) -> Index | None:
    """The index in a file, if it is one of these shards."""
    try:
        content = home.read_bytes()
        length = int.from_bytes(content[:8], "little")
        told = json.loads(content[8 : 8 + length])["__metadata__"]
        names = json.loads(told["names"])
        if told["shards"] != made_of or not all(isinstance(name, str) for name in names):
            return None
        found = Index(tuple(names), **load(content))
        return found if found.digest() == told["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError):
        return None


def _made(files: Any, shards: Sequence[str], part: str) -> Index:
    """Read all headers, and the files that say what the images are."""
    keys: list[str] = []
    rows: dict[str, int] = {}
    places: list[Integers] = []
    pool = ThreadPoolExecutor(1 if isinstance(files, LocalFileSystem) else READERS)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        bar = stack.enter_context(ProgressBar(stderr_console(), TimeRemainingColumn())).bar
        line = bar.add_task(f"indexing the shards of {part}", total=len(shards))
        found = pool.map(lambda shard: list(_entries(files, shard)), shards)
        for number, entries in enumerate(found):
            keys += [key for key, *_ in entries]
            own = [
                (rows.setdefault(label, len(rows)), number, offset, size)
                for _, label, offset, size in entries
            ]
            places.append(np.array(own, np.int64).reshape(-1, 4))
            bar.update(line, completed=number + 1)
    if not keys:
        raise MissingData(shards[0], f"there is no image in the shards of {part}", WANTED)
    order = np.argsort(np.array(keys, object), kind="stable")
    del keys  # most of the memory, where images are many
    label, shard, offset, size = (
        np.concatenate([own[:, column] for own in places])[order] for column in range(4)
    )
    names = sorted(rows)
    ranks = {name: rank for rank, name in enumerate(names)}
    label = np.array([ranks[name] for name in rows])[label]  # until now by when it was met
    return Index(tuple(names), label.astype(np.int32), shard.astype(np.int32), offset, size)


def _entries(files: Any, shard: str) -> Iterator[tuple[str, str, int, int]]:
    """Key, label, first byte and size of each image."""
    images: dict[str, list[tarfile.TarInfo]] = {}
    notes: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with files.open(shard, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
            for member in archive:
                key, ending = _parted(member.name)
                if not member.isreg() or not key:
                    continue
                if member.sparse is not None:
                    raise CorruptFile(shard, f"'{member.name}' in it has holes; pack it anew")
                if f".{ending.rpartition('.')[2]}" in SUFFIXES:
                    images.setdefault(key, []).append(member)
                elif ending in ("cls", "json"):
                    notes[key] = member
            raw.seek(archive.offset)
            if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise CorruptFile(shard, "is damaged or cut off")
            for key in images.keys() & notes.keys():
                labels[key] = _label(archive, notes[key], shard)
    except (tarfile.TarError, EOFError, OSError, ValueError) as problem:
        raise CorruptFile(shard, f"cannot be read as a tar file ({problem})") from problem
    for key, members in images.items():
        if labels.get(key) and len(members) > 1:
            raise CorruptFile(shard, f"has several images of '{key}', and one label")
        for member in members:
            folder = member.name.rpartition("/")[0].rpartition("/")[2]
            label = labels.get(key) or folder
            if not is_valid_class_name(label) or label in (".", ".."):
                raise CorruptFile(shard, f"does not say what '{key}' is")
            name = key if labels.get(key) else member.name
            yield name, label, member.offset_data, member.size


def _parted(name: str) -> tuple[str, str]:
    """A member's key, up to the first dot of its file's name, and the rest in small letters."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, _, ending = base.partition(".")
    return (f"{folder}/{stem}" if folder and stem else stem), ending.lower()


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo, shard: str) -> str:
    held = archive.extractfile(member) if member.size <= LONGEST_LABEL else None
    try:
        if held is None:
            raise ValueError
        text = held.read().decode().strip()
        if member.name.lower().endswith(".json"):
            told = json.loads(text)
            fields = [field for field in ("label", "cls", "class") if field in told]
            label = told[fields[0]] if fields else None
            known = isinstance(label, str | int) and not isinstance(label, bool)
            text = str(label) if known else ""
        return str(int(text)) if _is_number(text) else text
    except (ValueError, TypeError, RecursionError) as problem:
        raise CorruptFile(shard, f"'{member.name}' in it is not a label") from problem


def _class_names(place: str, texts: set[str]) -> tuple[list[str], tuple[str, ...]]:
    """All labels in the order of their rows, and what they are called."""
    numbers = all(_is_number(text) for text in texts)
    told = _listed(place) if numbers else None
    if told is not None:
        if unknown := [text for text in texts if int(text) >= len(told)]:
            problem = f"has {len(told)} names, but there is a class {max(unknown, key=int)}"
            raise CorruptFile(f"{place}/{CLASSES}", problem)
        return [str(row) for row in range(len(told))], told
    ordered = sorted(texts, key=int) if numbers else sorted(texts)
    return ordered, tuple(ordered)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _listed(place: str) -> tuple[str, ...] | None:
    files, root = _opened(place)
    path = f"{root.rstrip('/')}/{CLASSES}"
    try:
        if not files.exists(path):
            return None
        names = parse_class_list(files.cat_file(path))
    except Exception as problem:  # disks and networks fail in many ways
        raise CorruptFile(f"{place}/{CLASSES}", f"cannot be read ({problem})") from problem
    if not names:
        raise CorruptFile(f"{place}/{CLASSES}", "is not one class name a line")
    return names


def parse_class_list(content: bytes) -> tuple[str, ...]:
    """The names of a list, one a line; none where one of them is no name."""
    lines = content.decode("utf-8-sig").rstrip("\r\n").split("\n")
    names = tuple(line.removesuffix("\r") for line in lines)
    return names if all(is_valid_class_name(name) for name in names) else ()

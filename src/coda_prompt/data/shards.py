"""Images in tar shards (webdataset's layout), local or at any fsspec URL.

    train-000000.tar   000000007.jpg, 000000007.cls, ...
    test-000000.tar
    classes.txt        class names, one per line, for the numbers in .cls files

Tar headers are read once; afterwards an index gives the position of each image, which is one read.
Shards therefore support random access: images come in the same order, shuffled or not, as from a
folder, for any number of processes and loader workers, and nothing is unpacked or copied.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from coda_prompt.console import is_valid_class_name
from coda_prompt.data.images import open_image
from coda_prompt.data.shard_index import ShardIndex, is_class_number, load_index
from coda_prompt.data.sources import Integers, Source, Split
from coda_prompt.errors import BadImage, CorruptFile
from coda_prompt.storage.remote import open_filesystem

PREFIX = "shards:"
SPLITS = ("train", "test")
CLASSES_FILE = "classes.txt"


class ShardSplit(Split):
    """One split of the shards. It has no open files, so that loader workers can copy it."""

    def __init__(
        self, root: str, shards: Sequence[str], index: ShardIndex, labels: Integers
    ) -> None:
        self.root, self.shards, self.labels = root, tuple(shards), labels
        self._index = index

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        shard = self.shards[self._index.shard[index]]
        offset, size = int(self._index.offset[index]), int(self._index.size[index])
        name = f"{shard} at byte {offset}"
        try:
            if "://" in self.root:
                filesystem, _ = open_filesystem(self.root)
                content = filesystem.cat_file(shard, start=offset, end=offset + size)
            else:
                with open(shard, "rb") as file:
                    file.seek(offset)
                    content = file.read(size)
        except Exception as error:  # each file system has its own exceptions
            raise BadImage(name, f"it cannot be read ({error})") from error
        return open_image(content, min_side, name)

    def fingerprint(self) -> str:
        """Hash the shards' names, the positions of the images and the labels."""
        digest = hashlib.sha256("\n".join(os.path.basename(name) for name in self.shards).encode())
        for array in (self._index.shard, self._index.offset, self._index.size, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()


def shard_source(root: str) -> Source:
    """Open shards `train-*.tar` and `test-*.tar`.

    Args:
        root: a folder, or a URL such as `s3://bucket/folder` or `hf://datasets/owner/name`.

    Raises:
        MissingData: there are no shards, or they cannot be read.
        CorruptFile: a shard or `classes.txt` is damaged.
    """
    root = root if "://" in root else str(Path(root).expanduser().absolute())
    indexes = [load_index(root, split) for split in SPLITS]
    labels, class_names = _class_names(root, {name for _, index in indexes for name in index.names})
    rows = {label: row for row, label in enumerate(labels)}
    train, test = (
        ShardSplit(root, shards, index, np.array([rows[name] for name in index.names])[index.label])
        for shards, index in indexes
    )
    return Source(root.rstrip("/").rpartition("/")[2], class_names, train, test)


def open_shard_split(root: str, split: str) -> tuple[ShardSplit, tuple[str, ...]]:
    """Open one split; returns it and its class names."""
    source = shard_source(root)
    opened = source.train if split == "train" else source.test
    assert isinstance(opened, ShardSplit)
    return opened, source.class_names


def _class_names(root: str, labels: set[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return all labels in the order of their rows, and the class name of each."""
    are_numbers = all(is_class_number(label) for label in labels)
    names = _read_class_list(root) if are_numbers else None
    if names is not None:
        if unknown := [label for label in labels if int(label) >= len(names)]:
            problem = f"has {len(names)} names, but there is a class {max(unknown, key=int)}"
            raise CorruptFile(f"{root}/{CLASSES_FILE}", problem)
        return [str(row) for row in range(len(names))], names
    ordered = sorted(labels, key=int) if are_numbers else sorted(labels)
    return ordered, tuple(ordered)


def _read_class_list(root: str) -> tuple[str, ...] | None:
    filesystem, folder = open_filesystem(root)
    path = f"{folder.rstrip('/')}/{CLASSES_FILE}"
    try:
        if not filesystem.exists(path):
            return None
        names = parse_class_list(filesystem.cat_file(path))
    except Exception as error:  # each file system has its own exceptions
        raise CorruptFile(f"{root}/{CLASSES_FILE}", f"cannot be read ({error})") from error
    if not names:
        raise CorruptFile(f"{root}/{CLASSES_FILE}", "is not one class name per line")
    return names


def parse_class_list(content: bytes) -> tuple[str, ...]:
    """Return the class names of a list, one per line; () if one of them is invalid."""
    lines = content.decode("utf-8-sig").rstrip("\r\n").split("\n")
    names = tuple(line.removesuffix("\r") for line in lines)
    return names if all(is_valid_class_name(name) for name in names) else ()

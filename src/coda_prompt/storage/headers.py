"""Headers of checked tensor files, read and verified without torch.

The format is described in `storage/tensors.py`. Files are not trusted: sizes in a header are
compared with the length of the file before anything of that size is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coda_prompt.errors import CorruptFile
from coda_prompt.storage.files import open_regular

MAX_HEADER_BYTES, MAX_HEADER_SHARE = 2**19, 8
"""A header has at most so many bytes and one such part of the file: parsed, it takes many times its
length."""
MAX_CONTAINERS, MIN_CONTAINER_BYTES = 1000, 12
"""A header has at most so many lists and objects, and one more for each so many of its bytes."""
MAX_AXES, MAX_ELEMENTS = 8, 2**40
"""Of a tensor. One without elements needs no bytes in a file, whatever its other axes; its strides
are computed all the same, so an axis of length 0 counts as 1."""
DESCRIPTION, SHA256 = "description", "sha256"
_TYPES = {
    **{"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2)},
    **{"I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1)},
    **{"U8": ("uint8", 1), "BOOL": ("bool", 1)},
}
"""Name of each type of a safetensors file in torch, and its bytes."""

Values = tuple[str, str, tuple[int, ...], bytes | memoryview]
"""Name, type in torch, shape and bytes of a tensor."""


def read_checked_description(content: bytes, path: object) -> tuple[dict[str, Any] | None, str]:
    """Return the description in the header of a tensor file, and the sha256 it was checked with.

    Args:
        content: The whole file.
        path: Its name in error messages.

    Returns:
        For a plain safetensors file, None and the hash of all its bytes.

    Raises:
        CorruptFile: It is damaged, truncated or not a safetensors file.
    """
    header, body_start = _parse_header(content, path)
    metadata = header.pop("__metadata__", None) or {}
    body = memoryview(content)[body_start:]
    try:
        values = [_values(name, entry, body) for name, entry in header.items()]
        if DESCRIPTION not in metadata:
            return None, hashlib.sha256(content).hexdigest()
        description = json.loads(metadata[DESCRIPTION])
        stated = description.pop(SHA256)
        actual = content_sha256(values, description)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(path, "its header cannot be read") from error
    if stated != actual:
        raise CorruptFile(path, "was changed or damaged: its content does not match its sha256")
    return description, actual


def stated_sha256(path: Path) -> str | None:
    """Return the sha256 stated in a file's header without reading its tensors.

    None if there is no such file or it is not a checked tensor file.

    Raises:
        CorruptFile: It is a link, a pipe or a device.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            longest = max_header_bytes(os.fstat(file.fileno()).st_size)
            metadata = json.loads(file.read(min(length, longest)))["__metadata__"]
        return str(json.loads(metadata[DESCRIPTION])[SHA256])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def content_sha256(values: Iterable[Values], description: Mapping[str, Any]) -> str:
    """Hash a description together with all tensors."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256((text + values_sha256(values)).encode()).hexdigest()


def values_sha256(values: Iterable[Values]) -> str:
    """Hash names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, kind, shape, content in sorted(values, key=lambda each: each[0]):
        digest.update(f"{name}{kind}{shape}".encode())
        digest.update(content)
    return digest.hexdigest()


def _values(name: str, entry: Mapping[str, Any], body: memoryview) -> Values:
    """Return a tensor of a header after checking its size.

    Raises:
        ValueError, LookupError, TypeError: It is not described, or not of the size of its bytes.
    """
    (kind, item_bytes), shape = _TYPES[entry["dtype"]], entry["shape"]
    start, end = entry["data_offsets"]
    sizes = (*shape, start, end)
    if len(shape) > MAX_AXES or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"the sizes of '{name}' are not numbers of elements")
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS or end > len(body):
        raise ValueError(f"'{name}' is larger than its file")
    if math.prod(shape) * item_bytes != end - start:
        raise ValueError(f"'{name}' has not as many elements as bytes for them")
    return name, f"torch.{kind}", tuple(shape), body[start:end]


def max_header_bytes(file_bytes: int) -> int:
    """Return the most bytes that the header of a file may have."""
    return MAX_HEADER_BYTES + file_bytes // MAX_HEADER_SHARE


def _parse_header(content: bytes, path: object) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the first byte after it."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise CorruptFile(path, "is truncated or not a safetensors file")
    text = content[8 : 8 + length]
    containers = text.count(b"[") + text.count(b"{")
    if (
        length > max_header_bytes(len(content))
        or containers > MAX_CONTAINERS + length // MIN_CONTAINER_BYTES
    ):
        raise CorruptFile(path, "its header is too large for its tensors")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(path, "has no readable header") from error
    if not isinstance(header, dict):
        raise CorruptFile(path, "has no readable header")
    return header, 8 + length

"""Whether an ONNX file refers to other files, found without the package `onnx`.

An ONNX file is a message of protocol buffers, whose tensors may lie in other files. Only the
fields that lead to tensors are read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from coda_prompt.errors import CorruptFile
from coda_prompt.storage.files import check_regular, open_regular

_FIELDS = MappingProxyType(
    {
        "model": {7: "graph", 25: "function"},
        "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
        "function": {7: "node"},
        "node": {5: "attribute"},
        "attribute": {
            **{5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
            **{22: "sparse tensor", 23: "sparse tensor"},
        },
        "sparse tensor": {1: "tensor", 2: "tensor"},
        "tensor": {13: "external data"},
    }
)
"""Message of onnx.proto -> number of a field -> message that is in it."""
_BYTES_OF_TYPE = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
MAX_DEPTH = 60


def check_graph(path: Path, weights: str | None) -> None:
    """Check that an ONNX file is a regular file that refers to no other file than `weights`.

    Raises:
        CorruptFile: It refers to others, is not an ONNX file, or is a link.
    """
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            named = set(_locations(content, 0, len(content), "model", 0))
    except (ValueError, IndexError) as error:
        raise CorruptFile(path, "is truncated or not an ONNX file") from error
    except OSError as error:
        raise CorruptFile(path, f"cannot be read ({error.strerror})") from error
    if weights is not None:
        check_regular(path.parent / weights)
        named.discard(weights.encode())
    if named:
        problem = f"has weights in another file ({min(named).decode('utf-8', 'replace')!a})"
        remedy = 'Put that file beside it, and its name into the JSON as "weights".'
        raise CorruptFile(path, problem, remedy)


def _locations(content: mmap.mmap, start: int, end: int, kind: str, depth: int) -> Iterator[bytes]:
    """Yield the names of other files that a message refers to.

    Raises:
        ValueError: It is not such a message.
    """
    if depth > MAX_DEPTH:
        raise ValueError("too many messages in each other")
    if kind == "external data":
        entry = {
            number: content[first:last] for number, first, last in _fields(content, start, end)
        }
        if entry.get(1) == b"location":
            yield entry.get(2, b"")
        return
    inner = _FIELDS[kind]
    for number, first, last in _fields(content, start, end):
        if number in inner:
            yield from _locations(content, first, last, inner[number], depth + 1)


def _fields(content: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of the fields of a message that have a length."""
    while start < end:
        key, start = _varint(content, start)
        kind = key & 7
        if kind == _LENGTH:
            length, start = _varint(content, start)
            if length > end - start:
                raise ValueError("longer than its message")
            yield key >> 3, start, start + length
            start += length
        elif kind == _VARINT:
            _, start = _varint(content, start)
        else:
            start += _BYTES_OF_TYPE.get(kind, end)  # other types are obsolete: fails below
    if start != end:
        raise ValueError("longer than its message")


def _varint(content: mmap.mmap, start: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    value = shift = 0
    while True:
        byte = content[start]
        value, start = value | (byte & 0x7F) << shift, start + 1
        if byte < 0x80:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")

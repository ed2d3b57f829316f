"""Headers of checked tensor files, read and verified without torch.

The format is described in `storage/tensors.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coda_prompt.errors import CorruptFile
from coda_prompt.storage.files import open_regular

MAX_HEADER_BYTES = 100 * 2**20
DESCRIPTION, SHA256 = "description", "sha256"
_TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    **{"BOOL": "bool", "C64": "complex64"},
}
"""Name of each type of a safetensors file in torch."""

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
        if DESCRIPTION not in metadata:
            return None, hashlib.sha256(content).hexdigest()
        description = json.loads(metadata[DESCRIPTION])
        if SHA256 in metadata:  # a model of format 1
            stated = metadata[SHA256]
            digest = hashlib.sha256(metadata[DESCRIPTION].encode())
            digest.update(body)
            actual = digest.hexdigest()
        else:
            stated = description.pop(SHA256)
            values = (_values(name, entry, body) for name, entry in header.items())
            actual = content_sha256(values, description)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(path, "its description cannot be read") from error
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
            length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            metadata = json.loads(file.read(length))["__metadata__"]
        return str(metadata.get(SHA256) or json.loads(metadata[DESCRIPTION])[SHA256])
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
    start, end = entry["data_offsets"]
    return name, f"torch.{_TYPES[entry['dtype']]}", tuple(entry["shape"]), body[start:end]


def _parse_header(content: bytes, path: object) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the first byte after it."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise CorruptFile(path, "is truncated or not a safetensors file")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptFile(path, "has no readable header") from error
    if not isinstance(header, dict):
        raise CorruptFile(path, "has no readable header")
    return header, 8 + length

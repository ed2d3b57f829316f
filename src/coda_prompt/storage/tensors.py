"""Checked tensor files: safetensors whose header has a JSON description and a sha256.

The header's metadata have one entry, `description`: a JSON object with the caller's fields and
`sha256`, the hash of those fields and of all tensors (names, types, shapes, values). So one rename
replaces tensors and description together, and a damaged file is recognised. Equal content gives
equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import CorruptFile, TooLong
from coda_prompt.storage.files import read_regular, write_atomically
from coda_prompt.storage.headers import (
    DESCRIPTION,
    SHA256,
    Values,
    content_sha256,
    max_header_bytes,
    read_checked_description,
    values_sha256,
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TensorFile:
    """The checked content of a file."""

    tensors: dict[str, NDArray[Any]]
    description: dict[str, Any] | None
    """None for a plain safetensors file."""
    sha256: str
    """As stated in the header; for a plain safetensors file, the hash of all its bytes."""


def encode_tensors(tensors: Arrays, description: Mapping[str, Any]) -> bytes:
    """Return the bytes of a checked tensor file."""
    return _encode(tensors, description)[0]


def _encode(tensors: Arrays, description: Mapping[str, Any]) -> tuple[bytes, str]:
    from safetensors.numpy import save

    values = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    values = {name: array.reshape(tensors[name].shape) for name, array in values.items()}
    sha256 = content_sha256(_values(values), description)
    header = json.dumps({**description, SHA256: sha256}, sort_keys=True)
    content = save(values, {DESCRIPTION: header})
    most = max_header_bytes(len(content))
    if int.from_bytes(content[:8], "little") > most:
        raise TooLong(len(header), most)
    return content, sha256


def decode_tensors(content: bytes, path: object) -> TensorFile:
    """Parse and check the bytes of a tensor file.

    Args:
        content: The whole file.
        path: Its name in error messages.

    Raises:
        CorruptFile: It is damaged, truncated or not a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    description, sha256 = read_checked_description(content, path)
    try:
        return TensorFile(load(content), description, sha256)
    except SafetensorError as error:
        raise CorruptFile(path, f"cannot be read ({error})") from error


def write_tensors(path: Path, tensors: Arrays, description: Mapping[str, Any]) -> str:
    """Write a checked tensor file atomically and return its sha256."""
    content, sha256 = _encode(tensors, description)
    write_atomically(path, content)
    return sha256


def read_tensors(path: Path) -> TensorFile:
    """Read and check a tensor file.

    Raises:
        CorruptFile: It is damaged, truncated or not a safetensors file.
        OSError: It cannot be opened.
    """
    return decode_tensors(read_regular(path), path)


def tensors_sha256(tensors: Arrays) -> str:
    """Hash names, types, shapes and values of tensors."""
    return values_sha256(_values(tensors))


def _values(tensors: Arrays) -> Iterator[Values]:
    for name, array in tensors.items():
        yield name, f"torch.{array.dtype}", tuple(array.shape), array.tobytes()

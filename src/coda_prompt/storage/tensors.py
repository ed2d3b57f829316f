"""Checked tensor files: safetensors whose header has a JSON description and a sha256.

The header's metadata have one entry, `description`: a JSON object with the caller's fields and
`sha256`, the hash of those fields and of all tensors (names, types, shapes, values). So one rename
replaces tensors and description together, and a damaged file is recognised. Equal content gives
equal bytes.

Files written before format 2 are read too: models had a separate `sha256` entry over description
and body, checkpoints had no metadata at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from coda_prompt.errors import CorruptFile
from coda_prompt.storage.files import write_atomically

MAX_HEADER_BYTES = 100 * 2**20
DESCRIPTION, SHA256 = "description", "sha256"


@dataclass(frozen=True)
class TensorFile:
    """The checked content of a file."""

    tensors: dict[str, Tensor]
    description: dict[str, Any] | None
    """None for a plain safetensors file."""
    sha256: str
    """As stated in the header; for a plain safetensors file, the hash of all its bytes."""


def encode_tensors(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> bytes:
    """Return the bytes of a checked tensor file."""
    return _encode(tensors, description)[0]


def _encode(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> tuple[bytes, str]:
    # Cloned because safetensors refuses tensors that share memory.
    values = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    sha256 = _content_sha256(values, description)
    header = json.dumps({**description, SHA256: sha256}, sort_keys=True)
    return save(values, {DESCRIPTION: header}), sha256


def decode_tensors(content: bytes, path: object) -> TensorFile:
    """Parse and check the bytes of a tensor file.

    Args:
        content: The whole file.
        path: Its name in error messages.

    Raises:
        CorruptFile: It is damaged, truncated or not a safetensors file.
    """
    header, body_start = _parse_header(content, path)
    metadata = header.get("__metadata__") or {}
    try:
        tensors = load(content)
        if DESCRIPTION not in metadata:
            return TensorFile(tensors, None, hashlib.sha256(content).hexdigest())
        description = json.loads(metadata[DESCRIPTION])
        if SHA256 in metadata:  # a model of format 1
            stated = metadata[SHA256]
            digest = hashlib.sha256(metadata[DESCRIPTION].encode())
            digest.update(memoryview(content)[body_start:])
            actual = digest.hexdigest()
        else:
            stated = description.pop(SHA256)
            actual = _content_sha256(tensors, description)
    except SafetensorError as error:
        raise CorruptFile(path, f"cannot be read ({error})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(path, "its description cannot be read") from error
    if stated != actual:
        raise CorruptFile(path, "was changed or damaged: its content does not match its sha256")
    return TensorFile(tensors, description, actual)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> str:
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
    return decode_tensors(path.read_bytes(), path)


def stated_sha256(path: Path) -> str | None:
    """Return the sha256 stated in a file's header without reading its tensors.

    None if there is no such file or it is not a checked tensor file.
    """
    try:
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            metadata = json.loads(file.read(length))["__metadata__"]
        return str(metadata.get(SHA256) or json.loads(metadata[DESCRIPTION])[SHA256])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{values.dtype}{tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _content_sha256(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256((text + tensors_sha256(tensors)).encode()).hexdigest()


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

"""Model files with any description and shapes and the right hash, as a stranger can make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_prompt.storage.headers import content_sha256

Change = Callable[[dict[str, Any]], object]
TYPES = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32", "U8": "uint8"}


def forged(
    content: bytes, change: Change = lambda _: None, shapes: dict[str, list[Any]] | None = None
) -> bytes:
    """Return a model file with a changed description and the right hash.

    Args:
        content: The file of a model.
        change: Changes its description, or returns what replaces it.
        shapes: Tensor -> another shape; it has no values then.
    """
    header, body = split_file(content)
    description = json.loads(header.pop("__metadata__")["description"])
    del description["sha256"]
    replaced = change(description)
    description = description if replaced is None else replaced
    values, kept = [], b""
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        own = body[start:end]
        if shapes and name in shapes:
            entry["shape"], own = shapes[name], b""
        entry["data_offsets"] = [len(kept), len(kept) + len(own)]
        kept += own
        kind = f"torch.{TYPES.get(entry['dtype'], entry['dtype'])}"
        values.append((name, kind, tuple(entry["shape"]), own))
    if isinstance(description, dict):
        description = {**description, "sha256": content_sha256(values, description)}
    return join_file({"__metadata__": {"description": json.dumps(description)}, **header}, kept)


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the body of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join_file(header: Any, body: bytes) -> bytes:
    """Return a safetensors file."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def forge_folder(folder: Path, *args: Any, **options: Any) -> Path:
    """Replace the model in a folder by `forged`."""
    file = folder / "model.safetensors"
    file.write_bytes(forged(file.read_bytes(), *args, **options))
    return folder

"""A model on disk: a folder whose `model.safetensors` says and holds everything.

The description travels in that file's header, so that one rename replaces both; `config.json` and
the card are copies for people and for the hub.

    model.safetensors      what was learned, never the backbone, and the description
    previous.safetensors   the same before the newest task, for `undo`
    next.safetensors       only while a save is under way; a crash leaves it, and it counts
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from coda_prompt.errors import CorruptFile, MissingData, ModelBusy, NothingToUndo
from coda_prompt.files import write_atomically

FORMAT = 1
MODEL, PREVIOUS, NEXT = "model.safetensors", "previous.safetensors", "next.safetensors"
CONFIG, CARD, LOCK = "config.json", "README.md", ".lock"
LARGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class Model:
    """What a model's file holds."""

    description: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def version(self) -> int:
        return int(self.description["version"])


def packed(model: Model) -> bytes:
    """The content of a model's file; equal models give equal bytes."""
    tensors = {name: model.tensors[name].cpu().contiguous() for name in sorted(model.tensors)}
    description = json.dumps({**model.description, "format": FORMAT}, sort_keys=True)
    data = save({name: tensor.clone() for name, tensor in tensors.items()})
    header, body = _parts(data, "a model")
    digest = hashlib.sha256(description.encode() + body).hexdigest()
    header["__metadata__"] = {"description": description, "sha256": digest}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def unpacked(content: bytes, path: object) -> Model:
    """The reverse, with everything checked."""
    header, body = _parts(content, path)
    held = header.get("__metadata__")
    if not isinstance(held, dict) or not {"description", "sha256"} <= held.keys():
        raise CorruptFile(path, "is not a model of this program")
    text = str(held["description"])
    if hashlib.sha256(text.encode() + body).hexdigest() != held["sha256"]:
        raise CorruptFile(path, "was changed or damaged: its content does not fit its hash")
    try:
        description = json.loads(text)
        tensors = load(content)
    except (ValueError, SafetensorError) as error:
        raise CorruptFile(path, f"cannot be read ({error})") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CorruptFile(
            path, f"is in format {description.get('format')}, this version reads {FORMAT}"
        )
    return Model(description, tensors)


def read_model(folder: Path) -> Model:
    return _read(folder, MODEL)


def read_previous(folder: Path) -> Model | None:
    """The model before the newest task, where it was kept."""
    return _read(folder, PREVIOUS) if (folder / PREVIOUS).exists() else None


def write_model(folder: Path, model: Model, previous: Model | None, card: str) -> None:
    """Replace the folder's model; whenever this stops, a reader finds one whole version."""
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    if previous is None:
        (folder / PREVIOUS).unlink(missing_ok=True)
        write_atomically(folder / MODEL, packed(model))
    else:
        write_atomically(folder / NEXT, packed(model))
        write_atomically(folder / PREVIOUS, packed(previous))
        os.replace(folder / NEXT, folder / MODEL)
    _write_copies(folder, model, card)


def restore_previous(folder: Path, card: str) -> None:
    """Undo: the previous model takes the newest one's place."""
    recover(folder)
    if not (folder / PREVIOUS).exists():
        raise NothingToUndo(folder)
    previous = _read(folder, PREVIOUS)
    os.replace(folder / PREVIOUS, folder / MODEL)
    _write_copies(folder, previous, card)


def recover(folder: Path) -> None:
    """Finish a save that was cut off after the new model had been written."""
    waiting = folder / NEXT
    if not waiting.exists():
        return
    try:
        following, previous = _read(folder, NEXT), read_previous(folder)
    except CorruptFile:
        waiting.unlink()
        return
    if previous is not None and following.version == previous.version + 1:
        os.replace(waiting, folder / MODEL)
    else:
        waiting.unlink()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """One writer at a time. The system frees the lock of a process that died."""
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    owner = folder / f"{LOCK}.owner"
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ModelBusy(folder, owner.read_text("utf-8") if owner.exists() else "?") from None
    try:
        write_atomically(owner, f"{os.getpid()}".encode())
        recover(folder)
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()
        if fresh and not (folder / MODEL).exists():  # nothing came of it
            (folder / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def size_on_disk(folder: Path) -> dict[str, int]:
    """Bytes of each of a model's files."""
    return {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}


def _write_copies(folder: Path, model: Model, card: str) -> None:
    text = json.dumps({**model.description, "format": FORMAT}, indent=2, ensure_ascii=False)
    write_atomically(folder / CONFIG, text.encode() + b"\n")
    write_atomically(folder / CARD, card.encode())


def _read(folder: Path, name: str) -> Model:
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MissingData(
            path,
            f"cannot be read ({error.strerror})",
            "Point at a folder that 'coda learn' made.",
        ) from error
    return unpacked(content, path)


def _parts(content: bytes, path: object) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LARGEST_HEADER, len(content) - 8):
        raise CorruptFile(path, "is cut off or no safetensors file")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptFile(path, "has no readable header") from error
    if not isinstance(header, dict):
        raise CorruptFile(path, "has no readable header")
    return header, content[8 + length :]


def text_field(description: Mapping[str, Any], name: str, path: object) -> str:
    """A field of a description that has to be text."""
    value = description.get(name)
    if not isinstance(value, str):
        raise CorruptFile(path, f"its description has no '{name}'")
    return value

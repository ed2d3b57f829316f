"""A learned method on disk: a folder with tensors, and a description that is checked on loading."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from coda_prompt import methods
from coda_prompt.errors import (
    CorruptFile,
    HashMismatch,
    MissingData,
    UnfinishedTask,
    WrongBackbone,
)
from coda_prompt.files import write_atomically
from coda_prompt.methods import Method
from coda_prompt.model.vit import ViT

FORMAT = 1
DESCRIPTION = "method.json"


def save_method(folder: str | Path, method: Method, backbone: ViT) -> None:
    """Write what was learned on `backbone`, not the backbone.

    The tensors go to a file named by their content, and the description that names it is replaced
    in one step: a reader sees the old state or the new one, never a mixture.
    """
    if method.in_task:
        raise UnfinishedTask(method.name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in method.learned_state().items()}
    content = save({name: tensor.clone() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    file = f"state-{digest[:16]}.safetensors"
    write_atomically(folder / file, content)
    description = {
        "format": FORMAT,
        "method": method.name,
        "options": dataclasses.asdict(method.config),
        "backbone": backbone.fingerprint(),
        "file": file,
        "sha256": digest,
    }
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=2).encode() + b"\n")
    for stale in folder.glob("state-*.safetensors"):
        if stale.name != file:
            stale.unlink()


def load_method(folder: str | Path, backbone: ViT) -> Method:
    """The method as it was saved, on the backbone it was learned on."""
    folder = Path(folder)
    description = _read_description(folder / DESCRIPTION)
    found = backbone.fingerprint()
    if description["backbone"] != found:
        raise WrongBackbone(folder, description["backbone"], found)
    if description["method"] not in methods.METHODS:  # no code is run that a folder names
        problem = f"its method '{description['method']}' does not come with this program"
        raise CorruptFile(folder, problem)
    path = folder / description["file"]
    content = _read(path)
    digest = hashlib.sha256(content).hexdigest()
    if digest != description["sha256"]:
        raise HashMismatch(str(path), description["sha256"], digest, "Restore it from a copy.")
    method = methods.make(description["method"], backbone, **description["options"])
    try:
        method.load_learned_state(load(content))
    except SafetensorError as error:
        raise CorruptFile(path, str(error)) from error
    return method


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MissingData(
            path, error.strerror or "cannot be read", "Point at the folder of a saved method."
        ) from error


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(path, "is not JSON") from error
    texts = ("method", "backbone", "file", "sha256")
    if (
        not isinstance(description, dict)
        or description.get("format") != FORMAT
        or not all(isinstance(description.get(name), str) for name in texts)
        or not isinstance(description.get("options"), dict)
        or Path(description["file"]).name != description["file"]
    ):
        raise CorruptFile(path, f"does not describe a method in format {FORMAT}")
    return description

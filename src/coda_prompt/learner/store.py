"""A model on disk: a folder whose `model.safetensors` says and holds everything.

The description travels in that file's header, so that one rename replaces both; `config.json` and
the card are copies for people and for the hub.

    model.safetensors      what was learned, never the backbone, and the description
    previous.safetensors   the same before the newest task, for `undo`
    next.safetensors       only while a save is under way; a crash leaves it, and it counts
    .progress              only while a training is under way; the same command goes on from it
    .learning.json         only while `coda learn` is at work: of which images, on which version
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from coda_prompt.data.folders import is_valid_class_name
from coda_prompt.errors import CorruptFile, FolderBusy, MissingData, NothingToUndo
from coda_prompt.learner.card import card_of
from coda_prompt.storage.files import LOCK, OWNER, FileSchema, exclusive_lock, write_atomically
from coda_prompt.storage.tensors import decode_tensors, encode_tensors, stated_sha256

FORMAT = 1
MODEL, PREVIOUS, NEXT = "model.safetensors", "previous.safetensors", "next.safetensors"
CONFIG, CARD = "config.json", "README.md"
PROGRESS = ".progress"
"""The folder of a training that is under way."""
LESSON = ".learning.json"


class TaskRecord(FileSchema):
    """What one `learn` brought."""

    date: str
    new: list[str]
    continued: list[str]
    images: dict[str, int]
    held_out: int = Field(ge=0)
    accuracy: float | None
    accuracy_own: float | None
    calibration_error: float | None
    temperature: float = Field(ge=1e-6, le=1e6)
    fitted_on: int = Field(ge=0, le=10**12)
    """Images the temperature was fitted on."""


class BackboneRecord(FileSchema):
    name: str
    fingerprint: str
    revision: str | None


class Description(FileSchema):
    """All that is known of a model but its tensors."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    coda_prompt: str
    method: str
    options: dict[str, Any]
    training: dict[str, Any]
    backbone: BackboneRecord
    pixels: dict[str, Any]
    classes: list[str]
    tasks: list[TaskRecord]
    temperature: float = Field(ge=1e-6, le=1e6)

    @property
    def version(self) -> int:
        return len(self.tasks)

    @model_validator(mode="after")
    def _classes_are_those_of_the_tasks(self) -> Description:
        if [name for task in self.tasks for name in task.new] != self.classes:
            raise ValueError("the classes are not those of its tasks")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("a class is there twice")
        if not all(is_valid_class_name(name) for name in self.classes):
            raise ValueError("a class has no proper name")
        return self


@dataclass(frozen=True)
class Model:
    """What a model's file holds."""

    description: Description
    tensors: dict[str, Tensor]


def encode_model(model: Model) -> bytes:
    """Return the content of a model's file; equal models give equal bytes."""
    return encode_tensors(model.tensors, model.description.model_dump(mode="json"))


def decode_model(content: bytes, path: object) -> Model:
    """Parse and check the content of a model's file.

    Raises:
        CorruptFile: It is damaged, truncated or not a model.
    """
    file = decode_tensors(content, path)
    if file.description is None:
        raise CorruptFile(path, "is not a model of coda-prompt")
    try:  # as JSON, whose strict types are those of the file
        description = Description.model_validate_json(json.dumps(file.description))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        problem = f"its description is invalid: {field}: {first['msg']}"
        raise CorruptFile(path, problem) from error
    return Model(description, file.tensors)


def read_model(folder: Path) -> Model:
    try:
        return _read(folder, MODEL)
    except CorruptFile as error:
        if not (folder / PREVIOUS).exists():
            raise
        undo = f"{error.remedy} Or go back to the version before the newest task: coda undo."
        raise CorruptFile(folder / MODEL, error.problem, undo) from error


def read_previous(folder: Path) -> Model | None:
    """The model before the newest task, where it was kept."""
    if not (folder / PREVIOUS).exists():
        return None
    previous = _read(folder, PREVIOUS)
    try:
        model = _read(folder, MODEL)
    except CorruptFile:  # then it is the newest that is whole
        return previous
    return previous if _follows(model, previous) else None


def write_model(folder: Path, model: Model, previous: Model | None) -> None:
    """Replace the folder's model; whenever this stops, a reader finds one whole version."""
    if previous is None:
        write_atomically(folder / MODEL, encode_model(model))
        (folder / PREVIOUS).unlink(missing_ok=True)
    else:
        write_atomically(folder / NEXT, encode_model(model))
        write_atomically(folder / PREVIOUS, encode_model(previous))
        os.replace(folder / NEXT, folder / MODEL)
    _write_copies(folder, model)


def restore_previous(folder: Path) -> None:
    """Undo: the previous model takes the newest one's place."""
    previous = read_previous(folder)
    if previous is None:
        raise NothingToUndo(folder)
    os.replace(folder / PREVIOUS, folder / MODEL)
    _write_copies(folder, previous)


def begin_lesson(folder: Path, images: str, version: int) -> bool:
    """Note that these images are about to be learned on this version, where that was not done.

    Whether it was: the same lesson, noted on the version before, and cut off after it was saved.
    """
    note = {"images": images, "version": version}
    try:
        done: bool = json.loads((folder / LESSON).read_bytes()) == {**note, "version": version - 1}
    except (OSError, ValueError, RecursionError):
        done = False
    if not done:
        write_atomically(folder / LESSON, json.dumps(note).encode())
    return done


def end_lesson(folder: Path) -> None:
    (folder / LESSON).unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_writer(folder: Path) -> Iterator[None]:
    """One writer at a time; a save that had been cut off is finished first."""
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(folder)
    try:
        with exclusive_lock(folder, FolderBusy):
            _recover(folder)
            yield
    finally:
        if fresh and not (folder / MODEL).exists():  # nothing came of it
            end_lesson(folder)
            (folder / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def model_sha256(folder: Path) -> str | None:
    """Return the hash in the header of a folder's model; None if there is no model."""
    return stated_sha256(folder / MODEL)


def size_on_disk(folder: Path) -> dict[str, int]:
    """Bytes of each of a model's files."""
    return {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}


def _refuse_foreign(folder: Path) -> None:
    """A folder with other things in it is not ours to write to."""
    if (folder / MODEL).exists():
        if model_sha256(folder) is None and not (folder / PREVIOUS).exists():
            raise CorruptFile(folder / MODEL, "is not a model of coda-prompt")
        return
    ours = {LOCK, OWNER, NEXT, PREVIOUS, PROGRESS, LESSON}
    others = [entry.name for entry in folder.iterdir() if entry.name not in ours]
    if [name for name in others if not name.endswith(".tmp")]:
        raise MissingData(
            folder, "the folder is not empty and holds no model", "Name another folder for it."
        )


def _recover(folder: Path) -> None:
    """Finish a save that was cut off after the new model had been written, and tidy up."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    waiting = folder / NEXT
    if not waiting.exists():
        return
    try:
        following, previous = _read(folder, NEXT), _read(folder, PREVIOUS)
        complete = _follows(following, previous)
    except (CorruptFile, MissingData):
        complete = False
    if complete:
        os.replace(waiting, folder / MODEL)
    else:
        waiting.unlink()


def _follows(model: Model, previous: Model) -> bool:
    """Whether `model` is `previous` with one more task."""
    return model.description.tasks[:-1] == previous.description.tasks


def refresh_copies(folder: Path) -> None:
    """Write the description and the card again, which a kill may have left behind."""
    _write_copies(folder, read_model(folder))


def _write_copies(folder: Path, model: Model) -> None:
    write_atomically(folder / CONFIG, config_text(model).encode())
    write_atomically(folder / CARD, card_of(model.description).encode())


def config_text(model: Model) -> str:
    """The description, for people and for the hub."""
    dumped = model.description.model_dump(mode="json")
    return json.dumps(dumped, indent=2, ensure_ascii=False) + "\n"


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
    return decode_model(content, path)

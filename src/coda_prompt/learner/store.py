"""Model folders: one checked tensor file per version, replaced atomically.

    model.safetensors      what was learned (without the backbone) and the description
    versions/NUMBER.safetensors   earlier and undone versions, for `undo` and `redo`
    checks.json            what lessons cost older classes, as measured by the service
    .progress              only while a training is unfinished: its checkpoints
    .learning.json         only while `coda learn` runs: which images, on which version
    .restoring.json        only while `coda undo` or `coda redo` runs: which version

A process may be killed at any time: the model is then as before or as after its command. The two
notes tell the same command, run again, that its work was done.

`config.json` and the model card `README.md` repeat the description for people and the hub; they are
rewritten whenever a folder is opened for writing. No code is ever loaded from a model folder, no
symbolic link in it is followed, and only files of these names are ever deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from coda_prompt.console import class_name
from coda_prompt.errors import CorruptFile, FolderBusy, MissingData, NothingToUndo
from coda_prompt.learner import versions
from coda_prompt.learner.card import model_card
from coda_prompt.learner.versions import History, StoredVersion
from coda_prompt.storage.files import (
    LOCK,
    MAX_NOTE_BYTES,
    OWNER,
    FileSchema,
    check_regular,
    exclusive_lock,
    final_name,
    read_regular,
    write_atomically,
)
from coda_prompt.storage.headers import read_checked_description, stated_sha256
from coda_prompt.storage.tensors import decode_tensors, encode_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MODEL = "model.safetensors"
CONFIG, CARD = "config.json", "README.md"
PROGRESS = ".progress"
LESSON, RESTORING = ".learning.json", ".restoring.json"
CHECKS = "checks.json"
FILES = {MODEL, CONFIG, CARD, LESSON, RESTORING, CHECKS, LOCK, OWNER}
FOLDERS = {versions.FOLDER, PROGRESS}
"""All that is ever read, written or deleted in a model folder, besides files in these folders."""


Count = Annotated[int, Field(ge=0, le=10**12)]
Text = Annotated[str, Field(max_length=4096)]
"""Anything but class names and what mentions them."""


class WatchedAccuracy(FileSchema):
    """Accuracy of older classes before and after a lesson, on watched images."""

    classes: Count
    """Number of older classes with watched images."""
    images: Count
    """Number of watched images."""
    before: float
    """Accuracy before the lesson."""
    after: float
    """Accuracy after the lesson."""


class EditRecord(FileSchema):
    """A change of what was taught."""

    date: Text
    """Time of the edit, UTC."""
    after_lesson: Count
    """Number of lessons before the edit."""
    what: str
    """The edit in words."""
    names: list[str] = Field(default_factory=list)
    """Class names before the edit that `what` mentions."""
    into: str | None = None
    """The name they have since, if the edit renamed or merged them."""


class TaskRecord(FileSchema):
    """The outcome of one lesson."""

    date: Text
    """Time of the lesson, UTC."""
    new: list[str]
    """New classes, in the order of their rows."""
    continued: list[str]
    """Known classes that got more images."""
    images: dict[str, Count]
    """Number of images per class, held-out ones included."""
    held_out: Count
    """Number of held-out images."""
    drawings: float | None = Field(None, ge=0, le=1)
    """Share of drawings among sampled images; None if it is not known."""
    accuracy: float | None
    """Accuracy on held-out images among all classes; None if none were held out."""
    accuracy_own: float | None
    """The same among the classes of the lesson."""
    calibration_error: float | None
    """Expected calibration error on held-out images."""
    temperature: float = Field(ge=1e-6, le=1e6)
    """Temperature fitted on the held-out images of this lesson."""
    fitted_on: Count
    """Number of held-out images the temperature was fitted on."""
    watched: WatchedAccuracy | None = None
    """What the lesson cost the older classes; None if no image was watched."""
    files: Text | None = None
    """Hash of the names, sizes and labels of the files; None if they were no files."""
    predictions: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Held-out images by correct and by predicted class, right after the lesson."""


class BackboneRecord(FileSchema):
    """The backbone a model was learned on."""

    name: Text
    """Name in the catalogue, or of the file."""
    fingerprint: Text
    """SHA-256 of its weights in float32."""
    revision: Text | None
    """Commit on the hub; None if it was not downloaded."""
    path: Text | None = None
    """Absolute path of the file; None if it was embedded or downloaded."""


class Description(FileSchema):
    """Everything about a model except its tensors."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    """Version of this format."""
    coda_prompt: Text
    """Version of coda-prompt that wrote it."""
    method: Text
    """Name of the method; of one that is not part of coda-prompt, the name of its class."""
    method_sha256: Text | None = None
    """Hash of the file that has the class; the file itself is never stored."""
    options: dict[str, Any]
    """Options of the method."""
    training: dict[str, Any]
    """Training settings."""
    backbone: BackboneRecord
    """The backbone."""
    pixels: dict[str, Any]
    """Preprocessing: size, channels, mean, standard deviation, interpolation, resizing."""
    classes: list[str]
    """Class names in the order of their rows."""
    tasks: list[TaskRecord]
    """The lessons."""
    temperature: float = Field(ge=1e-6, le=1e6)
    """Temperature of the probabilities, combined from all lessons."""
    number: Count
    """Number of the version."""
    parent: Count | None = None
    """Number of the version this one was made from."""
    edits: list[EditRecord] = Field(default_factory=list)
    """The edits in order."""

    @field_validator("pixels")
    @classmethod
    def _states_the_input(cls, pixels: dict[str, Any]) -> dict[str, Any]:
        if not all(type(pixels.get(name)) is int for name in ("size", "channels")):
            raise ValueError("they have no size and number of channels")
        return pixels

    @model_validator(mode="after")
    def _classes_match_tasks(self) -> Description:
        if [name for task in self.tasks for name in task.new] != self.classes:
            raise ValueError("its classes are not those of its tasks")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("a class is listed twice")
        if any(class_name(name) != name for name in self.classes):
            raise ValueError("a class has an invalid name")
        return self


@dataclass(frozen=True)
class Model:
    """The content of a model's file."""

    description: Description
    tensors: dict[str, Tensor]

    @property
    def number(self) -> int:
        """Number of the version."""
        return self.description.number


def encode_model(model: Model) -> bytes:
    """Return the content of a model's file; equal models give equal bytes."""
    return encode_tensors(model.tensors, model.description.model_dump(mode="json"))


def decode_model(content: bytes, path: object) -> Model:
    """Parse and check the content of a model's file.

    Raises:
        CorruptFile: It is damaged, truncated or not a model.
    """
    file = decode_tensors(content, path)
    return Model(checked_description(file.description, path), file.tensors)


def read_description(folder: Path) -> Description:
    """Read and check the current model of a folder without importing torch.

    Raises:
        CorruptFile: It is damaged or not a model.
        MissingData: There is no model.
    """
    path = folder / MODEL
    content = _read_bytes(path)
    try:
        fields, _ = read_checked_description(content, path)
        return checked_description(fields, path)
    except CorruptFile as error:
        raise _with_undo(error, folder) from error


def checked_description(fields: dict[str, Any] | None, path: object) -> Description:
    """Return a description after checking its fields.

    Raises:
        CorruptFile: They are not those of a model.
    """
    if fields is None:
        raise CorruptFile(path, "is not a model of coda-prompt")
    try:  # as JSON, whose strict types are those of the file
        return Description.model_validate_json(json.dumps(fields))
    except RecursionError as error:
        raise CorruptFile(path, "its description cannot be read") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        reason = first["msg"].removeprefix("Value error, ")
        problem = f"its description is invalid: {field}: {reason}"
        raise CorruptFile(path, problem) from error


def read_model(folder: Path) -> Model:
    """Read the current model of a folder.

    Raises:
        CorruptFile: It is damaged or not a model.
        MissingData: There is no model.
    """
    path = folder / MODEL
    content = _read_bytes(path)
    try:
        return decode_model(content, path)
    except CorruptFile as error:
        raise _with_undo(error, folder) from error


def _with_undo(error: CorruptFile, folder: Path) -> CorruptFile:
    """Add to an error of the current model how to return to an intact version."""
    if not versions.stored_versions(folder, None).before:
        return error
    remedy = f"{error.remedy} Or return to the newest stored version: coda undo."
    return CorruptFile(folder / MODEL, error.problem, remedy)


def write_model(folder: Path, model: Model, history: History, *, at_home: bool = True) -> None:
    """Replace the folder's model; a kill at any point leaves one complete version.

    Args:
        folder: A locked model folder.
        model: The new current version.
        history: Earlier and undone versions; those in memory are written.
        at_home: Whether the versions in the folder are of the same model. If not, they are
            deleted first.
    """
    if not at_home:
        versions.remove_others(folder, History())
    versions.write_versions(folder, history, encode_model)
    write_atomically(folder / MODEL, encode_model(model))
    (folder / RESTORING).unlink(missing_ok=True)
    _tidy(folder, model.description, history)


def remove_traces(folder: Path, history: History) -> None:
    """Delete what may name a forgotten class, before the model without it is written.

    A kill must not leave it beside that model.
    """
    versions.remove_others(folder, history)
    for name in (CONFIG, CARD, LESSON):
        (folder / name).unlink(missing_ok=True)


def restore_version(
    folder: Path, at_end: ExitStack, to: int | None = None, *, redo: bool = False
) -> Model:
    """Replace the current model by an earlier or undone one, bit for bit.

    If the same command did this before and was killed, it is not done twice.

    Args:
        folder: A locked model folder.
        at_end: What `exclusive_writer` gives.
        to: Number of the version; by default the one before, or with `redo` the one after.
        redo: Whether to go forward.

    Raises:
        NothingToUndo: There is no such version.
    """
    try:
        current: Model | None = read_file(folder / MODEL)
    except CorruptFile:  # the newest stored version replaces it
        current = None
    asked = {"to": to, "redo": redo}
    at_end.callback((folder / RESTORING).unlink, missing_ok=True)
    if current is not None and _read_note(folder / RESTORING) == {**asked, "now": current.number}:
        return current
    history = versions.stored_versions(folder, current.description if current else None)
    choices = history.after if redo else list(reversed(history.before))
    if to is not None:
        choices = [each for each in (*history.before, *history.after) if each.number == to]
    if not choices:
        raise NothingToUndo(folder, to, redo=redo)
    chosen = choices[0]
    assert isinstance(chosen, StoredVersion)
    model = chosen.read()
    note = json.dumps({**asked, "now": chosen.number})
    write_atomically(folder / RESTORING, note.encode())
    if current is not None:
        versions.preserve(folder, folder / MODEL, current.number)
    os.replace(chosen.path, folder / MODEL)
    _write_copies(folder, model.description)
    return model


def begin_lesson(folder: Path, at_end: ExitStack, images: str, version: int) -> bool:
    """Record that images are about to be learned, unless an earlier command already did.

    Args:
        folder: The model folder.
        at_end: What `exclusive_writer` gives; the record of a lesson that is done ends with it.
        images: Fingerprint of the lesson's images.
        version: Version of the model they are learned on.

    Returns:
        True if the same lesson was begun on the version before and interrupted only after its
        model was saved, so that there is nothing left to learn.
    """
    note = {"images": images, "version": version}
    done = _read_note(folder / LESSON) == {**note, "version": version - 1}
    if done:
        at_end.callback(end_lesson, folder)
    else:
        write_atomically(folder / LESSON, json.dumps(note).encode())
    return done


def has_unfinished_lesson(folder: Path) -> bool:
    """Return whether a lesson was interrupted."""
    return (folder / LESSON).exists() or (folder / PROGRESS).exists()


def _read_note(path: Path) -> object:
    """Return the note of a command that was not finished; None if there is none."""
    try:
        return json.loads(read_regular(path, MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def end_lesson(folder: Path) -> None:
    """Record that the lesson's result was reported: the same command is a new lesson now."""
    (folder / LESSON).unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_writer(folder: Path) -> Iterator[ExitStack]:
    """Lock a model folder for writing; an interrupted save is completed first.

    The folder is created if needed. If no model was written, nothing of this is left behind.

    Yields:
        Runs its callbacks last, when nothing but the lock is left to release.

    Raises:
        FolderBusy: Another process is writing.
        CorruptFile, MissingData: The folder has other files than a model's, or links.
    """
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_links(folder)
    _refuse_foreign(folder)
    locked = False
    try:
        with exclusive_lock(folder, FolderBusy) as at_end:
            locked = True
            _recover(folder)
            yield at_end
    finally:
        if locked and not (folder / MODEL).exists():
            if not (folder / PROGRESS).exists():  # else `coda info` says how to resume
                end_lesson(folder)
            (folder / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for each in created:
                    each.rmdir()


def model_sha256(folder: Path) -> str | None:
    """Return the hash in the header of a folder's model; None if there is no model."""
    return stated_sha256(folder / MODEL)


def size_on_disk(folder: Path) -> dict[str, int]:
    """Return the bytes of each tensor file of a model, by its path in the folder."""
    files = sorted([folder / MODEL, *versions.version_files(folder)])
    whole = [file for file in files if file.suffix == ".safetensors"]
    return {file.relative_to(folder).as_posix(): file.lstat().st_size for file in whole}


def copies(description: Description) -> dict[str, bytes]:
    """Return the content of config.json and of the model card."""
    text = json.dumps(description.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    return {CONFIG: text.encode(), CARD: model_card(description).encode()}


def _refuse_links(folder: Path) -> None:
    """Refuse to write to a folder where a link, a pipe or a device has a name of ours."""
    for name in FILES:
        check_regular(folder / name)
    for name in FOLDERS:
        check_regular(folder / name, folder=True)
    for path in versions.version_files(folder):
        check_regular(path)


def _refuse_foreign(folder: Path) -> None:
    """Refuse to write to a folder with files of something else."""
    if (folder / MODEL).exists():
        if model_sha256(folder) is None and not versions.stored_versions(folder, None).before:
            raise CorruptFile(folder / MODEL, "is not a model of coda-prompt")
        return
    own = (FILES | FOLDERS) - {CONFIG, CARD}  # which other programs write too
    if any(final_name(entry.name) not in own for entry in folder.iterdir()):
        problem = "the folder is not empty and has no model"
        raise MissingData(folder, problem, "Use another folder for the model.")


def _recover(folder: Path) -> None:
    """Complete an interrupted save: remove its temporary files, write the copies again."""
    own = [path for path in folder.iterdir() if final_name(path.name) in FILES]
    for path in (*own, *versions.version_files(folder)):
        if final_name(path.name) != path.name:
            path.unlink(missing_ok=True)
    with contextlib.suppress(CorruptFile, MissingData):
        description = read_description(folder)
        _tidy(folder, description, versions.stored_versions(folder, description))


def _tidy(folder: Path, description: Description, history: History) -> None:
    """Remove versions that belong to no history any more and write the copies again."""
    versions.remove_others(folder, history)
    _write_copies(folder, description)


def _write_copies(folder: Path, description: Description) -> None:
    """Write config.json and the model card unless they are as they should be."""
    for name, content in copies(description).items():
        path = folder / name
        same_size = path.exists() and path.lstat().st_size == len(content)
        if not same_size or read_regular(path) != content:
            write_atomically(path, content)


def read_file(path: Path) -> Model:
    """Read and check one version.

    Raises:
        CorruptFile: It is damaged or not a model.
        MissingData: There is no such file.
    """
    return decode_model(_read_bytes(path), path)


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise _unreadable_model(path.parent, error) from error


def _unreadable_model(folder: Path, error: OSError) -> MissingData:
    """Describe why the model of a folder cannot be read."""
    remedy = "Use a folder that 'coda learn' created."
    if not folder.exists():
        problem = "there is no such model"
    elif not folder.is_dir():
        problem = "this is a file, and a model is a folder"
    elif isinstance(error, FileNotFoundError):
        problem = "there is no model in this folder"
    else:
        problem, remedy = f"the model cannot be read ({error.strerror})", "Check its permissions."
    return MissingData(folder, problem, remedy)

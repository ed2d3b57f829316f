"""`ModelFolder`: the files of a model and its versions, replaced atomically.

    model.safetensors      what was learned (without the encoder) and the description
    versions/NUMBER.safetensors   earlier and undone versions, for `undo` and `redo`
    checks.json            what lessons cost older classes, as measured by the service
    .progress              only while prompts are trained: checkpoints of the training
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
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coda_prompt.errors import CorruptFile, FolderBusy, MissingData, NothingToUndo
from coda_prompt.learner.card import model_card
from coda_prompt.learner.records import Description, checked_description
from coda_prompt.storage.files import (
    LOCK,
    MAX_NOTE_BYTES,
    OWNER,
    check_regular,
    exclusive_lock,
    final_name,
    read_regular,
    write_atomically,
)
from coda_prompt.storage.headers import read_checked_description, stated_sha256
from coda_prompt.storage.tensors import Arrays, decode_tensors, encode_tensors

MODEL = "model.safetensors"
CONFIG, CARD = "config.json", "README.md"
VERSIONS, PROGRESS = "versions", ".progress"
LESSON, RESTORING = ".learning.json", ".restoring.json"
CHECKS = "checks.json"
FILES = {MODEL, CONFIG, CARD, LESSON, RESTORING, CHECKS, LOCK, OWNER}
FOLDERS = {VERSIONS, PROGRESS}
"""All that is ever read, written or deleted in a model folder, besides files in these folders."""
KEPT = 10
"""Versions that are stored beside the current one."""
_VERSION = re.compile(r"[0-9]{6,}\.safetensors")


@dataclass(frozen=True)
class Version:
    """One version of a model as the content of its file, read when it is needed."""

    number: int
    path: Path | None = None
    """The file in a model folder."""
    data: bytes | None = None
    """The content, if it is in no folder yet."""

    @classmethod
    def of(cls, description: Description, arrays: Arrays) -> Version:
        """Return a version that is in memory only; equal models give equal bytes."""
        content = encode_tensors(arrays, description.model_dump(mode="json"))
        return cls(description.number, data=content)

    @property
    def content(self) -> bytes:
        """The bytes of the file.

        Raises:
            CorruptFile: It is no regular file.
            MissingData: There is no such file.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return read_regular(self.path)
        except OSError as error:
            raise _unreadable_model(self.path.parent, error) from error

    @cached_property
    def description(self) -> Description:
        """Everything but the arrays, after checking it.

        Raises:
            CorruptFile: It is damaged or not a model.
        """
        name = self.path or f"version {self.number}"
        return checked_description(read_checked_description(self.content, name)[0], name)

    def read(self) -> tuple[Description, Arrays]:
        """Return the description and the arrays, after checking them.

        Raises:
            CorruptFile: It is damaged, truncated or not a model.
        """
        return decode_model(self.content, self.path or f"version {self.number}")


def decode_model(content: bytes, path: object) -> tuple[Description, Arrays]:
    """Parse and check the content of a model's file.

    Raises:
        CorruptFile: It is damaged, truncated or not a model.
    """
    file = decode_tensors(content, path)
    return checked_description(file.description, path), file.tensors


@dataclass(frozen=True)
class Versions:
    """The versions of a model: a value.

    Every version has a number that is never used again, and names its parent. Versions with a
    smaller number than the current one were replaced by it, those with a larger one were undone.
    """

    before: tuple[Version, ...] = ()
    """Oldest first."""
    current: Version | None = None
    """None: nothing has been learned, or the model in the folder is damaged."""
    after: tuple[Version, ...] = ()

    @property
    def all(self) -> tuple[Version, ...]:
        """All versions by their number."""
        return (*self.before, *([self.current] if self.current else []), *self.after)

    @property
    def next_number(self) -> int:
        """A number that no version has had."""
        return max([0, *(each.number for each in self.all)]) + 1

    def followed_by(self, new: Version) -> Versions:
        """Return the versions after a lesson or an edit: undone ones are dropped."""
        before = (*self.before, *([self.current] if self.current else []))
        return Versions(before[-KEPT:], new)

    def moved_to(self, what: object, to: int | None = None, *, redo: bool = False) -> Versions:
        """Return the same versions with another one as the current one.

        Args:
            what: What is restored, for the message.
            to: Number of the version; by default the one before, or with `redo` the one after.
            redo: Whether to go forward.

        Raises:
            NothingToUndo: There is no such version.
        """
        choices = self.after[:1] if redo else self.before[-1:]
        if to is not None:
            choices = tuple(each for each in (*self.before, *self.after) if each.number == to)
        if not choices:
            raise NothingToUndo(what, to, redo=redo)
        place = self.all.index(choices[0])
        return Versions(self.all[:place], choices[0], self.all[place + 1 :])


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model; the only code that knows its files.

    Example:
        ```python
        folder = ModelFolder(Path("my-model"))
        with folder.writing():
            folder.commit(folder.versions().moved_to(folder.path))  # undo
        ```
    """

    path: Path

    # -- reading

    @property
    def exists(self) -> bool:
        """Whether there is a model in the folder."""
        return (self.path / MODEL).exists()

    def current(self) -> Version:
        """Return the current version."""
        return replace(Version(0, self.path / MODEL), number=self.description().number)

    def description(self) -> Description:
        """Read and check the description of the current version.

        Raises:
            CorruptFile: It is damaged or not a model.
            MissingData: There is no model.
        """
        version = Version(0, self.path / MODEL)
        with self._remedy():
            return version.description

    def read(self) -> tuple[Description, Arrays]:
        """Read the current version; raises as `description`."""
        with self._remedy():
            return Version(0, self.path / MODEL).read()

    @contextlib.contextmanager
    def _remedy(self) -> Iterator[None]:
        """Add to an error of the current model how to return to an intact version."""
        try:
            yield
        except CorruptFile as error:
            if not self._listed():
                raise
            remedy = f"{error.remedy} Or return to the newest stored version: coda undo."
            raise CorruptFile(self.path / MODEL, error.problem, remedy) from error

    def versions(self) -> Versions:
        """List the versions; of a damaged model, all stored ones are earlier."""
        stored = self._listed()
        try:
            current = self.description()
        except (CorruptFile, MissingData):
            return Versions(tuple(stored))
        number, parent = current.number, current.parent
        # Versions between parent and current were undone when the current one was made.
        before = [
            each
            for each in stored
            if each.number < number and (parent is None or each.number <= parent)
        ]
        after = [each for each in stored if each.number > number]
        now = Version(number, self.path / MODEL)
        return Versions(tuple(before[-KEPT:]), now, tuple(after))

    def _listed(self) -> list[Version]:
        paths = [path for path in self._version_files() if path.suffix == ".safetensors"]
        return sorted((Version(int(path.stem), path) for path in paths), key=lambda v: v.number)

    def _version_files(self) -> list[Path]:
        """List the files of stored versions, temporary ones included; others are nobody's.

        Raises:
            CorruptFile: The folder of the versions is a link or a file.
        """
        check_regular(self.path / VERSIONS, folder=True)
        files = (self.path / VERSIONS).glob("*")
        return [path for path in files if _VERSION.fullmatch(final_name(path.name))]

    @property
    def sha256(self) -> str | None:
        """The hash in the header of the model; None if there is no model."""
        return stated_sha256(self.path / MODEL)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor file, by its path in the folder."""
        files = sorted([self.path / MODEL, *self._version_files()])
        whole = [file for file in files if file.suffix == ".safetensors"]
        return {file.relative_to(self.path).as_posix(): file.lstat().st_size for file in whole}

    @property
    def has_unfinished_lesson(self) -> bool:
        """Whether a lesson was interrupted."""
        return (self.path / LESSON).exists() or (self.path / PROGRESS).exists()

    @property
    def progress(self) -> Path:
        """The folder for checkpoints of a training."""
        return self.path / PROGRESS

    # -- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[ExitStack]:
        """Lock the folder for writing; an interrupted save is completed first.

        The folder is created if needed. If no model was written, nothing of this is left behind.

        Yields:
            Runs its callbacks last, when nothing but the lock is left to release.

        Raises:
            FolderBusy: Another process is writing.
            CorruptFile, MissingData: The folder has other files than a model's, or links.
        """
        folder = self.path
        created = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._refuse_links()
        self._refuse_foreign()
        locked = False
        try:
            with exclusive_lock(folder, FolderBusy) as at_end:
                locked = True
                self._recover()
                yield at_end
        finally:
            if locked and not self.exists:
                if not self.progress.exists():  # else `coda info` says how to resume
                    self.end_lesson()
                (folder / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for each in created:
                        each.rmdir()

    def commit(self, versions: Versions) -> Versions:
        """Write the versions; a kill at any point leaves one complete current version.

        Args:
            versions: Those of this folder that remain, and new ones in memory or other folders.

        Returns:
            The same versions, all in this folder.
        """
        (self.path / RESTORING).unlink(missing_ok=True)
        return self._write(versions)

    def _write(self, versions: Versions) -> Versions:
        current = versions.current
        assert current is not None
        content = current.content  # read before the file of the current version is replaced
        stored = self._stored(versions)
        write_atomically(self.path / MODEL, content)
        written = replace(stored, current=Version(current.number, self.path / MODEL))
        self._tidy(written)
        return written

    def _stored(self, versions: Versions) -> Versions:
        """Return the same versions, those before and after the current one in this folder."""
        before, after = (
            tuple(self._stored_here(each) for each in part)
            for part in (versions.before, versions.after)
        )
        return Versions(before, versions.current, after)

    def _stored_here(self, version: Version) -> Version:
        """Return a version of the folder `versions/`, written there unless it is."""
        path = self.path / VERSIONS / f"{version.number:06}.safetensors"
        if version.path != path:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, version.content)
        return Version(version.number, path)

    def restore(self, at_end: ExitStack, to: int | None = None, *, redo: bool = False) -> Version:
        """Replace the current model by an earlier or undone one, bit for bit.

        If the same command did this before and was killed, it is not done twice.

        Args:
            at_end: What `writing` gives.
            to: As in `Versions.moved_to`.
            redo: Whether to go forward.

        Raises:
            NothingToUndo: There is no such version.
        """
        versions, asked = self.versions(), {"to": to, "redo": redo}
        at_end.callback((self.path / RESTORING).unlink, missing_ok=True)
        current = versions.current
        if current is not None and self._note(RESTORING) == {**asked, "now": current.number}:
            return current
        restored = versions.moved_to(self.path, to, redo=redo)
        assert restored.current is not None
        restored.current.read()  # raises if it is damaged
        note = json.dumps({**asked, "now": restored.current.number})
        write_atomically(self.path / RESTORING, note.encode())
        done = self._write(restored).current
        assert done is not None
        return done

    def forget_traces(self, versions: Versions) -> Versions:
        """Rewrite or delete what may name a forgotten class, before the current version.

        A kill must not leave it beside the model without the class.

        Args:
            versions: Those without the class.

        Returns:
            The same versions, those before and after the current one in this folder.
        """
        stored = self._stored(versions)
        self._remove_others(stored)
        for name in (CONFIG, CARD, LESSON):
            (self.path / name).unlink(missing_ok=True)
        return stored

    # -- lessons

    def begin_lesson(self, at_end: ExitStack, images: str, version: int) -> bool:
        """Record that images are about to be learned, unless an earlier command already did.

        Args:
            at_end: What `writing` gives; the record of a lesson that is done ends with it.
            images: Fingerprint of the lesson's images.
            version: Number of lessons of the model they are learned on.

        Returns:
            True if the same lesson was begun on the version before and interrupted only after its
            model was saved, so that there is nothing left to learn.
        """
        note = {"images": images, "version": version}
        done = self._note(LESSON) == {**note, "version": version - 1}
        if done:
            at_end.callback(self.end_lesson)
        else:
            write_atomically(self.path / LESSON, json.dumps(note).encode())
        return done

    def end_lesson(self) -> None:
        """Record that the lesson's result was reported: the same command is a new lesson now."""
        (self.path / LESSON).unlink(missing_ok=True)

    # -- steps

    def _note(self, name: str) -> object:
        """Return the note of a command that was not finished; None if there is none."""
        try:
            return json.loads(read_regular(self.path / name, MAX_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def _refuse_links(self) -> None:
        """Refuse to write where a link, a pipe or a device has a name of ours."""
        for name in FILES:
            check_regular(self.path / name)
        for name in FOLDERS:
            check_regular(self.path / name, folder=True)
        for path in self._version_files():
            check_regular(path)

    def _refuse_foreign(self) -> None:
        """Refuse to write to a folder with files of something else."""
        if self.exists:
            if self.sha256 is None and not self._listed():
                raise CorruptFile(self.path / MODEL, "is not a model of coda-prompt")
            return
        own = (FILES | FOLDERS) - {CONFIG, CARD}  # which other programs write too
        if any(final_name(entry.name) not in own for entry in self.path.iterdir()):
            problem = "the folder is not empty and has no model"
            raise MissingData(self.path, problem, "Use another folder for the model.")

    def _recover(self) -> None:
        """Complete an interrupted save: remove its temporary files, write the copies again."""
        own = [path for path in self.path.iterdir() if final_name(path.name) in FILES]
        for path in (*own, *self._version_files()):
            if final_name(path.name) != path.name:
                path.unlink(missing_ok=True)
        versions = self.versions()
        if versions.current is not None:
            self._tidy(versions)

    def _tidy(self, versions: Versions) -> None:
        """Remove versions that belong to no history any more and write the copies again."""
        self._remove_others(versions)
        assert versions.current is not None
        for name, content in copies(versions.current.description).items():
            path = self.path / name
            same_size = path.exists() and path.lstat().st_size == len(content)
            if not same_size or read_regular(path) != content:
                write_atomically(path, content)

    def _remove_others(self, versions: Versions) -> None:
        """Delete stored versions that are not among these."""
        kept = {each.path for each in (*versions.before, *versions.after)}
        for path in self._version_files():
            if path not in kept:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / VERSIONS).rmdir()  # if it is empty


def copies(description: Description) -> dict[str, bytes]:
    """Return the content of config.json and of the model card."""
    fields: dict[str, Any] = description.model_dump(mode="json")
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    return {CONFIG: text.encode(), CARD: model_card(description).encode()}


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

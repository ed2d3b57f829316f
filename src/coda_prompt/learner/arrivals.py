"""Learn from a folder that grows: images are learned in chunks, each of them once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from coda_prompt import errors
from coda_prompt.data.live import POLL_SECONDS, FileState, labelled_files
from coda_prompt.learner import store
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.predictor import OnEvent
from coda_prompt.learner.results import Learned
from coda_prompt.storage.files import FileSchema, write_atomically


class Pending(FileSchema):
    """A chunk that is being learned."""

    files: dict[str, tuple[int, int]]
    lessons: int = Field(ge=0)
    """Lessons of the model before it; once there are more, the chunk is learned."""


class LearnedChunk(FileSchema):
    """A chunk that was learned in a lesson; it counts while the model has this lesson."""

    files: dict[str, tuple[int, int]]
    lesson: str
    """`files` in the record of the lesson."""


class Ledger(FileSchema):
    """Which files a model has learned: size and modification time by path, relative to the folder.

    The chunk is written before it is learned. A process that is killed resumes the same chunk, or,
    if the model was saved already, counts it as learned. A chunk whose lesson was undone is learned
    again.
    """

    learned: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Files that are never learned again: unreadable ones, and those of earlier versions."""
    chunks: list[LearnedChunk] = Field(default_factory=list)
    pending: Pending | None = None

    def known(self, lessons: Iterable[dict[str, Any]]) -> dict[str, FileState]:
        """Return the files that are part of these lessons, or are never learned again."""
        present = {lesson["files"] for lesson in lessons}
        files = dict(self.learned)
        for chunk in self.chunks:
            if chunk.lesson in present:
                files |= chunk.files
        return files

    @classmethod
    def read(cls, model: Path) -> Ledger:
        """Read the ledger of a model folder; a new one if there is none.

        Raises:
            CorruptFile: It is damaged.
        """
        path = model / store.ARRIVALS
        if not path.exists():
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            remedy = "Remove it; all images of the folder are then learned again."
            raise errors.CorruptFile(path, "is not a list of learned files", remedy) from error

    def write(self, model: Path) -> None:
        """Write the ledger to a model folder."""
        write_atomically(model / store.ARRIVALS, self.model_dump_json().encode())


@dataclass(frozen=True)
class Arrivals:
    """Learns the images of a growing folder of class folders.

    Args:
        classifier: The model; its folder must be locked (`store.exclusive_writer`).
        model: The model folder.
        folder: The folder to learn from.
        chunk: Most images of a lesson; all if None.
        validation: As in `ContinualClassifier.learn`.
        stop: Polled between steps, and while waiting.
        on_event: Called with the progress of a lesson.
    """

    classifier: ContinualClassifier
    model: Path
    folder: Path
    chunk: int | None = None
    validation: float = 0.2
    stop: Callable[[], bool] = field(default=lambda: False)
    on_event: OnEvent | None = None

    def lessons(
        self, *, watch: bool = False, idle: float = 10.0, poll: float = POLL_SECONDS
    ) -> Iterator[Learned]:
        """Learn all images that were not learned yet, and yield the result of each lesson.

        A file is learned once its size and time have not changed between two polls of the folder.

        Args:
            watch: Wait for more images, until `stop` is true.
            idle: Seconds without a new image after which fewer images than a chunk are learned.
            poll: Seconds between two polls of the folder.

        Raises:
            Interrupted: `stop` became true within a lesson, which resumes with the next call.
        """
        ledger = self._after_kill(Ledger.read(self.model))
        before: dict[str, FileState] = {}
        changed = time.monotonic()
        while not self.stop():
            current = labelled_files(self.folder)
            if current != before:
                changed = time.monotonic()
            known = ledger.known(self.classifier.tasks_)
            new = {path: s for path, s in current.items() if known.get(path) != s}
            complete = {path: s for path, s in new.items() if before.get(path) == s}
            waited = not watch or time.monotonic() - changed >= idle
            enough = self.chunk is not None and len(complete) >= self.chunk
            if ledger.pending is not None:
                complete, enough = dict(ledger.pending.files), True
            if complete and (enough or (waited and len(complete) == len(new))):
                chosen = dict(_by_arrival(complete)[: self.chunk])
                learned, ledger = self._learn(chosen, ledger)
                yield from learned
                continue
            if not new and not watch:
                return
            before = current
            time.sleep(poll)

    def _after_kill(self, ledger: Ledger) -> Ledger:
        """Count a chunk as learned if its lesson was saved before the process was killed."""
        pending, lessons = ledger.pending, self.classifier.tasks_
        if pending is None or len(lessons) <= pending.lessons:
            return ledger
        return _with_chunk(ledger, pending.files, lessons[pending.lessons]["files"])

    def _learn(self, files: dict[str, FileState], ledger: Ledger) -> tuple[list[Learned], Ledger]:
        """Learn a chunk, save the model and record it; no result if no image can be read."""
        lessons = len(self.classifier.tasks_)
        pending = Pending(files=files, lessons=lessons)
        ledger.model_copy(update={"pending": pending}).write(self.model)
        learned, lesson = [], None
        try:
            result = self.classifier.learn(
                [str(self.folder / path) for path in files],
                [Path(path).parts[0] for path in files],
                validation=self.validation,
                skip_bad=True,
                progress=self.model / store.PROGRESS,
                stop=self.stop,
                on_event=self.on_event,
            )
        except errors.BadImages as error:
            warnings.warn(str(error), errors.CodaWarning, stacklevel=3)
        else:
            self.classifier.write(self.model)
            learned.append(result)
            lesson = self.classifier.tasks_[-1]["files"]
        ledger = _with_chunk(ledger, files, lesson)
        ledger.write(self.model)
        return learned, ledger


def _with_chunk(ledger: Ledger, files: dict[str, FileState], lesson: str | None) -> Ledger:
    """Return the ledger after a chunk; `lesson` is None if no image of it can be read."""
    if lesson is None:
        return Ledger(learned={**ledger.learned, **files}, chunks=ledger.chunks)
    chunk = LearnedChunk(files=files, lesson=lesson)
    return Ledger(learned=ledger.learned, chunks=[*ledger.chunks, chunk])


def _by_arrival(files: dict[str, FileState]) -> list[tuple[str, FileState]]:
    """Order files by their modification time, then by name."""
    return sorted(files.items(), key=lambda item: (item[1][1], item[0]))

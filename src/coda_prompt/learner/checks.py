"""What lessons cost older classes, measured after the model was saved.

    checks.json   in the model folder: accuracy before and after, by lesson

A lesson whose caller names images to check has this in its record. The service answers with the new
version first and measures afterwards, so its measurements are in a file of their own. The file has
no class names.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from coda_prompt.learner.folder import CHECKS
from coda_prompt.learner.records import TaskRecord, WatchedAccuracy
from coda_prompt.storage.files import MAX_NOTE_BYTES, FileSchema, read_regular, write_atomically


class Checks(FileSchema):
    """Content of the file."""

    lessons: dict[str, WatchedAccuracy] = Field(default_factory=dict)
    """By number and date of the lesson."""

    def of(self, number: int, task: TaskRecord) -> WatchedAccuracy | None:
        """Return what was measured for a lesson; None if nothing was.

        Args:
            number: Number of the lesson, starting at 1.
            task: Its record.
        """
        return task.watched or self.lessons.get(_key(number, task))


def read_checks(folder: Path) -> Checks:
    """Read the measurements of a model folder; a missing or damaged file is empty."""
    try:
        return Checks.model_validate_json(read_regular(folder / CHECKS, MAX_NOTE_BYTES))
    except (OSError, ValidationError):
        return Checks()


def add_check(folder: Path, number: int, task: TaskRecord, measured: WatchedAccuracy) -> None:
    """Add the measurement of a lesson; arguments as in `Checks.of`."""
    lessons = {**read_checks(folder).lessons, _key(number, task): measured}
    content = Checks(lessons=lessons).model_dump_json(indent=1)
    write_atomically(folder / CHECKS, content.encode())


def _key(number: int, task: TaskRecord) -> str:
    return f"{number} {task.date}"

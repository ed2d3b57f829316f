"""What happened to a model, and how two models differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from coda_prompt.errors import MissingData
from coda_prompt.learner.checks import Checks, read_checks
from coda_prompt.learner.folder import ModelFolder, Versions
from coda_prompt.learner.records import Description

DESCRIBED = ConfigDict(use_attribute_docstrings=True)
"""The service's reference describes each field by the docstring under it."""


@dataclass(frozen=True)
class HistoryEntry:
    """A lesson or an edit."""

    kind: str
    """`lesson` or `edit`."""
    date: str
    """Time, UTC."""
    what: str
    """What an edit changed; of a lesson, empty, or `(forgotten)` if it has no class any more."""
    new: tuple[str, ...] = ()
    """New classes of a lesson."""
    continued: tuple[str, ...] = ()
    """Known classes that got more images."""
    images: int = 0
    """Images of a lesson."""
    held_out: int = 0
    """Images of a lesson that were held out to measure it."""
    accuracy: float | None = None
    """On held-out images among all classes, right after the lesson."""
    accuracy_own: float | None = None
    """Among the classes of the lesson."""
    older_before: float | None = None
    """Accuracy of older classes before the lesson, on watched images; None if none were watched."""
    older_after: float | None = None
    """The same after the lesson."""
    older_images: int = 0
    """Number of watched images; 0 if it is not known."""
    version: int | None = None
    """Number of the version that it made; None if that is not stored any more."""


@dataclass(frozen=True)
class VersionEntry:
    """A version that can be restored."""

    number: int
    """Number of the version, for `undo` and `diff`."""
    lessons: int
    """Number of lessons it contains."""
    edits: int
    """Number of edits it contains."""
    classes: int
    """Number of its classes."""
    current: bool
    """Whether it is the current version."""
    newest: HistoryEntry | None = None
    """Its newest lesson or edit."""


@dataclass(frozen=True)
class ModelHistory:
    """The lessons and edits of a model in order, and its stored versions."""

    __pydantic_config__ = DESCRIBED

    entries: tuple[HistoryEntry, ...]
    """Lessons and edits, the oldest first."""
    versions: tuple[VersionEntry, ...]
    """Stored versions."""


@dataclass(frozen=True)
class Difference:
    """How two models differ."""

    __pydantic_config__ = DESCRIBED

    only_first: dict[str, int]
    """Classes only in the first model, with their images."""
    only_second: dict[str, int]
    """Classes only in the second model, with their images."""
    images: dict[str, tuple[int, int]]
    """Classes in both with different numbers of images."""
    same: int
    """Number of classes in both with equal numbers of images."""
    settings: dict[str, tuple[str, str]]
    """Method, backbone, options, temperature, ... where they differ."""


def history(versions: Versions, folder: Path | None = None) -> ModelHistory:
    """Return the history of a model.

    Args:
        versions: The current and the stored ones.
        folder: The model folder, which may have measurements of the service.
    """
    checks = Checks() if folder is None else read_checks(folder)
    numbers = {_size(each.description): each.number for each in versions.all}
    listed = tuple(
        VersionEntry(
            each.number,
            *_size(each.description),
            len(each.description.classes),
            each is versions.current,
            next(reversed(_entries(each.description, checks, {})), None),
        )
        for each in versions.all
    )
    current = versions.current
    entries = [] if current is None else _entries(current.description, checks, numbers)
    return ModelHistory(tuple(entries), listed)


def _size(description: Description) -> tuple[int, int]:
    """Return the number of lessons and of edits, which differs between the versions of a model."""
    return len(description.tasks), len(description.edits)


def _entries(
    description: Description, checks: Checks, numbers: Mapping[tuple[int, int], int]
) -> list[HistoryEntry]:
    """List lessons and edits in order.

    Args:
        description: A version.
        checks: What lessons cost older classes.
        numbers: Number of a stored version by its lessons and edits.
    """
    entries: list[HistoryEntry] = []
    edits = 0
    for number, task in enumerate(description.tasks, 1):
        watched = checks.of(number, task)
        forgotten = not task.images
        entries.append(
            HistoryEntry(
                "lesson",
                task.date,
                "(forgotten)" if forgotten else "",
                tuple(task.new),
                tuple(task.continued),
                sum(task.images.values()),
                task.held_out,
                None if forgotten else task.accuracy,
                None if forgotten else task.accuracy_own,
                watched.before if watched else None,
                watched.after if watched else None,
                watched.images if watched else 0,
                numbers.get((number, edits)),
            )
        )
        for edit in [each for each in description.edits if each.after_lesson == number]:
            edits += 1
            version = numbers.get((number, edits))
            entries.append(HistoryEntry("edit", edit.date, edit.what, version=version))
    return entries


def read_named(name: str) -> Description:
    """Read the description of `FOLDER`, or of version N of it: `FOLDER@N`.

    Raises:
        MissingData: There is no such model or version.
    """
    folder, at, number = name.rpartition("@")
    if not at or not number.isdecimal() or Path(name).exists():
        return ModelFolder(Path(name)).description()
    source = ModelFolder(Path(folder))
    source.description()  # raises if there is no model
    for version in source.versions().all:
        if version.number == int(number):
            return version.description
    raise MissingData(folder, f"there is no version {number}", "'coda history' lists them.")


def difference(first: Description, second: Description) -> Difference:
    """Compare two models by their descriptions."""
    mine, others = _images(first), _images(second)
    both = [name for name in mine if name in others]
    settings = {
        "method": (first.method, second.method),
        "backbone": (first.backbone.name, second.backbone.name),
        "backbone fingerprint": (
            first.backbone.fingerprint[:16],
            second.backbone.fingerprint[:16],
        ),
        "options": (str(first.options), str(second.options)),
        "lessons": (str(len(first.tasks)), str(len(second.tasks))),
        "temperature": (f"{first.temperature:.4g}", f"{second.temperature:.4g}"),
    }
    return Difference(
        {name: count for name, count in mine.items() if name not in others},
        {name: count for name, count in others.items() if name not in mine},
        {name: (mine[name], others[name]) for name in both if mine[name] != others[name]},
        sum(mine[name] == others[name] for name in both),
        {name: pair for name, pair in settings.items() if pair[0] != pair[1]},
    )


def _images(description: Description) -> dict[str, int]:
    """Return the images of each class over all lessons, including held-out ones."""
    return {
        name: sum(task.images.get(name, 0) for task in description.tasks)
        for name in description.classes
    }

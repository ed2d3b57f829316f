"""What happened to a model, and how two models differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coda_prompt.errors import MissingData
from coda_prompt.learner import store
from coda_prompt.learner.store import Description, Model
from coda_prompt.learner.versions import History, StoredVersion


@dataclass(frozen=True)
class HistoryEntry:
    """A lesson or an edit."""

    kind: str
    """`lesson` or `edit`."""
    date: str
    what: str
    """What an edit changed; of a lesson, empty."""
    new: tuple[str, ...] = ()
    continued: tuple[str, ...] = ()
    images: int = 0
    accuracy: float | None = None
    """On held-out images among all classes, right after the lesson."""
    accuracy_own: float | None = None
    """Among the classes of the lesson."""
    older_before: float | None = None
    """Accuracy of older classes before the lesson, on watched images; None if none were watched."""
    older_after: float | None = None


@dataclass(frozen=True)
class VersionEntry:
    """A version that can be restored."""

    number: int
    lessons: int
    edits: int
    classes: int
    current: bool


@dataclass(frozen=True)
class ModelHistory:
    """The lessons and edits of a model in order, and its stored versions."""

    entries: tuple[HistoryEntry, ...]
    versions: tuple[VersionEntry, ...]


@dataclass(frozen=True)
class Difference:
    """How two models differ."""

    only_first: dict[str, int]
    """Classes only in the first model, with their images."""
    only_second: dict[str, int]
    images: dict[str, tuple[int, int]]
    """Classes in both with different numbers of images."""
    same: int
    """Number of classes in both with equal numbers of images."""
    settings: dict[str, tuple[str, str]]
    """Method, backbone, options, temperature, ... where they differ."""


def history(current: Model, versions: History) -> ModelHistory:
    """Return the history of a model.

    Args:
        current: The current version.
        versions: The stored ones.
    """
    description, entries, edits = current.description, [], list(current.description.edits)
    for number, task in enumerate(description.tasks, 1):
        watched = task.watched
        entries.append(
            HistoryEntry(
                "lesson",
                task.date,
                "",
                tuple(task.new),
                tuple(task.continued),
                sum(task.images.values()),
                task.accuracy,
                task.accuracy_own,
                watched.before if watched else None,
                watched.after if watched else None,
            )
        )
        entries += [
            HistoryEntry("edit", edit.date, edit.what)
            for edit in edits
            if edit.after_lesson == number
        ]
    everything = [*versions.before, current, *versions.after]
    models = [each.read() if isinstance(each, StoredVersion) else each for each in everything]
    listed = tuple(
        VersionEntry(
            each.number,
            len(each.description.tasks),
            len(each.description.edits),
            len(each.description.classes),
            each is current,
        )
        for each in models
    )
    return ModelHistory(tuple(entries), listed)


def read_named(name: str) -> Description:
    """Read the description of `FOLDER`, or of version N of it: `FOLDER@N`.

    Raises:
        MissingData: There is no such model or version.
    """
    folder, at, number = name.rpartition("@")
    if not at or not number.isdecimal() or Path(name).exists():
        return store.read_model(Path(name)).description
    current = store.read_model(Path(folder)).description
    if current.number_or_lessons == int(number):
        return current
    versions = store.read_history(Path(folder), current)
    for version in (*versions.before, *versions.after):
        if version.number == int(number) and isinstance(version, StoredVersion):
            return version.read().description
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

"""What learning and testing told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Learned:
    """What one `learn` did."""

    new: tuple[str, ...]
    continued: tuple[str, ...]
    """Classes that were known before and got more images."""
    images: dict[str, int]
    """Of each class, held-out ones included."""
    held_out: int
    accuracy: float | None
    """On held-out images of this task, among all classes known; None where none were held out."""
    accuracy_own: float | None
    """The same among the classes of this task."""
    calibration_error: float | None
    """Of the probabilities it gives now, on the held-out images."""
    seconds: float
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Files that could not be read."""
    forgotten: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of classes that are watched: accuracy before and after."""


@dataclass(frozen=True)
class ClassAccuracy:
    images: int
    accuracy: float


@dataclass(frozen=True)
class TaskAccuracy:
    number: int
    """The first task is 1."""
    classes: tuple[str, ...]
    """Those the task was the first to bring."""
    images: int
    accuracy: float
    """Among all classes known."""
    accuracy_own: float
    """Among the task's own classes."""


@dataclass(frozen=True)
class Evaluation:
    images: int
    accuracy: float
    calibration_error: float
    classes: dict[str, ClassAccuracy]
    tasks: tuple[TaskAccuracy, ...]
    """Tasks of which at least one class was tested."""
    left_out: tuple[str, ...] = ()
    """Files that could not be read."""

"""Results of lessons and evaluations, and their progress."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """How far a lesson, an evaluation or a prediction is."""

    stage: str
    """What is being done, in words."""
    done: int
    total: int


@dataclass(frozen=True)
class Learned:
    """The outcome of one lesson."""

    new: tuple[str, ...]
    """Classes learned for the first time."""
    continued: tuple[str, ...]
    """Known classes that were given more images."""
    images: dict[str, int]
    """Number of images of each class, including held-out images."""
    held_out: int
    """Number of images held out to measure accuracy; they were learned after that."""
    accuracy: float | None
    """Accuracy on the held-out images among all known classes; None if none were held out."""
    accuracy_own: float | None
    """Accuracy on the held-out images among the classes of this lesson."""
    calibration_error: float | None
    """Expected calibration error of the probabilities on the held-out images."""
    seconds: float = 0.0
    """Duration of the lesson."""
    warnings: tuple[str, ...] = ()
    """Possible problems with the images."""
    left_out: tuple[str, ...] = ()
    """Images that could not be read, with `skip_bad`."""
    forgotten: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Accuracy of each checked class before and after the lesson."""
    checked: dict[str, int] = field(default_factory=dict)
    """Number of images of each checked class."""
    hints: tuple[str, ...] = ()
    """What looks wrong with the lesson, now that it is learned."""
    held_out_images: tuple[int, ...] = field(default=(), repr=False)
    """Positions of the held-out images among those of the lesson."""
    chosen: str | None = None
    """Which backbone `auto` chose for the first lesson, and why."""


@dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy on the images of one class, among all known classes."""

    images: int
    accuracy: float


@dataclass(frozen=True)
class TaskAccuracy:
    """Accuracy on the classes that one lesson introduced."""

    number: int
    """Number of the lesson, starting at 1."""
    classes: tuple[str, ...]
    """Classes learned for the first time in this lesson."""
    images: int
    accuracy: float
    """Accuracy among all known classes."""
    accuracy_own: float
    """Accuracy among the classes of this lesson."""


@dataclass(frozen=True)
class Confusion:
    """How often images of one class were predicted to be of another."""

    true: str
    """The class the images belong to."""
    predicted: str
    """The class that was predicted."""
    images: int
    """Images that were confused."""
    share: float
    """Of the images of the true class."""


@dataclass(frozen=True)
class ConfusionMatrix:
    """Images by true and by predicted class."""

    classes: tuple[str, ...]
    """Classes that have images or were predicted, in the order in which they were learned."""
    counts: tuple[tuple[int, ...], ...]
    """One row for each true class, one column for each predicted class."""


@dataclass(frozen=True)
class Separation:
    """How well a model recognises images of classes it does not know."""

    images: int
    """Images of unknown classes."""
    auroc: float
    """Probability that an image of a known class is more typical than one of an unknown class."""
    false_positive_rate: float
    """Share of unknown images that are accepted if 95 % of the known ones are."""
    rate: float
    """The share of known images that was to be rejected."""
    rejected_known: float
    """The share of known images that is rejected at this rate."""
    rejected_unknown: float
    """The share of unknown images that is rejected at this rate."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on labelled images."""

    images: int
    accuracy: float
    """Accuracy among all known classes."""
    calibration_error: float
    """Expected calibration error of the probabilities."""
    classes: dict[str, ClassAccuracy]
    tasks: tuple[TaskAccuracy, ...]
    """Lessons with at least one class among the images."""
    confusion: ConfusionMatrix
    """Images by true and by predicted class."""
    confused: tuple[Confusion, ...]
    """The most frequent confusions."""
    findings: tuple[str, ...] = ()
    """How the images differ from those that were taught."""
    unknown: Separation | None = None
    """How well images of unknown classes are recognised; None without such images."""
    left_out: tuple[str, ...] = ()
    """Images that could not be read, with `skip_bad`."""

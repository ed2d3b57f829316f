"""Accuracy on labelled images, confusions, calibration, and how unknown images are recognised."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import BadImage, BadOption, NotLearned
from coda_prompt.images.labelled import Labelled
from coda_prompt.learner import findings
from coda_prompt.learner.model import LearnedModel
from coda_prompt.learner.predict import OnProgress, answers, check_rule
from coda_prompt.learner.results import (
    ClassAccuracy,
    Confusion,
    ConfusionMatrix,
    Evaluation,
    Separation,
    TaskAccuracy,
)
from coda_prompt.statistics import calibration
from coda_prompt.statistics.unknown import DEFAULT_RATE, UnknownRule
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_PAIRS = 20
"""Pairs of confused classes in an evaluation or a summary."""
MAX_NUMBERS = 25
"""With more classes, the cells of the picture have no numbers."""


def evaluate(
    model: LearnedModel,
    images: Labelled,
    unknown: Sequence[Any] | NDArray[Any] | None = None,
    unknown_rate: float = DEFAULT_RATE,
    *,
    skip_bad: bool = False,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure accuracy overall, for each class and for each lesson, among all known classes.

    Args:
        model: What has been learned.
        images: Images of known classes.
        unknown: Images of other classes.
        unknown_rate: The share of `images` that may be rejected by mistake.
        skip_bad: Leave out images that cannot be read instead of failing.
        on_progress: Called with the progress.

    Raises:
        BadImages: Images that cannot be read, without `skip_bad`.
        BadOption: There are `unknown` images, and the model cannot recognise them.
        NotLearned: The images have classes that were not learned.
    """
    classes = model.classes
    not_learned = [name for name in images.names if name not in classes]
    if not_learned:
        raise NotLearned(not_learned if classes else [], classes)
    if unknown is not None:
        check_rule(model, UnknownRule(rate=unknown_rate))
    typicality = unknown is not None or model.scorer.can_reject(DEFAULT_RATE)
    bad: list[BadImage] = []
    on_bad = bad.append if skip_bad else None
    found = dict(
        answers(model, images, typicality=typicality, on_bad=on_bad, on_progress=on_progress)
    )
    drawings = [sample.drawing for sample in images.samples]
    images = images.selected(np.array(list(found), np.int64))
    truth = rows(images.names, classes)[images.split.labels]
    scores = np.stack([each.scores for each in found.values()])
    known = np.array([each.typicality for each in found.values()] if typicality else [], float)
    notes = findings.kind_finding(model.tasks, drawings)
    notes += findings.typicality_finding(known, "images")
    separated = None
    if unknown is not None:
        others = answers(model, unknown, typicality=True, on_progress=on_progress)
        separated = separation(
            known, np.array([each.typicality for _, each in others]), unknown_rate
        )
    predicted = scores.argmax(axis=1)
    matrix = confusion_matrix(truth, predicted, classes)
    return Evaluation(
        images=len(truth),
        accuracy=float((predicted == truth).mean()),
        calibration_error=calibration.expected_calibration_error(scores, truth, model.temperature),
        classes=accuracy_by_class(images.names, images.split.labels, predicted == truth),
        tasks=tuple(_by_lesson(model, scores, truth)),
        confusion=matrix,
        confused=confused_classes(matrix),
        findings=tuple(notes),
        unknown=separated,
        left_out=tuple(str(problem) for problem in (*images.left_out, *bad)),
    )


def _by_lesson(model: LearnedModel, scores: Floats, truth: Rows) -> Iterable[TaskAccuracy]:
    """Measure the accuracy on the classes that each lesson introduced."""
    for number, task in enumerate(model.tasks, 1):
        own = rows(task.new, model.classes)
        inside = np.isin(truth, own)
        if inside.any():
            accuracies = among_all_and_own(scores[inside], truth[inside], own)
            yield TaskAccuracy(number, tuple(task.new), int(inside.sum()), *accuracies)


def rows(names: Sequence[str], classes: Sequence[str]) -> Rows:
    """Return the position of each name in `classes`."""
    return np.array([classes.index(name) for name in names], np.int64)


def among_all_and_own(scores: Floats, truth: Rows, own: Rows) -> tuple[float, float]:
    """Return the accuracy among all classes, and among the classes `own` only."""
    among_own = own[scores[:, own].argmax(axis=1)]
    return float((scores.argmax(axis=1) == truth).mean()), float((among_own == truth).mean())


def accuracy_by_class(
    names: Sequence[str], labels: Rows, correct: NDArray[np.bool_]
) -> dict[str, ClassAccuracy]:
    """Return the accuracy of each class that has images; labels are positions in `names`."""
    return {
        names[row]: ClassAccuracy(int((labels == row).sum()), float(correct[labels == row].mean()))
        for row in np.unique(labels).tolist()
    }


# -- unknown images


def separation(known: Floats, unknown: Floats, rate: float) -> Separation:
    """Measure how well typicality tells images of known classes from others.

    Args:
        known: Typicality of images of known classes.
        unknown: Typicality of images of unknown classes.
        rate: The share of known images to reject.
    """
    return Separation(
        images=len(unknown),
        auroc=auroc(known, unknown),
        false_positive_rate=false_positive_rate(known, unknown),
        rate=rate,
        rejected_known=float((known < rate).mean()),
        rejected_unknown=float((unknown < rate).mean()),
    )


def auroc(known: Floats, unknown: Floats) -> float:
    """Return the probability that a known score is above an unknown one; ties count half."""
    order = np.sort(unknown)
    below, not_above = (np.searchsorted(order, known, side) for side in ("left", "right"))
    return float((below + not_above).mean() / (2 * len(unknown)))


def false_positive_rate(known: Floats, unknown: Floats, accepted: float = 0.95) -> float:
    """Return the share of unknown scores at or above what a share of the known ones reaches."""
    threshold = np.sort(known)[::-1][max(0, round(accepted * len(known)) - 1)]
    return float((unknown >= threshold).mean())


# -- confusions


def confusion_matrix(truth: Rows, predicted: Rows, names: Sequence[str]) -> ConfusionMatrix:
    """Count predictions.

    Args:
        truth: Row of the correct class of each image.
        predicted: Row of the predicted class of each image.
        names: Class names by row.
    """
    table = np.zeros((len(names), len(names)), np.int64)
    np.add.at(table, (truth, predicted), 1)
    present = np.flatnonzero(table.sum(axis=0) + table.sum(axis=1))
    counts = table[np.ix_(present, present)].tolist()
    return ConfusionMatrix(tuple(names[row] for row in present.tolist()), tuple(map(tuple, counts)))


def confused_classes(matrix: ConfusionMatrix) -> tuple[Confusion, ...]:
    """Return the most frequent confusions, those of most images first."""
    counts = (dict(zip(matrix.classes, row, strict=True)) for row in matrix.counts)
    return most_confused(dict(zip(matrix.classes, counts, strict=True)))


def most_confused(counts: Mapping[str, Mapping[str, int]]) -> tuple[Confusion, ...]:
    """Return the most frequent confusions, those of most images first.

    Args:
        counts: Number of images by correct class and by predicted class.
    """
    found = [
        Confusion(true, predicted, images, images / sum(row.values()))
        for true, row in counts.items()
        for predicted, images in row.items()
        if images and predicted != true
    ]
    found.sort(key=lambda each: (-each.images, -each.share))
    return tuple(found[:MAX_PAIRS])


def draw_confusion(matrix: ConfusionMatrix, path: Path) -> None:
    """Write a confusion matrix as a picture.

    Raises:
        BadOption: The name of the file does not end in .png, or its folder does not exist.
        MissingExtra: matplotlib is not installed.
    """
    check_picture(path)
    content = io.BytesIO()
    _figure(matrix).savefig(content, dpi=150, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that comes first.

    Raises:
        BadOption: The name of the file does not end in .png, or its folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise BadOption("coda evaluate", "picture", f"{path} does not end in .png")
    if not path.absolute().parent.is_dir():
        raise BadOption("coda evaluate", "picture", f"there is no folder {path.parent}")


def _figure(matrix: ConfusionMatrix) -> Figure:
    from matplotlib.figure import Figure

    count = len(matrix.classes)
    side = min(max(4.0, 0.35 * count + 2), 20.0)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    shares = [[value / max(1, sum(row)) for value in row] for row in matrix.counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 9 if count <= MAX_NUMBERS else max(2.0, 240 / count)
    axes.set_xticks(range(count), matrix.classes, rotation=90, fontsize=size)
    axes.set_yticks(range(count), matrix.classes, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= MAX_NUMBERS:
        for row, values in enumerate(matrix.counts):
            for column, value in enumerate(values):
                if value:
                    color = "white" if shares[row][column] > 0.6 else "black"
                    axes.text(
                        column, row, str(value), ha="center", va="center", color=color, fontsize=7
                    )
    return figure

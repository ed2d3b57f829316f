"""Accuracy on labelled images: overall, for each class and for each lesson."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coda_prompt import errors
from coda_prompt.images.labelled import Labelled, MemorySplit
from coda_prompt.learner import calibration
from coda_prompt.learner.confusion import ConfusionMatrix
from coda_prompt.learner.network import Network
from coda_prompt.learner.predictor import OnEvent
from coda_prompt.learner.resemblance import kind_finding, typicality_finding
from coda_prompt.learner.results import ClassAccuracy, Evaluation, TaskAccuracy
from coda_prompt.learner.separation import separation
from coda_prompt.learner.unknown import DEFAULT_RATE, UnknownRule


def evaluate(
    network: Network,
    images: Labelled,
    on_event: OnEvent | None,
    unknown: list[Any] | NDArray[Any] | None = None,
    unknown_rate: float = DEFAULT_RATE,
) -> Evaluation:
    """Measure accuracy overall, for each class and for each lesson, among all known classes.

    Args:
        network: What has been learned.
        images: Images of known classes.
        on_event: Called with the progress.
        unknown: Images of other classes.
        unknown_rate: The share of `images` that may be rejected by mistake.

    Raises:
        BadOption: There are `unknown` images, and the model cannot recognise them.
        NotLearned: The images have classes that were not learned.
    """
    classes, predictor = network.classes, network.predictor
    not_learned = [name for name in images.names if name not in classes]
    if not_learned:
        raise errors.NotLearned(not_learned if classes else [], classes)
    truth = rows(images.names, classes)[images.split.labels]
    if unknown is not None:
        predictor.check(UnknownRule(rate=unknown_rate))
    measured = unknown is not None or predictor.scorer.can_reject(DEFAULT_RATE)
    table = predictor.split_logits(images.split, typicality=measured, on_event=on_event)
    logits, known = table[:, : len(classes)], table[:, len(classes) :].flatten()
    findings = kind_finding(network.tasks, (sample.drawing for sample in images.samples))
    findings += typicality_finding(known, "images")
    separated = None
    if unknown is not None:
        others = MemorySplit(unknown, np.zeros(len(unknown), np.int64))
        scored = predictor.split_logits(others, typicality=True, on_event=on_event)
        separated = separation(known, scored[:, -1], unknown_rate)
    matrix = ConfusionMatrix.count(truth, logits.argmax(dim=1), classes)
    tasks = []
    for number, task in enumerate(network.tasks, 1):
        own = rows(task.new, classes)
        inside = torch.isin(truth, own)
        if inside.any():
            accuracies = accuracy(logits[inside], truth[inside], own)
            tasks.append(TaskAccuracy(number, tuple(task.new), int(inside.sum()), *accuracies))
    correct = logits.argmax(dim=1) == truth
    return Evaluation(
        images=len(truth),
        accuracy=float(correct.double().mean()),
        calibration_error=calibration.expected_calibration_error(
            logits, truth, predictor.temperature
        ),
        classes=accuracy_by_class(images, range(len(truth)), correct),
        tasks=tuple(tasks),
        confusion=matrix,
        confused=matrix.confused(),
        findings=tuple(findings),
        unknown=separated,
        left_out=tuple(str(problem) for problem in images.bad),
    )


def rows(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return the position of each name in `classes`."""
    return torch.tensor([classes.index(name) for name in names], dtype=torch.int64)


def accuracy(logits: Tensor, truth: Tensor, own: Tensor) -> tuple[float, float]:
    """Return the accuracy among all classes, and among the classes `own` only."""
    among_own = own[logits[:, own].argmax(dim=1)]
    correct = torch.stack([logits.argmax(dim=1) == truth, among_own == truth]).double()
    over_all, within = correct.mean(dim=1).tolist()
    return over_all, within


def accuracy_by_class(
    images: Labelled, indices: Sequence[int] | NDArray[np.int64], correct: Tensor
) -> dict[str, ClassAccuracy]:
    """Return the accuracy of each class that has images among those at `indices`."""
    labels = torch.from_numpy(images.split.labels)[torch.as_tensor(indices)]
    accuracies = {}
    for row in labels.unique().tolist():
        members = correct[labels == row].double()
        accuracies[images.names[row]] = ClassAccuracy(len(members), float(members.mean()))
    return accuracies

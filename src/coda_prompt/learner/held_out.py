"""Predictions of held-out images, counted in the record of each lesson."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coda_prompt.learner.evaluation import most_confused
from coda_prompt.learner.results import Confusion

if TYPE_CHECKING:
    from coda_prompt.learner.records import TaskRecord

Counts = dict[str, dict[str, int]]
"""Number of images by correct class and by predicted class."""


@dataclass(frozen=True)
class HeldOutClass:
    """Accuracy on the held-out images of one class."""

    label: str
    """Class name."""
    images: int
    """Held-out images of the class."""
    accuracy: float
    """Among all classes that were known right after the lesson of the images."""


@dataclass(frozen=True)
class HeldOutSummary:
    """Accuracy of each class and the most confused pairs, over all lessons."""

    classes: tuple[HeldOutClass, ...]
    """In the order in which they were learned; without classes that had no held-out image."""
    confused: tuple[Confusion, ...]
    """Pairs with most images first."""


def renamed(counts: Counts, names: Mapping[str, str | None]) -> Counts:
    """Return the counts with other class names; those of a class without a name are left out."""
    result: Counts = {}
    for true, row in counts.items():
        for predicted, images in row.items():
            new_true, new_predicted = names.get(true, true), names.get(predicted, predicted)
            if new_true is not None and new_predicted is not None:
                new_row = result.setdefault(new_true, {})
                new_row[new_predicted] = new_row.get(new_predicted, 0) + images
    return result


def accuracy(counts: Counts) -> float | None:
    """Return the share of correct predictions; None without images."""
    images = sum(sum(row.values()) for row in counts.values())
    correct = sum(row.get(true, 0) for true, row in counts.items())
    return correct / images if images else None


def summarize(tasks: Iterable[TaskRecord]) -> HeldOutSummary:
    """Sum up the held-out images of all lessons."""
    rows: dict[str, Counter[str]] = {}
    for task in tasks:
        for true, row in task.predictions.items():
            rows.setdefault(true, Counter()).update(row)
    classes = [
        HeldOutClass(true, row.total(), row[true] / row.total()) for true, row in rows.items()
    ]
    return HeldOutSummary(tuple(classes), most_confused(rows))

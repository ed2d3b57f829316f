"""Classifiers trained on drawings of the pocket dataset."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt import ContinualClassifier
from coda_prompt.research.streams.pocket import pocket_source

SOURCE = pocket_source()
NAMES = SOURCE.class_names


def drawings(rows: range | list[int], count: int = 20, test: bool = False) -> tuple[Any, list[str]]:
    split: Any = SOURCE.test if test else SOURCE.train
    indices = [index for row in rows for index in np.flatnonzero(split.labels == row)[:count]]
    return split.images[indices], [NAMES[split.labels[index]] for index in indices]


def taught(*tasks: range | list[int], method: str = "slda", **options: Any) -> ContinualClassifier:
    """Return a classifier that has learned the classes of these rows, a task each."""
    rows = tuple(tuple(task) for task in tasks)
    return copy.copy(_taught(rows, method, tuple(sorted(options.items()))))


@functools.cache
def _taught(
    tasks: tuple[tuple[int, ...], ...], method: str, options: tuple[tuple[str, Any], ...]
) -> ContinualClassifier:
    """What was learned is a value: a shallow copy can be changed."""
    if not tasks:
        return ContinualClassifier(
            method=method, **{"backbone": "pocket", "verbose": False, **dict(options)}
        )
    classifier = copy.copy(_taught(tasks[:-1], method, options))
    classifier.learn(*drawings(list(tasks[-1])))
    return classifier


def arrays(classifier: ContinualClassifier) -> dict[str, NDArray[Any]]:
    """Return everything that was learned."""
    return classifier.model.arrays()


def assert_same(first: ContinualClassifier, second: ContinualClassifier) -> None:
    assert first.classes_ == second.classes_
    mine, other = arrays(first), arrays(second)
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)

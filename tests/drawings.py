"""Classifiers trained on drawings of the pocket dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from coda_prompt import ContinualClassifier
from coda_prompt.data.pocket import pocket_source

SOURCE = pocket_source()
NAMES = SOURCE.class_names


def drawings(rows: range | list[int], count: int = 20, test: bool = False) -> tuple[Any, list[str]]:
    split: Any = SOURCE.test if test else SOURCE.train
    indices = [index for row in rows for index in np.flatnonzero(split.labels == row)[:count]]
    return split.images[indices], [NAMES[split.labels[index]] for index in indices]


def taught(
    *tasks: range | list[int], method: str = "ranpac", **options: Any
) -> ContinualClassifier:
    classifier = ContinualClassifier(method=method, **options)
    for rows in tasks:
        classifier.learn(*drawings(rows))
    return classifier


def tensors(classifier: ContinualClassifier) -> dict[str, torch.Tensor]:
    """Copy the method's current state."""
    return {name: tensor.clone() for name, tensor in classifier._method.learned_state().items()}


def assert_same(first: ContinualClassifier, second: ContinualClassifier) -> None:
    assert first.classes_ == second.classes_
    mine, other = tensors(first), tensors(second)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)

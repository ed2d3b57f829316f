"""Continual learning metrics: pure functions of the accuracy matrix.

`R[t, j]` is the accuracy on test group j after learning task t, over all classes seen so far. By
default group j has the test images of task j and is learned in it; otherwise `learned[j]` is the
task after which it is learned. Entries of groups without a class seen so far, and rows that were
not measured (an upper bound has only the last row), are NaN. N is the number of tasks.
docs/guide/streams.md has all formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]
Learned = Sequence[int] | None
"""The task after which each group is learned; None: group j in task j, for a square matrix."""


def average_accuracy(matrix: ArrayLike, learned: Learned = None) -> float:
    """Average accuracy A_N = mean_j R[N, j]: the mean of the last row."""
    values, _ = _checked(matrix, learned)
    return float(np.mean(values[-1]))


def weighted_accuracy(
    matrix: ArrayLike, test_images: Sequence[int], learned: Learned = None
) -> float:
    """Accuracy over all test images at the end: the last row weighted by test images per group."""
    weights = np.asarray(test_images, float)
    tested = weights > 0
    values, _ = _checked(matrix, learned)
    return float(np.average(values[-1][tested], weights=weights[tested]))


def accuracy_after_each_task(matrix: ArrayLike, learned: Learned = None) -> Matrix:
    """A_t = mean of R[t, j] over the groups j that are learned, for every task t."""
    values, when = _checked(matrix, learned)
    return np.array([np.mean(row[when <= task]) for task, row in enumerate(values)])


def average_incremental_accuracy(matrix: ArrayLike, learned: Learned = None) -> float:
    """Average incremental accuracy: mean_t A_t."""
    return float(np.mean(accuracy_after_each_task(matrix, learned)))


def learning_accuracy(matrix: ArrayLike, learned: Learned = None) -> float:
    """Learning accuracy (plasticity): mean_j R[learned_j, j]."""
    values, when = _checked(matrix, learned)
    return float(np.mean(values[when, np.arange(len(when))]))


def forgetting_paper(matrix: ArrayLike, learned: Learned = None) -> float:
    """F_paper = mean_t mean_{j < t} (R[t-1, j] - R[t, j]), as in the released CODA-Prompt code."""
    values, when = _checked(matrix, learned)
    drops = [
        np.mean(values[task - 1, when < task] - values[task, when < task])
        for task in range(1, len(values))
        if (when < task).any()
    ]
    return float(np.mean(drops)) if drops else 0.0


def forgetting_per_task(matrix: ArrayLike, learned: Learned = None) -> Matrix:
    """f_j = max_{t < N} R[t, j] - R[N, j] for each group j that is learned before the last task."""
    values, when = _checked(matrix, learned)
    last = len(values) - 1
    early = np.flatnonzero(when < last)
    return np.array([np.max(values[when[j] : last, j]) - values[last, j] for j in early])


def forgetting_max(matrix: ArrayLike, learned: Learned = None) -> float:
    """F_max = mean_j f_j (Chaudhry et al. 2018; DualPrompt, appendix C)."""
    drops = forgetting_per_task(matrix, learned)
    return float(np.mean(drops)) if len(drops) else 0.0


def backward_transfer(matrix: ArrayLike, learned: Learned = None) -> float:
    """BWT = mean_{j < N} (R[N, j] - R[learned_j, j]) (Lopez-Paz and Ranzato 2017)."""
    values, when = _checked(matrix, learned)
    early = np.flatnonzero(when < len(values) - 1)
    gains = values[-1, early] - values[when[early], early]
    return float(np.mean(gains)) if len(early) else 0.0


def forward_transfer(matrix: ArrayLike, classes: int, learned: Learned = None) -> float:
    """FWT = mean_{j > 1} (R[learned_j - 1, j] - 1 / classes) (Lopez-Paz and Ranzato 2017).

    The accuracy on a group before it is learned, above chance. Groups of which no class is known
    before are left out; NaN if these are all, as in class-incremental streams.
    """
    values, when = _checked(matrix, learned)
    later = np.flatnonzero(when > 0)
    before = values[when[later] - 1, later]
    before = before[~np.isnan(before)]
    return float(np.mean(before - 1 / classes)) if len(before) else math.nan


def harmonic_mean(first: float, second: float) -> float:
    """H = 2 a b / (a + b), of the accuracies on base classes and on new classes; 0 if both are."""
    return 2 * first * second / (first + second) if first + second else 0.0


def area_under_curve(accuracies: ArrayLike, amounts: ArrayLike) -> float:
    """A_AUC = sum_t a_t (n_t - n_{t-1}) / n_N over the measured tasks (Koh et al. 2022).

    Args:
        accuracies: a_t, the accuracy on all classes seen after task t; NaN if not measured.
        amounts: n_t, what was learned from until then: images, or multiply-adds.
    """
    values, totals = np.asarray(accuracies, float), np.asarray(amounts, float)
    measured = ~np.isnan(values)
    if not measured.any():
        return math.nan
    widths = np.diff(totals[measured], prepend=0.0)
    return float(np.sum(values[measured] * widths) / totals[measured][-1])


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over trials (ddof 0, as in the released code)."""

    mean: float
    std: float


def summarise(values: Sequence[float]) -> Summary:
    """Summarize one metric over trials."""
    return Summary(float(np.mean(values)), float(np.std(values)))


@dataclass(frozen=True)
class PairedDifference:
    """Mean of per-seed differences and its confidence interval (None for one seed)."""

    mean: float
    interval: tuple[float, float] | None


def paired_difference(
    values: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> PairedDifference:
    """Compare two methods seed by seed: mean of `values - reference`, Student's t interval."""
    differences = np.asarray(values, float) - np.asarray(reference, float)
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return PairedDifference(mean, None)
    standard_error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    margin = student_quantile((1 + confidence) / 2, len(differences) - 1) * standard_error
    return PairedDifference(mean, (mean - margin, mean + margin))


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile (probability >= 0.5) of Student's t distribution, by bisection of its CDF.

    t = sqrt(freedom) * tan(angle) turns the CDF into an integral of a smooth bounded function.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        angles = np.linspace(0.0, middle, 2001)
        heights = np.cos(angles) ** (freedom - 1)
        mass = 0.5 + scale * float(_simpson(heights, middle / 2000))
        low, high = (middle, high) if mass < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _simpson(heights: Matrix, step: float) -> float:
    ends = heights[0] + heights[-1]
    inner = 4 * heights[1:-1:2].sum() + 2 * heights[2:-1:2].sum()
    return float(step / 3 * (ends + inner))


def _checked(matrix: ArrayLike, learned: Learned) -> tuple[Matrix, NDArray[np.int64]]:
    """Return the matrix and the task after which each of its groups is learned."""
    values = np.asarray(matrix, float)
    square = values.ndim == 2 and values.shape[0] == values.shape[1] and len(values)
    if learned is None and not square:
        raise ValueError(f"an accuracy matrix must be square, got shape {values.shape}")
    when = np.arange(len(values)) if learned is None else np.asarray(learned, np.int64)
    if (
        values.ndim != 2
        or values.shape[1] != len(when)
        or not ((when >= 0) & (when < len(values))).all()
    ):
        raise ValueError(f"{len(when)} groups do not fit a matrix of shape {values.shape}")
    return values, when

"""Continual learning metrics: pure functions of the accuracy matrix.

`R[t, j]` is the accuracy on task j after learning task t, over all classes seen so far. Entries
with j > t, and rows that were not measured (an upper bound has only the last row), are NaN. N is
the number of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def average_accuracy(matrix: ArrayLike) -> float:
    """Average accuracy A_N = mean_j R[N, j]: the mean of the last row."""
    return float(np.mean(_square(matrix)[-1]))


def weighted_accuracy(matrix: ArrayLike, test_images: Sequence[int]) -> float:
    """Accuracy over all test images at the end: the last row weighted by test images per task."""
    weights = np.asarray(test_images, float)
    tested = weights > 0
    return float(np.average(_square(matrix)[-1][tested], weights=weights[tested]))


def accuracy_after_each_task(matrix: ArrayLike) -> Matrix:
    """A_t = mean_{j <= t} R[t, j] for every task t."""
    square = _square(matrix)
    return np.array([np.mean(row[: task + 1]) for task, row in enumerate(square)])


def average_incremental_accuracy(matrix: ArrayLike) -> float:
    """Average incremental accuracy: mean_t A_t."""
    return float(np.mean(accuracy_after_each_task(matrix)))


def learning_accuracy(matrix: ArrayLike) -> float:
    """Learning accuracy (plasticity): mean_t R[t, t]."""
    return float(np.mean(np.diag(_square(matrix))))


def forgetting_paper(matrix: ArrayLike) -> float:
    """F_paper = mean_t mean_{j < t} (R[t-1, j] - R[t, j]), as in the released CODA-Prompt code."""
    square = _square(matrix)
    drops = [
        np.mean(square[task - 1, :task] - square[task, :task]) for task in range(1, len(square))
    ]
    return float(np.mean(drops)) if drops else 0.0


def forgetting_per_task(matrix: ArrayLike) -> Matrix:
    """f_j = max_{t < N} R[t, j] - R[N, j] for each task j but the last."""
    square = _square(matrix)
    last = len(square) - 1
    return np.array([np.max(square[j:last, j]) - square[last, j] for j in range(last)])


def forgetting_max(matrix: ArrayLike) -> float:
    """F_max = mean_j f_j (Chaudhry et al. 2018; DualPrompt, appendix C)."""
    drops = forgetting_per_task(matrix)
    return float(np.mean(drops)) if len(drops) else 0.0


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


def _square(matrix: ArrayLike) -> Matrix:
    square = np.asarray(matrix, float)
    if square.ndim != 2 or square.shape[0] != square.shape[1] or not len(square):
        raise ValueError(f"an accuracy matrix must be square, got shape {square.shape}")
    return square

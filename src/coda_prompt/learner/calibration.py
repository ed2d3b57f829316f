"""Calibrated probabilities: temperature scaling, fitted on held-out images.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017 (https://arxiv.org/abs/1706.04599).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
BINS = 10
PRIOR_IMAGES = 10
"""Number of held-out images that weigh as much as the method's default temperature."""


def fit_temperature(logits: Tensor, labels: Tensor, default: float) -> float:
    """Return the temperature with the smallest negative log-likelihood.

    A few images that are all classified correctly would drive the temperature to zero; a penalty
    on log(T / default)^2, worth `PRIOR_IMAGES` images, prevents this.

    The minimum over log(T) is found by golden-section search rather than by scipy.optimize: it is
    a few lines, its result is the same on every machine, and importing scipy would slow down every
    `coda` command.

    Args:
        logits: N x classes.
        labels: The correct class of each row.
        default: The temperature to use without held-out images.
    """
    logits = logits.double()
    weight, prior = PRIOR_IMAGES / len(labels), math.log(default)
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-11:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        loss_left, loss_right = (
            float(F.cross_entropy(logits / math.exp(point), labels)) + weight * (point - prior) ** 2
            for point in (left, right)
        )
        low, high = (low, right) if loss_left <= loss_right else (left, high)
    return math.exp((low + high) / 2)


def expected_calibration_error(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """Return the mean gap between confidence and accuracy over ten bins of confidence.

    Args:
        logits: N x classes.
        labels: The correct class of each row.
        temperature: Divides the logits.
    """
    confidence, predicted = (logits / temperature).softmax(dim=1).max(dim=1)
    correct = (predicted == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    error = 0.0
    for number in bins.unique().tolist():
        inside = bins == number
        gap = (correct[inside].mean() - confidence[inside].mean()).abs()
        error += float(inside.double().mean() * gap)
    return error


def merge_temperatures(fits: Sequence[tuple[float, int]], default: float) -> float:
    """Return the geometric mean of the tasks' temperatures, weighted by images.

    Args:
        fits: Temperature of each task and the number of images it was fitted on.
        default: The temperature to use without held-out images.
    """
    images = sum(count for _, count in fits)
    if not images:
        return default
    return math.exp(sum(count * math.log(value) for value, count in fits) / images)

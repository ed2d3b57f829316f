"""Probabilities that can be believed: one temperature, fitted on held-out images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

COLDEST, HOTTEST = 1e-3, 1e3
BINS = 10
PRIOR_IMAGES = 10
"""How many held-out images weigh as much as what is known of the method's scores beforehand."""


def fitted_temperature(logits: Tensor, labels: Tensor, usual: float) -> float:
    """The temperature with the least negative log-likelihood, by golden section of its logarithm.

    A few images that are all right would ask for certainty: the square of log(T / usual) counts as
    much as the likelihood of some images does.
    """
    logits = logits.double()
    weight = PRIOR_IMAGES / len(labels)
    low, high = math.log(COLDEST), math.log(HOTTEST)
    ratio = (math.sqrt(5) - 1) / 2

    def loss(place: float) -> float:
        likelihood = float(F.cross_entropy(logits / math.exp(place), labels))
        return likelihood + weight * (place - math.log(usual)) ** 2

    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(60):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return math.exp((low + high) / 2)


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """The mean gap between how sure the classifier is and how often it is right, in ten bins."""
    sure, chosen = probabilities.max(dim=1)
    right = (chosen == labels).double()
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    gap = 0.0
    for place in range(BINS):
        inside = bins == place
        if inside.any():
            gap += float(
                inside.double().mean() * (right[inside].mean() - sure[inside].mean()).abs()
            )
    return gap


def merged_temperature(tasks: Sequence[tuple[float, int]], usual: float) -> float:
    """Of (temperature, images it was fitted on) of each task: their geometric mean, weighted."""
    images = sum(count for _, count in tasks)
    if not images:
        return usual
    return math.exp(sum(count * math.log(value) for value, count in tasks) / images)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits / temperature, dim=1)

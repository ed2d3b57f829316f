"""Calibrated probabilities: temperature scaling.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017 (https://arxiv.org/abs/1706.04599).

The temperature of a closed-form method follows from running statistics (`expected_temperature`), so
that it is the same however the statistics came about: in one lesson or several, by merging models,
or by forgetting a class. That of other methods is fitted on the held-out images of each lesson.
docs/lab/calibration.md compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.shrinkage import shrink_covariance
from coda_prompt.research.seeding import keyed_generator

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
BINS = 10
PRIOR_IMAGES = 10
"""Number of images that weigh as much as the method's default temperature."""
SAMPLES = 512
"""Images sampled by `expected_temperature`."""


def expected_temperature(
    scores: Callable[[Tensor], Tensor],
    means: Tensor,
    counts: Tensor,
    covariance: Tensor,
    freedom: int,
    default: float,
) -> float:
    """Return the temperature that fits new images of classes with these statistics.

    New images are sampled. Two things make them harder to classify than samples of the Gaussians
    that the statistics describe:

    - The mean of a class is known from few images, and the classifier was fitted to this mean. The
      expected mean is closer to that of all classes (empirical Bayes): of the variance of the means
      in a direction, the part that sampling explains is removed.
    - Real images are more often far from their class. Student's t distribution with two degrees of
      freedom gives the right temperatures for drawings and photographs.

    Args:
        scores: Computes the scores of features, B x classes.
        means: Of the features of each class, classes x D.
        counts: Images of each class; a class may have none.
        covariance: Within classes, D x D.
        freedom: Its degrees of freedom.
        default: The temperature with fewer than two classes.
    """
    rows, width = (counts > 0).nonzero()[:, 0], len(covariance)
    if len(rows) < 2:
        return default
    factor = torch.linalg.cholesky(shrink_covariance(covariance, freedom))
    generator = keyed_generator(0, "samples for the temperature")
    # Sorted by a projection of their means: the order of learning must not decide on the samples.
    direction = torch.randn(width, dtype=torch.float64, generator=generator)
    rows = rows[(means[rows] @ direction).argsort()]
    means = means[rows]
    center = means.mean(dim=0)
    white = torch.linalg.solve_triangular(factor, (means - center).T, upper=False).T
    left, values, right = torch.linalg.svd(white, full_matrices=False)
    # The noise of all means, shared by the directions in which they can differ.
    noise = (1 / counts[rows]).mean() * width * (len(rows) - 1) / min(len(rows) - 1, width)
    expected = (left * (values - noise / values).clamp(min=0)) @ right
    picked = torch.arange(SAMPLES) * len(rows) // SAMPLES
    deviations = torch.randn(SAMPLES, width, dtype=torch.float64, generator=generator)
    scale = torch.empty(SAMPLES, 1, dtype=torch.float64).exponential_(generator=generator).sqrt()
    features = center + (expected[picked] + deviations / scale) @ factor.T
    return fit_temperature(scores(features), rows[picked], default)


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
        default: The temperature to use without images.
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

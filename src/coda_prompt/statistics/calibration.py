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

import numpy as np

from coda_prompt.seeding import keyed_generator
from coda_prompt.statistics.algebra import Array, inverse_triangle
from coda_prompt.statistics.moments import shrink_covariance

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
BINS = 10
PRIOR_IMAGES = 10
"""Number of images that weigh as much as the method's default temperature."""
SAMPLES = 512
"""Images sampled by `expected_temperature`."""


def expected_temperature(
    scores: Callable[[Array], Array],
    means: Array,
    counts: Array,
    covariance: Array,
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
        scores: Computes the scores of features, n x classes.
        means: Of the features of each class, classes x D.
        counts: Images of each class; a class may have none.
        covariance: Within classes, D x D.
        freedom: Its degrees of freedom.
        default: The temperature with fewer than two classes.
    """
    rows, width = np.flatnonzero(counts > 0), len(covariance)
    if len(rows) < 2:
        return default
    factor = np.linalg.cholesky(shrink_covariance(covariance, freedom))
    generator = keyed_generator(0, "samples for the temperature")
    # Sorted by a projection of their means: the order of learning must not decide on the samples.
    direction = generator.standard_normal(width)
    rows = rows[np.argsort(means[rows] @ direction)]
    means = means[rows]
    center = means.mean(axis=0)
    white = (means - center) @ inverse_triangle(factor).T
    left, values, right = np.linalg.svd(white, full_matrices=False)
    # The noise of all means, shared by the directions in which they can differ.
    noise = (1 / counts[rows]).mean() * width * (len(rows) - 1) / min(len(rows) - 1, width)
    values = np.maximum(values, 1e-300)
    expected = (left * np.maximum(values - noise / values, 0)) @ right
    picked = np.arange(SAMPLES) * len(rows) // SAMPLES
    deviations = generator.standard_normal((SAMPLES, width))
    scale = np.sqrt(generator.standard_exponential((SAMPLES, 1)))
    features = center + (expected[picked] + deviations / scale) @ factor.T
    return fit_temperature(scores(features), rows[picked], default)


def fit_temperature(logits: Array, labels: Array, default: float) -> float:
    """Return the temperature with the smallest negative log-likelihood.

    A few images that are all classified correctly would drive the temperature to zero; a penalty
    on log(T / default)^2, worth `PRIOR_IMAGES` images, prevents this.

    The minimum over log(T) is found by golden-section search: a few lines, and its result is the
    same on every machine.

    Args:
        logits: N x classes.
        labels: The correct class of each row.
        default: The temperature to use without images.
    """
    weight, prior = PRIOR_IMAGES / len(labels), math.log(default)
    # Relative to the correct class, the likelihood is that of the logit 0.
    logits = logits - np.take_along_axis(logits, labels[:, None], axis=1)
    largest = logits.max(axis=1)
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    ratio = (math.sqrt(5) - 1) / 2

    def loss(point: float) -> float:
        scaled, most = logits / math.exp(point), largest / math.exp(point)
        each = most + np.log(np.exp(scaled - most[:, None]).sum(axis=1))
        return float(each.mean()) + weight * (point - prior) ** 2

    while high - low > 1e-11:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return math.exp((low + high) / 2)


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Return the probabilities of the classes, N x classes."""
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
    powers = np.exp(scaled)
    probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def expected_calibration_error(logits: Array, labels: Array, temperature: float) -> float:
    """Return the mean gap between confidence and accuracy over ten bins of confidence.

    Args:
        logits: N x classes.
        labels: The correct class of each row.
        temperature: Divides the logits.
    """
    probabilities = softmax(logits, temperature)
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, correct - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(labels))


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

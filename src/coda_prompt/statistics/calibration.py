"""Calibrated probabilities: temperature scaling.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017 (https://arxiv.org/abs/1706.04599).

The temperature of a closed-form classifier follows from its statistics (`expected_temperature`), so
that merging models is teaching in turn. Where classes have more than a few images, it is corrected
by likelihoods that add up too: of each image of a lesson as if it had never been learned, at
temperatures around the expected one. They are of one lesson alone, so how images were split into
lessons changes the temperature a little. That of other methods is fitted on the held-out images of
each lesson.
docs/lab/calibration.md has measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coda_prompt.seeding import keyed_generator
from coda_prompt.statistics.algebra import Array, unit

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
BINS = 10
PRIOR_IMAGES = 10
"""Number of images that weigh as much as the default temperature."""
SAMPLES = 2048
"""Images sampled by `expected_temperature`."""
TAIL = 3
"""Degrees of freedom of Student's t distribution, of which images deviate from their class."""
TYPICAL_CLASSES, CLASSES_EXPONENT = 100, 0.3
"""With more classes than these, more of them resemble each other than samples tell."""
ONE_IMAGE = 0.3
"""By how much the means of single images deviate more than samples tell."""
STEPS = np.linspace(-1.5, 1.5, 31)
"""Logarithms of temperatures, less that of the expected one, at which likelihoods are stored."""
FEW_IMAGES = 5
"""An image that is left out makes a class of so many images too different."""
MAX_LEFT_OUT = 1000
"""Images of a lesson that are left out in turn."""

VARIANCE_SHARE, SINGLE_IMAGE = 0.03, 0.018
"""Temperature of class means of many images, as a share of the variance of images, and how much is
added if they are single images."""
RESEMBLANCE, MAX_MEANS_TEMPERATURE = 55, 0.25
"""At least so much times the cube of `resemblance`, which is large for drawings, up to a limit."""


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Products z = x P m of features x with class means m, where P^-1 = own S + ridge I.

    S is the covariance within classes.
    """

    means: Array
    """Classes x D."""
    weight: Array
    """The means times P, classes x D."""
    counts: Array
    """Images of each class; there is at least one."""
    freedom: int
    """Degrees of freedom of S."""
    own: float
    ridge: float
    trace: float
    """Of P."""
    whiten: Callable[[Array], Array]
    """Transforms features, so that their products are x P x."""
    scores: Callable[[Array, Array], Array]
    """Computes the scores of the classifier from products and from m P m, N x classes."""
    prior_images: int = PRIOR_IMAGES
    """Number of images that weigh as much as the temperature of single images."""

    def sample(self) -> tuple[Array, Array]:
        """Sample the scores of new images, and their classes.

        Three things make new images harder to classify than those that were learned:

        - P was fitted to the deviations of the learned images from their class. The share of an
          image in its own Mahalanobis distance follows from the trace of P; without it, products
          are larger, as in leave-one-out cross-validation.
        - A class mean is known from few images, and the classifier was fitted to it. The expected
          mean is closer to that of all classes (empirical Bayes): of the variance of the means in a
          direction, the part that sampling explains is removed.
        - Real images are more often far from their class, as in Student's t distribution.
        """
        count, width = self.means.shape
        generator = keyed_generator(0, "samples for the temperature")
        # Sorted by a projection of their means: the order of learning must not decide on samples.
        order = np.argsort(self.means @ generator.standard_normal(width))
        means, weight, counts = self.means[order], self.weight[order], self.counts[order]
        products = weight @ means.T
        distance = (width - self.ridge * self.trace) / self.own  # tr(P S)
        fitted = min(0.99, self.own * distance / self.freedom)
        within = (products - self.ridge * weight @ weight.T) / self.own  # M P S P M^T
        values, vectors = np.linalg.eigh((within + within.T) / 2)
        spread = np.sqrt(np.maximum(values, 0)) / (1 - fitted)
        factor = (vectors * spread) @ vectors.T  # unlike a triangle, it has no order of classes

        centred = products - products.mean(axis=0)
        centred -= centred.mean(axis=1, keepdims=True)
        values, vectors = np.linalg.eigh((centred + centred.T) / 2)
        noise = (1 / counts).mean() * distance / (1 - fitted)
        noise *= (count - 1) / min(count - 1, width)
        kept = np.maximum(values - noise, 0) / np.maximum(values, max(values[-1], 1e-300) * 1e-9)
        shrinking = (vectors * kept) @ vectors.T
        shrinking -= shrinking.mean(axis=1, keepdims=True)
        expected = shrinking @ products + products.mean(axis=0)

        labels = np.arange(SAMPLES) * count // SAMPLES
        scale = np.sqrt(generator.gamma(TAIL / 2, 2 / TAIL, (SAMPLES, 1)))
        deviations = generator.standard_normal((SAMPLES, count)) @ factor.T / scale
        sampled = (expected[labels] + deviations)[:, np.argsort(order)]
        return self.scores(sampled, (self.weight * self.means).sum(axis=1)), order[labels]

    def left_out(self, features: Array, labels: Array) -> Array:
        """Compute the scores of learned images as if each had never been learned, N x classes.

        Without an image, P^-1 loses u u^T: P becomes P + P u u^T P / (1 - u P u) (Sherman and
        Morrison), and the mean of its class changes.
        """
        white, means = self.whiten(features), self.whiten(self.means)
        deviations, images = white - means[labels], self.counts[labels]
        share = self.own / self.freedom * images / (images - 1)
        removed = deviations * np.sqrt(share)[:, None]  # u
        factors = 1 / (1 - np.minimum(0.99, np.square(removed).sum(axis=1)))
        along = removed @ means.T
        across = factors * (white * removed).sum(axis=1)
        products = white @ means.T + across[:, None] * along
        squares = np.square(means).sum(axis=1) + factors[:, None] * np.square(along)
        # The mean of its own class is m - d / (n - 1).
        rows, lengths = np.arange(len(labels)), np.square(deviations).sum(axis=1)
        own = np.sqrt(share) * lengths  # u d
        change = (white * deviations).sum(axis=1) + across * own
        products[rows, labels] -= change / (images - 1)
        change = (means[labels] * deviations).sum(axis=1) + factors * along[rows, labels] * own
        change = (lengths + factors * own**2) / (images - 1) - 2 * change
        squares[rows, labels] += change / (images - 1)
        return self.scores(products, squares)

    def likelihoods(
        self,
        features: Array,
        labels: Array,
        temperature: float,
        mapping: Callable[[Array], Array],
    ) -> Array:
        """Return the negative log-likelihood of learned images of each class, classes x `STEPS`.

        Args:
            features: One row for each image of a lesson.
            labels: Their classes.
            temperature: The expected one.
            mapping: Applied to the features of those that are left out in turn.
        """
        result = np.zeros((len(self.counts), len(STEPS)))
        usable = np.flatnonzero(self.counts[labels] > FEW_IMAGES)
        if len(self.counts) < 2 or not len(usable):
            return result
        count = min(len(usable), MAX_LEFT_OUT)
        chosen = usable[np.arange(count) * len(usable) // count]
        labels = labels[chosen]
        scores = self.left_out(mapping(features[chosen]).astype(np.float64), labels)
        weights = (1 - FEW_IMAGES / self.counts[labels]) * len(usable) / count
        for step, change in enumerate(STEPS):
            losses = negative_likelihoods(scores, labels, temperature * math.exp(change))
            result[:, step] = np.bincount(labels, losses * weights, minlength=len(result))
        return result


def expected_temperature(discriminant: Discriminant, default: float) -> float:
    """Return the temperature that fits new images of classes with these statistics.

    Args:
        discriminant: What the classifier computes of features.
        default: The temperature with one image of each class.
    """
    classes, freedom = len(discriminant.counts), discriminant.freedom
    if classes < 2 or not freedom or discriminant.own <= 0:
        return default
    temperature = fit_temperature(*discriminant.sample(), default)
    temperature *= (classes / TYPICAL_CLASSES) ** CLASSES_EXPONENT
    temperature *= 1 + ONE_IMAGE * float((1 / discriminant.counts).mean())
    weight = freedom / (freedom + discriminant.prior_images)
    temperature = temperature**weight * default ** (1 - weight)
    return min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def corrected_temperature(expected: float, likelihoods: Array) -> float:
    """Return the temperature near an expected one that fits left-out images best.

    Args:
        expected: The expected temperature.
        likelihoods: The sum of what `Discriminant.likelihoods` returned for lessons.
    """
    losses = likelihoods.sum(axis=0) + PRIOR_IMAGES * STEPS**2
    return expected * math.exp(float(STEPS[losses.argmin()]))


def means_temperature(means: Array, counts: Array) -> float:
    """Return the temperature of products of features of unit length with class means.

    Nothing is known of the covariance within classes. Fitted to photographs and drawings.

    Args:
        means: Of the features of each class, classes x D.
        counts: Images of each class; there is at least one.
    """
    pairs = len(means) * (len(means) - 1)
    products = np.square(means.sum(axis=0)).sum() - np.square(means).sum()
    variance = max(0.1, 1 - float(products) / max(1, pairs))
    typical = VARIANCE_SHARE * variance + SINGLE_IMAGE * float((1 / counts).mean())
    least = RESEMBLANCE * resemblance(means) ** 3
    return max(typical, min(least, MAX_MEANS_TEMPERATURE))


def resemblance(means: Array) -> float:
    """Return how far the cosines of pairs of classes are from their mean, about 1 / sqrt(D)."""
    rows = unit(means)
    products = (rows - rows.mean(axis=0)) @ (rows - rows.mean(axis=0)).T
    others = np.square(products).sum() - np.square(products.diagonal()).sum()
    return math.sqrt(float(others) / max(1, len(means) * (len(means) - 1)))


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
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    ratio = (math.sqrt(5) - 1) / 2

    def loss(point: float) -> float:
        likelihood = negative_likelihoods(logits, labels, math.exp(point)).mean()
        return float(likelihood) + weight * (point - prior) ** 2

    while high - low > 1e-6:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return math.exp((low + high) / 2)


def negative_likelihoods(logits: Array, labels: Array, temperature: float) -> Array:
    """Return the negative log-likelihood of each image."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    right = np.take_along_axis(scaled, labels[:, None], axis=1)[:, 0]
    losses: Array = np.log(np.exp(scaled).sum(axis=1)) - right
    return losses


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

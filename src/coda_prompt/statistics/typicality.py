"""How typical an image is of learned classes: the score of unknown images and its calibration.

The relative Mahalanobis distance (Ren et al. 2021, https://arxiv.org/abs/2106.09022): from the
nearest classes, less that from all images. docs/lab/unknown.md compares it with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import BadOption
from coda_prompt.seeding import keyed_generator
from coda_prompt.statistics.algebra import Array, inverse_factor, inverse_triangle
from coda_prompt.statistics.moments import (
    MIN_VARIANCE,
    Moments,
    oracle_shrinkage,
    shrink_covariance,
)

FAR = 6.0
"""From here on, in standard deviations, the Mahalanobis distance itself counts: it recognises
images that resemble nothing (noise, another kind of image), and says little about others."""
PRIOR_IMAGES = 2400
"""Number of images that the prior counts as in means and covariances."""
PRIOR_CLASSES = 5
"""Number of classes that the prior counts as in `DEPTH_EXPONENT`."""
DEPTH_EXPONENT = 0.25
"""The more classes are known, the closer is an unusual image of a known class to one of them: low
scores shrink with this power of the number of classes, for drawings and photographs alike."""
DEPTH_CLASSES = 400
"""Scores of a model of so many classes are not scaled."""
BINS = 256
SAMPLES = 512
"""Features sampled from the class Gaussians to standardise scores."""
MIN_SPREAD = 1e-12


@dataclass(frozen=True, eq=False)
class Prior:
    """Statistics of the images an encoder was trained on: what images of any class look like."""

    covariance: NDArray[np.float64]
    """Within classes."""
    class_means: NDArray[np.float64]
    """All classes have the same number of images."""

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.covariance)

    @cached_property
    def total(self) -> Array:
        """Covariance of all images."""
        total: Array = self.covariance + np.cov(self.class_means.T)
        return total

    @cached_property
    def mean(self) -> Array:
        """Mean of all images."""
        mean: Array = self.class_means.mean(axis=0)
        return mean


@dataclass(frozen=True, eq=False)
class Spread:
    """A covariance of images, shrunk or mixed with that of a prior."""

    factor: Array
    """Its Cholesky factor."""
    whitening: Array
    """The inverse of `factor`."""
    share: float
    """Weight of the scatter of the images in the covariance."""
    trace: float
    """Of the scatter."""
    freedom: int
    """Degrees of freedom; with a prior, those within classes."""
    has_prior: bool

    @classmethod
    def of(
        cls, covariance: Array, divisor: int, freedom: int, prior: Array | None = None
    ) -> Spread:
        """Shrink a covariance, or mix it with that of a prior.

        Args:
            covariance: Of the images, D x D; zero if there are too few.
            divisor: By which their scatter was divided.
            freedom: Degrees of freedom; with a prior, those within classes.
            prior: Covariance of so many images that nothing needs to be shrunk.
        """
        if prior is None:
            shrinkage = oracle_shrinkage(covariance, freedom)
            own, mixed = 1 - shrinkage, shrink_covariance(covariance, freedom, shrinkage)
        else:
            own = freedom / (freedom + PRIOR_IMAGES)
            mixed = own * covariance + (1 - own) * prior
        factor, divisor = np.linalg.cholesky(mixed), max(1, divisor)
        whitening, trace = inverse_triangle(factor), float(np.trace(covariance))
        return cls(factor, whitening, own / divisor, trace * divisor, freedom, prior is not None)

    def white(self, features: Array) -> Array:
        """Transform centred features: then their squared length is the Mahalanobis distance."""
        return features @ self.whitening.T.astype(features.dtype, copy=False)

    def without(self, removed: Array, squares: float, freedom: int) -> Callable[[Array], Array]:
        """Return what transforms the results of `white` as if images had never been learned.

        The multiple of the identity in a shrunk covariance stays as it is.

        Args:
            removed: Rows r from `white`: the scatter becomes less by the sum of r^T r.
            squares: The sum of their squared lengths before `white`.
            freedom: Degrees of freedom without these images.

        Raises:
            LinAlgError: The images were never part of the covariance.
        """
        # (I - r^T r)^-1 = I + r^T (I - r r^T)^-1 r
        rows = removed * removed.dtype.type(math.sqrt(self.share))
        inner = np.eye(len(rows), dtype=rows.dtype) - rows @ rows.T
        bend = rows.T @ inverse_factor(inner).T
        if self.has_prior:
            scale = (freedom + PRIOR_IMAGES) / (self.freedom + PRIOR_IMAGES)
        else:  # scaled to the trace per degree of freedom, or to the identity if nothing is left
            left, width = self.trace - squares, len(self.factor)
            trace = left / freedom if freedom > 0 and left > MIN_VARIANCE * self.trace else width
            scale = (float(np.vdot(self.factor, self.factor)) - self.share * squares) / trace
        length = rows.dtype.type(math.sqrt(scale))
        return lambda white: length * np.concatenate([white, white @ bend], axis=1)


def compared(white: Array, class_means: Array, background: Array) -> Array:
    """Return the relative and the plain Mahalanobis distance, negated, n x 2.

    Args:
        white: Images, transformed by the covariance within classes.
        class_means: The class means, transformed likewise.
        background: Images, transformed by the covariance of all images.
    """
    distances = (
        np.square(white).sum(axis=1, keepdims=True)
        - 2 * white @ class_means.T
        + np.square(class_means).sum(axis=1)
    )
    nearest = distances.min(axis=1)
    relative = np.log(np.exp((nearest[:, None] - distances) / 2).sum(axis=1)) - nearest / 2
    relative += np.square(background).sum(axis=1) / 2
    return np.stack([relative, -nearest], axis=1)


@dataclass(frozen=True, eq=False)
class Gaussians:
    """Classes as Gaussians with one shared covariance, and all images as one Gaussian."""

    means: Array
    """Of the classes that have images."""
    mean: Array
    """Of all images."""
    spread: Spread
    """Within classes."""
    background: Spread | None
    """Of all images; None if they are those of one class."""

    @classmethod
    def of(cls, moments: Moments, prior: Prior | None = None) -> Gaussians:
        """Compute the Gaussians.

        Args:
            moments: Statistics of the features.
            prior: Counts as `PRIOR_IMAGES` more images in the covariances and the mean.

        Raises:
            LinAlgError: The moments contradict each other.
        """
        seen, count = moments.counts > 0, int(moments.counts.sum())
        covariance, freedom = moments.covariance()
        total, total_freedom = moments.total_covariance()
        means = moments.means()[seen]
        mean = mixed_mean(moments.sums.sum(axis=0) / max(1, count), freedom, prior)
        spread = Spread.of(
            covariance, freedom, freedom, None if prior is None else prior.covariance
        )
        background = None
        if prior is not None:
            background = Spread.of(total, total_freedom, freedom, prior.total)
        elif len(means) > 1:
            background = Spread.of(total, total_freedom, total_freedom, None)
        return cls(means, mean, spread, background)

    def sample_classes(self) -> Array:
        """Sample features from the classes, the same number from each."""
        rows = np.arange(SAMPLES) * len(self.means) // SAMPLES
        generator = keyed_generator(0, "samples of known classes")
        noise = generator.standard_normal((SAMPLES, len(self.mean)))
        return self.means[rows] + noise @ self.spread.factor.T

    @cached_property
    def white_means(self) -> Array:
        return self.spread.white(self.means - self.mean)

    def distances(self, features: Array) -> Array:
        """Compute the relative and the plain Mahalanobis distance, negated, n x 2."""
        centred = features - self.mean
        background = centred[:, :0] if self.background is None else self.background.white(centred)
        return compared(self.spread.white(centred), self.white_means, background)


def mixed_mean(mean: Array, freedom: int, prior: Prior | None) -> Array:
    """Mix the mean of all images with that of a prior."""
    if prior is None:
        return mean
    own = freedom / (freedom + PRIOR_IMAGES)
    mixed: Array = own * mean + (1 - own) * prior.mean
    return mixed


@dataclass(frozen=True, eq=False)
class Scale:
    """Standardises distances: the mean and the standard deviation of samples of known classes."""

    values: NDArray[np.float64]
    """Means and standard deviations of the relative and of the plain distance, 2 x 2."""
    classes: int
    """Known classes, with those of a prior."""

    @classmethod
    def of(cls, gaussians: Gaussians) -> NDArray[np.float64]:
        """Sample known classes."""
        sampled = gaussians.distances(gaussians.sample_classes())
        return np.stack([sampled.mean(axis=0), np.maximum(sampled.std(axis=0, ddof=1), MIN_SPREAD)])

    def standardised(self, distances: Array) -> Array:
        """Return the scores: the relative distance, and the distance of images beyond `FAR`.

        0 is the mean of samples of known classes. The scale depends on the number of classes, so
        that a score means the same in an earlier and in a later lesson.
        """
        relative, distance = ((distances - self.values[0]) / self.values[1]).T
        scores: Array = (relative + np.minimum(distance + FAR, 0)) / self.depth
        return scores

    @property
    def depth(self) -> float:
        """By which low scores of so many classes are too low."""
        return (DEPTH_CLASSES / self.classes) ** DEPTH_EXPONENT


@dataclass(frozen=True, eq=False)
class UnknownScorer:
    """Computes how typical images are of the learned classes, from their features."""

    gaussians: Gaussians
    scale: Scale
    histogram: NDArray[np.int64]
    """Of the scores of images of known classes."""

    def scores(self, tokens: Array) -> Array:
        """Return the standardised scores of images."""
        features = tokens[:, : len(self.gaussians.mean)].astype(np.float64)
        return self.scale.standardised(self.gaussians.distances(features))

    def typicality(self, tokens: Array) -> Array:
        """Return the share of images of known classes whose score is below that of each image.

        As in conformal prediction, the scores of n images divide all scores into n + 1 intervals,
        and a new image of a known class is equally likely in each of them. Within an interval the
        share is interpolated, so that it is below a rate r with a probability of r, however few
        images there are.
        """
        position = _squashed(self.scores(tokens))[:, None] * BINS - np.arange(BINS)
        shares: Array = np.clip(position, 0, 1) @ self.shares
        return shares

    @cached_property
    def shares(self) -> Array:
        """Each count of the histogram, and one at its end, spread over the empty bins before it."""
        counts = self.histogram.astype(np.float64)
        counts[-1] += 1
        filled = np.flatnonzero(counts)
        widths = np.diff(filled, prepend=-1)
        spread: Array = np.zeros(BINS)
        spread[: filled[-1] + 1] = np.repeat(counts[filled] / widths, widths)
        return spread / counts.sum()

    def can_reject(self, rate: float) -> bool:
        """Whether there are enough images to reject a share of `rate`."""
        return not self.missing_images(rate)

    def missing_images(self, rate: float) -> int:
        """Return how many more images must be learned to reject a share of `rate`."""
        return max(0, images_needed(rate) - int(self.histogram.sum()))

    def check_rate(self, rate: float) -> None:
        """Check that images can be rejected at a rate.

        Raises:
            BadOption: Too few images were learned for it.
        """
        if not self.can_reject(rate):
            raise BadOption(
                "the model",
                "unknown",
                f"a rate of {rate:g} can be fitted on {images_needed(rate)} images or more, and "
                f"the classes of this model have {int(self.histogram.sum())} that are not alone in "
                "their class; learn more images, raise --unknown-rate, or use --unknown-below",
            )


def images_needed(rate: float) -> int:
    """Return the minimum number of images to fit a rate of rejections."""
    return math.ceil(1 / rate) - 1


def _squashed(scores: Array) -> Array:
    """Map standardised scores to 0 ... 1, finest around 0."""
    squashed: Array = (1 + scores / (1 + np.abs(scores))) / 2
    return squashed


def histogram_bins(scores: Array) -> NDArray[np.int64]:
    """Return the bin of the histogram of each score."""
    return np.clip((_squashed(scores) * BINS).astype(np.int64), 0, BINS - 1)

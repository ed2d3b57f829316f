"""RanPAC's classifier: ridge regression on random features, solved from running sums.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251: h = ReLU(f W), G += h^T h,
C += h^T onehot(y), scores = h (G + lambda I)^-1 C. The sums do not depend on the order of classes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.linalg import LinAlgError
from numpy.typing import NDArray

from coda_prompt.statistics.algebra import Array, inverse_factor
from coda_prompt.statistics.calibration import Discriminant
from coda_prompt.statistics.features import FeatureMap
from coda_prompt.statistics.moments import CHUNK_SIZE, LessonSums, Moments, squared_sums

RELATIVE_RIDGE = 0.05
"""Share of an image's squared length in `ridge="relative"`; docs/lab/few-images.md measures it."""
MIN_RIDGE = 1e-6
"""Fraction of the trace below which float32 rounding of the Gram matrix outweighs the ridge."""
MAX_OWN_SCORE, MIN_SIGNAL = 0.999, 0.05
"""Bounds of the score of a class's own mean, and of the share of it that is not noise."""
PRIOR_IMAGES = 50
"""Number of images that weigh as much as the temperature of single images."""
MAX_IMAGE_SHARE = 0.5
"""Maximum share of a row of a lesson's Gram matrix that may come from one image."""


def solve_ridge(
    moments: Moments, ridge: float | Literal["relative"], *, balance: bool
) -> tuple[NDArray[np.float64], Discriminant | None]:
    """Solve the regression.

    Args:
        moments: Of the random features, projected.
        ridge: Ridge parameter. `relative`: in proportion to the mean squared length of an image's
            random features, which needs no choice.
        balance: Weight all classes equally, regardless of their number of images.

    Returns:
        The weights, classes x projected, and what the temperature of probabilities follows from;
        None if the regression is not balanced or has another ridge.

    Raises:
        LinAlgError: The moments contradict each other.
    """
    counts, means, gram = moments.counts, moments.means(), moments.scatter()
    images, trace = int(counts.sum()), moments.mean_squares(gram)
    if not images or not trace > 0:
        return np.zeros_like(means), None
    value = RELATIVE_RIDGE * trace / images if ridge == "relative" else ridge
    value = max(value, MIN_RIDGE * trace)
    targets, average = moments.sums, 1.0
    if balance:
        # As if all classes had the same number of images: each contributes its own mean, and the
        # scatter around the means is pooled. Divided by the average number of images.
        targets, average = means, float(counts[counts > 0].mean())
        value /= average
        gram /= average
        gram += means.T @ means
    else:
        gram += squared_sums(moments.sums, counts)
    gram.flat[:: len(gram) + 1] += value
    inverse = inverse_factor(gram)
    solved: NDArray[np.float64] = (targets @ inverse.T) @ inverse
    if not balance or ridge != "relative":
        return solved, None
    factors = _compensation(counts, targets, solved, value * float(np.vdot(inverse, inverse)))
    weight: NDArray[np.float64] = solved * factors[:, None]
    try:
        return weight, _discriminant(moments, inverse, solved, factors, value)
    except LinAlgError:  # where images were moved, class means may exceed blended second moments
        return weight, None


def _discriminant(
    moments: Moments, inverse: Array, solved: Array, factors: Array, ridge: float
) -> Discriminant:
    """Return what the temperature of the probabilities of a balanced regression follows from.

    With P = (S + r I)^-1, where S is the scatter divided by the average number of images, the
    weights A^-1 m are (I - Q) P m with Q = means A^-1 means^T (Woodbury).

    Args:
        moments: Of the random features.
        inverse: The inverse of the Cholesky factor of A.
        solved: The means times A^-1, classes x projected.
        factors: Multiply the scores of each class.
        ridge: r.
    """
    rows = np.flatnonzero(moments.counts)
    counts, means, solved = moments.counts[rows], moments.means()[rows], solved[rows]
    remaining = np.eye(len(rows)) - solved @ means.T
    weight = np.linalg.solve(remaining, solved)
    beyond = inverse_factor((remaining + remaining.T) / 2)
    freedom = int((counts - 1).sum())
    return Discriminant(
        means,
        weight,
        counts,
        freedom,
        own=freedom / float(counts.mean()),
        ridge=ridge,
        trace=float(np.vdot(inverse, inverse) + np.vdot(weight, solved)),
        whiten=lambda each: np.concatenate([each @ inverse.T, each @ solved.T @ beyond.T], axis=1),
        scores=lambda products, _: products @ remaining.T * factors[rows],
        prior_images=PRIOR_IMAGES,
    )


def _compensation(counts: Array, means: Array, solved: Array, damping: float) -> Array:
    """Compute by how much a class with few images scores too low, one factor for each class.

    A mean of n images is m + e with covariance S / n of e. With q = m^T A^-1 m (A without the
    class) new images score q / (1 + q + tr(A^-1 S) / n) on average, because the regression
    also fits e; with many images it would be q / (1 + q).

    Args:
        counts: Images of each class.
        means: Of each class, classes x projected.
        solved: The means times A^-1.
        damping: r tr(A^-1). With A = S + means^T means + r I, tr(A^-1 S) follows from it.
    """
    average = float(counts[counts > 0].mean())
    freedom = float(np.maximum(counts - 1, 0).sum())
    own = (solved * means).sum(axis=1)
    spread = average * (means.shape[1] - float(own.sum()) - damping) / max(1.0, freedom)
    own = np.minimum(own, MAX_OWN_SCORE)
    fitted = own / (1 - own)
    noise = max(0.0, spread) / np.maximum(counts, 1)
    expected = np.maximum(fitted - noise, MIN_SIGNAL * fitted)
    factors: Array = (1 + fitted) / (1 + expected)
    return factors


class BlendedSums(LessonSums):
    """Sums of a lesson in which no single image can be recognised.

    If only one image activates a random feature, its row of the Gram matrix is that image's vector
    h, scaled, so the model file would contain an embedding of a single image. The class mean of a
    dominated feature enters the Gram matrix instead.
    """

    def __init__(self, width: int, classes: int, *, second: bool = True) -> None:
        super().__init__(width, classes, second=second)
        self.weight, self.largest = np.zeros(width), np.zeros(width)

    def add_copies(self, hidden: Array, labels: Array, copies: Array) -> None:
        """Add images.

        Args:
            hidden: Their random features.
            labels: The rows of their classes.
            copies: Images of the lesson with exactly the same features, which count as one.
        """
        self.add(hidden, labels)
        weight = np.abs(hidden) * np.linalg.norm(hidden, axis=1, keepdims=True)
        self.weight += weight.sum(axis=0, dtype=np.float64)
        self.largest = np.maximum(self.largest, (weight * copies[:, None]).max(axis=0, initial=0))

    def is_shared(self) -> NDArray[np.bool_]:
        """Return which random features no single image dominates."""
        shared: NDArray[np.bool_] = self.largest <= MAX_IMAGE_SHARE * self.weight
        return shared

    def blend(self) -> None:
        """Replace dominated features by their class means in the Gram matrix.

        If h_j is replaced by its class mean, the sum of h_j h_k over a class becomes the product
        of their sums, divided by the number of images: nothing but sums is needed.
        """
        assert self.squares is not None
        dominated = ~self.is_shared()
        if dominated.any():
            means = squared_sums(self.sums, self.counts)
            self.squares[dominated] = means[dominated]
            self.squares[:, dominated] = means[:, dominated]


def add_blended(moments: Moments, mapping: FeatureMap, features: Array, labels: Array) -> Moments:
    """Add images to the moments of their random features, blended as `BlendedSums` are.

    In moments whose classes can be removed, only images of one class hide each other.
    """
    width, classes = mapping.width, len(moments.counts)
    apart = moments.factors
    if apart is None:
        sums = _sums(mapping, features, labels, BlendedSums(width, classes))
        sums.blend()
        return moments.with_sums(sums)
    whole = LessonSums(width, classes, second=False)
    for row in np.unique(labels):
        images = features[labels == row]
        rows = np.full(len(images), row)
        sums = _sums(mapping, images, rows, BlendedSums(width, classes, second=False))
        whole.counts += sums.counts
        whole.sums += sums.sums
        mean, is_shared = sums.sums[row] / len(images), sums.is_shared()
        for start in range(0, len(images), CHUNK_SIZE):
            hidden = mapping(images[start : start + CHUNK_SIZE])
            blended = np.where(is_shared, hidden, mean)
            apart = apart.added(blended, rows[start : start + CHUNK_SIZE])
    return Moments(moments.counts, moments.sums, None, apart).with_sums(whole)


def _sums(mapping: FeatureMap, features: Array, labels: Array, sums: BlendedSums) -> BlendedSums:
    """Add images chunk by chunk."""
    rows = np.array([hash(row.tobytes()) for row in features], np.int64)
    _, inverse, counts = np.unique(rows, return_inverse=True, return_counts=True)
    for start in range(0, len(features), CHUNK_SIZE):
        chunk = slice(start, start + CHUNK_SIZE)
        sums.add_copies(mapping(features[chunk]), labels[chunk], counts[inverse[chunk]])
    return sums

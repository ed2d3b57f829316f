"""Unknown images: what is learned about the scores of images of known classes.

The score of an image needs only counts, sums and second moments of features.

A threshold fitted in one lesson must stay right when later lessons change the statistics, and
images of earlier lessons are gone by then. Scores are therefore standardised by the scores of
features sampled from the current class Gaussians, and scaled by the number of classes. What is
stored of a lesson is a histogram of the standardised scores of its images, computed by
cross-validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.linalg import LinAlgError
from numpy.typing import NDArray

from coda_prompt.errors import BadOption, CorruptFile
from coda_prompt.statistics.algebra import Array, Arrays, checked, grown_rows, other_rows
from coda_prompt.statistics.moments import Moments
from coda_prompt.statistics.typicality import (
    BINS,
    PRIOR_CLASSES,
    Gaussians,
    Prior,
    Scale,
    UnknownScorer,
    compared,
    histogram_bins,
    mixed_mean,
)

CONTRADICTION = "its statistics of unknown images contradict each other"
DEFAULT_RATE = 0.05
"""Share of images of known classes that `auto` rejects by mistake."""
FOLDS = 10
"""Of the images of a class. What their number changes is corrected (`_cross_validated`)."""
MAX_SCORED = 2000
"""Images of a lesson in the histogram; the first ones of each class."""
OWN = ("histogram", "scale")
"""Arrays of a detector besides its moments."""


@dataclass(frozen=True)
class UnknownRule:
    """When an image is unknown: if either condition holds."""

    below: float = 0.0
    """The probability of the most likely class is below this."""
    rate: float | None = None
    """The image is less typical of the learned classes than all but this share of their images;
    None: typicality is not used."""

    @classmethod
    def parse(
        cls, unknown: str | None = None, rate: float = DEFAULT_RATE, below: float = 0.0
    ) -> UnknownRule:
        """Make a rule of what a user asks for.

        Raises:
            BadOption: `unknown` is neither None nor `auto`, or a number is not between 0 and 1.
        """
        if unknown not in (None, "auto"):
            raise BadOption("the prediction", "unknown", f"'{unknown}' is not 'auto'")
        if not 0 < rate < 1:
            raise BadOption("the prediction", "unknown-rate", f"{rate} is not between 0 and 1")
        if not 0 <= below <= 1:
            raise BadOption("the prediction", "unknown-below", f"{below} is not between 0 and 1")
        return cls(below, None if unknown is None else rate)

    def rejects(self, probability: float, typicality: float | None) -> bool:
        """Whether an image with this probability of its most likely class is unknown."""
        if self.rate is not None and typicality is not None and typicality < self.rate:
            return True
        return probability < self.below


EVERYTHING_KNOWN = UnknownRule()
"""Rejects nothing."""


@dataclass(frozen=True, eq=False)
class UnknownDetector:
    """Running statistics that tell images of learned classes from others.

    All of it adds up: over lessons, and over models that learned with the same encoder.
    """

    moments: Moments
    histogram: NDArray[np.int32]
    """Of the standardised scores of the images of each class, classes x bins."""
    scale: NDArray[np.float64]
    """Standardises scores; follows from the moments."""
    prior: Prior | None

    @classmethod
    def empty(
        cls, width: int, removable: bool = False, prior: Prior | None = None
    ) -> UnknownDetector:
        """Return a detector that has learned nothing.

        Args:
            width: Number of features.
            removable: Store the second moments of each class, so that it can be removed exactly.
            prior: Statistics of the images the encoder was trained on.
        """
        moments = Moments.empty(width, removable)
        return cls(moments, np.zeros((0, BINS), np.int32), np.zeros((2, 2)), prior)

    @property
    def width(self) -> int:
        """Number of features."""
        return self.moments.sums.shape[1]

    @property
    def images(self) -> int:
        """Number of images the threshold is fitted on."""
        return int(self.histogram.sum())

    def scorer(self) -> UnknownScorer:
        """Return what computes the scores of images from the current statistics.

        Raises:
            CorruptFile: They contradict each other.
        """
        histogram = self.histogram.sum(axis=0, dtype=np.int64)
        return UnknownScorer(self._gaussians(self.moments), self._scale(), histogram)

    def _gaussians(self, moments: Moments) -> Gaussians:
        try:
            return Gaussians.of(moments, self.prior)
        except LinAlgError as error:
            raise CorruptFile("The model", CONTRADICTION) from error

    def _scale(self) -> Scale:
        classes = int((self.moments.counts > 0).sum())
        return Scale(self.scale, classes + (0 if self.prior is None else PRIOR_CLASSES))

    # -- learning and editing

    def learned(self, tokens: Array, labels: Array, classes: int) -> UnknownDetector:
        """Add the images of a lesson.

        Args:
            tokens: One row for each image, of which the first `width` features are used.
            labels: The row of the class of each image.
            classes: Number of classes after the lesson.
        """
        features = tokens[:, : self.width]
        moments = self.moments.grown(classes).added(features, labels)
        gaussians = self._gaussians(moments)
        detector = self._standardised(moments, grown_rows(self.histogram, classes), gaussians)
        rows, scores = detector._cross_validated(gaussians, features, labels)
        histogram = detector.histogram.copy()
        np.add.at(histogram, (rows, histogram_bins(scores)), 1)
        return replace(detector, histogram=histogram)

    def without_classes(self, rows: Sequence[int]) -> UnknownDetector:
        """Remove classes; later classes move up."""
        kept = other_rows(len(self.histogram), rows)
        return self._standardised(self.moments.without_classes(rows), self.histogram[kept])

    def united(self, rows: Sequence[int], into: int) -> UnknownDetector:
        """Add up the classes at `rows` in row `into`, one of them, and remove the others."""
        histogram = self.histogram.copy()
        histogram[into] = histogram[list(rows)].sum(axis=0)
        kept = other_rows(len(histogram), [row for row in rows if row != into])
        return self._standardised(self.moments.united(rows, into), histogram[kept])

    def joined(self, other: UnknownDetector, rows: Sequence[int]) -> UnknownDetector:
        """Add what another detector learned; `rows[k]` is the row here of its class k."""
        moments = self.moments.joined(other.moments, rows)
        histogram = grown_rows(self.histogram, len(moments.counts))
        np.add.at(histogram, list(rows), other.histogram)
        return self._standardised(moments, histogram)

    def moved(self, tokens: Array, source: int, labels: Array) -> UnknownDetector:
        """Move images to other classes; their scores stay with the class they were taught as."""
        moments = self.moments.moved(tokens[:, : self.width], source, labels)
        return self._standardised(moments, grown_rows(self.histogram, len(moments.counts)))

    def _standardised(
        self, moments: Moments, histogram: Array, gaussians: Gaussians | None = None
    ) -> UnknownDetector:
        """Return a detector with other moments, whose Gaussians may be known.

        Raises:
            CorruptFile: They contradict each other.
        """
        scale = np.zeros((2, 2))
        if moments.counts.any():
            scale = Scale.of(gaussians or self._gaussians(moments))
        if not np.isfinite(scale).all():
            raise CorruptFile("The model", CONTRADICTION)
        return replace(self, moments=moments, histogram=histogram, scale=scale)

    def _cross_validated(
        self, gaussians: Gaussians, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        """Return the scores that new images like those of a lesson would have, and their rows.

        An image is scored without the images of its fold. Such a score is too low: the statistics
        have fewer images than those that score new images. The image is therefore scored without
        two folds too, and its score is extrapolated to all images, linearly in 1 / images of its
        class, as the variance of a mean.
        """
        chosen, folds, used = _folds(labels)
        rows = labels[chosen]
        lesson = _Lesson(self, gaussians, features[chosen].astype(np.float64), rows)
        counts, classes = self.moments.counts, len(self.moments.counts)
        scored_rows, scored = [rows[:0]], [np.zeros(0)]
        for fold in range(used.max(initial=0)):
            one = folds == fold
            two = one | ((fold < used[rows]) & (folds == (fold + 1) % used[rows]))
            left = [counts - np.bincount(rows[each], minlength=classes) for each in (one, two)]
            # an image whose class has no other image says nothing about known images
            images = np.flatnonzero(one & (left[0][rows] > 0))
            if not len(images):
                continue
            own = rows[images]
            all_images, without_one, without_two = (each[own] for each in (counts, *left))
            scores = lesson.scores_without(one, images)
            change = (all_images - without_one) / np.maximum(without_one - without_two, 1)
            change = change * without_two / all_images
            if change.any():  # else a class has no image without two folds
                scores = scores + change * (scores - lesson.scores_without(two, images))
            scored_rows.append(own)
            scored.append(scores)
        return np.concatenate(scored_rows), np.concatenate(scored)

    # -- storage

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store."""
        return {**self.moments.arrays(), "histogram": self.histogram, "scale": self.scale}

    @classmethod
    def of_arrays(
        cls,
        width: int,
        arrays: Arrays,
        classes: int,
        removable: bool = False,
        prior: Prior | None = None,
    ) -> UnknownDetector:
        """Return the detector whose `arrays` were stored.

        Raises:
            ValueError: The arrays contradict each other or the other arguments.
        """
        histogram = checked(arrays, "histogram", (classes, BINS), np.int32)
        scale = checked(arrays, "scale", (2, 2), np.float64)
        sums = {name: array for name, array in arrays.items() if name not in OWN}
        moments = Moments.of_arrays(sums, width, removable)
        learned = bool(moments.counts.any())
        if not moments.is_consistent(classes) or learned != bool(classes):
            raise ValueError(f"the arrays do not have {classes} classes")
        if learned and not (scale[1] > 0).all():
            raise ValueError("'scale' has values that are not positive")
        return cls(moments, histogram, scale, prior)


class _Lesson:
    """Scores images of a lesson as if some of them had never been learned.

    Args:
        detector: Has learned the lesson.
        gaussians: Of the detector.
        features: Of some images of the lesson, in float64.
        labels: The rows of their classes.
    """

    def __init__(
        self, detector: UnknownDetector, gaussians: Gaussians, features: Array, labels: Array
    ) -> None:
        self.labels, self.moments, self.prior = labels, detector.moments, detector.prior
        self.scale, self.gaussians = detector._scale(), gaussians
        means, total = self.moments.means(), self.moments.sums.sum(axis=0)
        self.mean = total / max(1, self.moments.counts.sum())
        """Of the images, without those of a prior."""
        self.deviations = (features - means[labels]).astype(np.float32)
        self.centred = (features - self.mean).astype(np.float32)
        self.white = gaussians.spread.white(self.deviations)
        self.white_means = gaussians.spread.white((means - self.mean).astype(np.float32))
        if gaussians.background is not None:
            self.background = gaussians.background.white(self.centred)

    def scores_without(self, left_out: Array, images: Array) -> Array:
        """Return the scores of images without those that are left out.

        Args:
            left_out: Whether each image is.
            images: Positions of the images to score.
        """
        gaussians, counts, rows = self.gaussians, self.moments.counts, self.labels[left_out]
        background = gaussians.background
        removed = np.bincount(rows, minlength=len(counts))
        left = counts - removed
        kept = left > 0
        freedom = int(np.maximum(left - 1, 0).sum())
        classes = np.flatnonzero(removed)
        members = (classes[:, None] == rows).astype(np.float32)
        lost = np.sqrt(np.maximum(left[classes], 1), dtype=np.float32)[:, None]
        # Removing images whose deviations from the mean are d takes the sum of d d^T from the
        # scatter, and (sum of d) (sum of d)^T / n for the n images that remain, whose mean changes.
        deviations, white = self.deviations[left_out], self.white[left_out]
        sums, white_sums = members @ deviations, members @ white
        squares = np.square(deviations).sum() + np.square(sums / lost).sum()
        without = gaussians.spread.without(
            np.concatenate([white, white_sums / lost]), squares, freedom
        )
        means = self.white_means.copy()
        means[classes] -= white_sums / np.square(lost)
        within = self.white[images] + self.white_means[self.labels[images]]
        beyond = within[:, :0]
        if background is not None and (self.prior is not None or kept.sum() > 1):
            centred, white, count = self.centred[left_out], self.background[left_out], left.sum()
            total, lost = centred.sum(axis=0), np.sqrt(count, dtype=np.float32)
            squares = np.square(centred).sum() + np.square(total / lost).sum()
            outside = background.without(
                np.concatenate([white, white.sum(axis=0, keepdims=True) / lost]),
                squares,
                freedom if self.prior is not None else int(count) - 1,
            )
            change = mixed_mean(self.mean - total / count, freedom, self.prior) - self.mean
            shift = background.white(change[None].astype(np.float32))
            beyond = outside(self.background[images] - shift)
        return self.scale.standardised(compared(without(within), without(means[kept]), beyond))


def _folds(labels: Array) -> tuple[Array, Array, Array]:
    """Spread the images of each class evenly over folds.

    Returns:
        The images that are scored, the fold of each, and the number of folds of each class, which
        may be 0.
    """
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], labels[order])
    positions = np.empty(len(labels), np.int64)
    positions[order] = np.arange(len(labels)) - starts
    """The number of each image within its class."""
    chosen = np.sort(np.argsort(positions, kind="stable")[:MAX_SCORED])
    used = np.minimum(np.bincount(labels[chosen], minlength=labels.max(initial=-1) + 1), FOLDS)
    return chosen, positions[chosen] % FOLDS, used

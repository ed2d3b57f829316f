"""Classifiers in closed form: class means, with one covariance of all classes or a regression.

`ranpac`, `slda` and `ncm` are one classifier with two choices, the map of the features and the
covariance:

- ranpac: ridge regression on random features (McDonnell et al., NeurIPS 2023,
  https://arxiv.org/abs/2307.02251).
- slda: Gaussian classes with one shared covariance (Hayes and Kanan, CVPR Workshops 2020,
  https://arxiv.org/abs/1909.01520). The published form has `features="plain", shrinkage=1e-4`.
- ncm: the nearest class mean by cosine similarity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.linalg import LinAlgError
from numpy.typing import NDArray

from coda_prompt.errors import CannotEdit, CorruptFile
from coda_prompt.statistics.algebra import (
    Array,
    Arrays,
    checked,
    grown_rows,
    inverse_factor,
    other_rows,
    unit,
)
from coda_prompt.statistics.calibration import (
    MAX_MEANS_TEMPERATURE,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    STEPS,
    Discriminant,
    corrected_temperature,
    expected_temperature,
    means_temperature,
    resemblance,
)
from coda_prompt.statistics.features import FeatureMap
from coda_prompt.statistics.moments import Moments, oracle_shrinkage, shrink_covariance
from coda_prompt.statistics.ridge import add_blended, solve_ridge

OWN = ("weight", "bias", "likelihoods", "temperature")
"""Arrays of a classifier besides its moments."""


@dataclass(frozen=True)
class ClassifierOptions:
    """Options of a classifier in closed form."""

    features: Literal["plain", "unit", "random"]
    """Features as they are, scaled to unit length, or random features of them."""
    covariance: Literal["none", "shared", "ridge"]
    """Cosine similarity to class means; one covariance of all classes; or a ridge regression."""
    width: int = 2048
    """Number of random features."""
    seed: int = 0
    """Of the random features."""
    removable: bool = False
    """Store the second moments of each class apart, so that it can be forgotten."""
    shrinkage: float | None = None
    """Share of a multiple of the identity in the shared covariance. Default: the square root of the
    oracle approximating shrinkage, which falls with the number of images."""
    ridge: float | Literal["relative"] = "relative"
    """Ridge parameter. `relative`: in proportion to the mean squared length of an image's random
    features, which needs no choice."""
    blend: bool = True
    """Use class means in the Gram matrix of a ridge regression where one image dominates a random
    feature, so that it contains no single image's features. With `removable`: within each class."""
    balance: bool = True
    """Weight all classes equally in a ridge regression, regardless of their number of images."""


OPTIONS: Mapping[str, ClassifierOptions] = MappingProxyType(
    {
        "ranpac": ClassifierOptions("random", "ridge"),
        "slda": ClassifierOptions("unit", "shared"),
        "ncm": ClassifierOptions("plain", "none"),
    }
)
RIDGE_TEMPERATURE, RIDGE_RESEMBLANCE = 0.05, 170
"""Temperature of a ridge regression on single images: at least this; times `resemblance` cubed."""
ABSENT = MappingProxyType({"none": -1.0, "shared": -np.inf, "ridge": 0.0})
"""By covariance: the score of a class without images."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """A classifier of features, solved from their moments.

    Example:
        >>> classifier = Classifier.empty(OPTIONS["slda"], 384)
        >>> classifier = classifier.learned(features, labels, classes=10)
        >>> classifier.scores(features).argmax(axis=1)
    """

    options: ClassifierOptions
    mapping: FeatureMap
    moments: Moments
    """Of the mapped features."""
    weight: NDArray[np.float32]
    """Classes x mapped features: scores are products with it."""
    bias: NDArray[np.float64]
    """Added to the scores of each class."""
    likelihoods: NDArray[np.float32]
    """Of images left out in their lesson, classes x temperatures; see `corrected_temperature`."""
    temperature: float
    """Divides the scores before they become probabilities."""

    @classmethod
    def empty(
        cls, options: ClassifierOptions, feature_width: int, projection: Array | None = None
    ) -> Classifier:
        """Return a classifier without classes.

        Args:
            options: What kind of classifier.
            feature_width: Length of the features of an image.
            projection: Of the random features, if it is not to be drawn from the seed.
        """
        width = options.width if options.features == "random" else feature_width
        mapping = FeatureMap(options.features, feature_width, width, options.seed, projection)
        second = options.covariance != "none"
        moments = Moments.empty(width, options.removable, second)
        weight, likelihoods = np.zeros((0, width), np.float32), _no_likelihoods(0)
        return cls(options, mapping, moments, weight, np.zeros(0), likelihoods, 1.0)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.bias)

    # -- prediction

    def scores(self, features: Array) -> NDArray[np.float64]:
        """Compute the scores of images, n x classes."""
        mapped = self.mapping(features)
        if self.options.covariance == "none":
            mapped = unit(mapped)
        scores = (mapped @ self.weight.T).astype(np.float64) + self.bias
        scores[:, self.moments.counts == 0] = ABSENT[self.options.covariance]
        return scores

    def distances(self, features: Array) -> NDArray[np.float64]:
        """Compute 1 - the cosine similarity of mapped features to class means, n x classes."""
        mapped = unit(self.mapping(features).astype(np.float64))
        distances: NDArray[np.float64] = 1 - mapped @ unit(self.moments.means()).T
        return distances

    # -- learning and editing

    def learned(self, features: Array, labels: Array, classes: int) -> Classifier:
        """Add the images of a lesson.

        Args:
            features: One row for each image.
            labels: The row of the class of each image.
            classes: Number of classes after the lesson.
        """
        options = self.options
        lesson = Moments.empty(self.mapping.width, options.removable, options.covariance != "none")
        lesson = lesson.grown(classes)
        if options.covariance == "ridge" and options.blend:
            lesson = add_blended(lesson, self.mapping, features, labels)
        else:
            lesson = lesson.added(features, labels, self.mapping)
        likelihoods = grown_rows(self.likelihoods, classes)
        likelihoods += self._left_out(lesson, features, labels)
        return self._solved(self.moments.joined(lesson, range(classes)), likelihoods)

    def without_classes(self, rows: Sequence[int]) -> Classifier:
        """Remove classes; later classes move up. Shared sums lose what can be told apart."""
        kept = other_rows(self.classes, rows)
        return self._solved(self.moments.without_classes(rows), self.likelihoods[kept])

    def united(self, rows: Sequence[int], into: int) -> Classifier:
        """Add up the classes at `rows` in row `into`, one of them, and remove the others."""
        likelihoods = self.likelihoods.copy()
        likelihoods[into] = likelihoods[list(rows)].sum(axis=0)
        kept = other_rows(self.classes, [row for row in rows if row != into])
        return self._solved(self.moments.united(rows, into), likelihoods[kept])

    def joined(self, other: Classifier, rows: Sequence[int]) -> Classifier:
        """Add what another classifier has learned; `rows[k]` is the row here of its class k.

        Raises:
            CannotEdit: It has other options, or other random features.
        """
        if replace(other.options, seed=self.options.seed) != self.options:
            raise CannotEdit("the models were made with different methods or options")
        if self.options.features == "random" and other.options.seed != self.options.seed:
            raise CannotEdit("the models have different random features; use one seed for both")
        moments = self.moments.joined(other.moments, rows)
        likelihoods = grown_rows(self.likelihoods, len(moments.counts))
        np.add.at(likelihoods, list(rows), other.likelihoods)
        return self._solved(moments, likelihoods)

    def moved(self, features: Array, source: int, labels: Array) -> Classifier:
        """Move images from the class in row `source` to the classes in rows `labels`."""
        moments = self.moments.moved(self.mapping(features), source, labels)
        return self._solved(moments, self.likelihoods)

    def _left_out(self, lesson: Moments, features: Array, labels: Array) -> Array:
        """Return the likelihoods of images left out of a classifier of their lesson alone.

        So they are the same whatever was learned before, or is joined later. A removable classifier
        has none: they would tell of classes of the lesson that are forgotten later.
        """
        result = _no_likelihoods(len(lesson.counts))
        if self.options.removable:
            return result
        found, default = self._found(lesson)[2:]
        if found is not None:
            seen = np.flatnonzero(lesson.counts)
            expected = expected_temperature(found, default)
            rows = np.searchsorted(seen, labels)
            result[seen] = found.likelihoods(features, rows, expected, self.mapping)
        return result

    def _solved(self, moments: Moments, likelihoods: Array) -> Classifier:
        """Return the classifier that follows from moments of the mapped features."""
        weight, bias, found, temperature = self._found(moments)
        if found is not None:
            temperature = expected_temperature(found, temperature)
        return replace(
            self,
            moments=moments,
            weight=weight.astype(np.float32),
            bias=bias,
            likelihoods=likelihoods,
            temperature=corrected_temperature(temperature, likelihoods),
        )

    def _found(self, moments: Moments) -> tuple[Array, Array, Discriminant | None, float]:
        """Return what `_solve` finds.

        Raises:
            CorruptFile: The moments contradict each other.
        """
        try:
            return _solve(moments, self.options)
        except LinAlgError as error:
            raise CorruptFile("The model", "its statistics contradict each other") from error

    # -- storage

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store, with the weights: predicting solves nothing."""
        arrays = {**self.moments.arrays(), "weight": self.weight, "bias": self.bias}
        solved = {"likelihoods": self.likelihoods, "temperature": np.array([self.temperature])}
        return arrays | solved

    @classmethod
    def of_arrays(
        cls, options: ClassifierOptions, feature_width: int, arrays: Arrays, classes: int
    ) -> Classifier:
        """Return the classifier whose `arrays` were stored.

        Raises:
            ValueError: The arrays contradict each other or the other arguments.
        """
        empty = cls.empty(options, feature_width)
        width, removable = empty.mapping.width, options.removable
        weight = checked(arrays, "weight", (classes, width), np.float32)
        bias = checked(arrays, "bias", (classes,), np.float64)
        likelihoods = checked(arrays, "likelihoods", _no_likelihoods(classes).shape, np.float32)
        temperature = float(checked(arrays, "temperature", (1,), np.float64)[0])
        if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"'temperature' is {temperature}")
        sums = {name: array for name, array in arrays.items() if name not in OWN}
        moments = Moments.of_arrays(sums, width, removable, options.covariance != "none")
        if not moments.is_consistent(classes):
            raise ValueError(f"the arrays have {len(moments.counts)} classes, not {classes}")
        return replace(
            empty,
            moments=moments,
            weight=weight,
            bias=bias,
            likelihoods=likelihoods,
            temperature=temperature,
        )


def _no_likelihoods(classes: int) -> NDArray[np.float32]:
    return np.zeros((classes, len(STEPS)), np.float32)


def _solve(
    moments: Moments, options: ClassifierOptions
) -> tuple[Array, Array, Discriminant | None, float]:
    """Return the weights, classes x features, the bias of each class, and a temperature.

    The temperature is that of single images; the expected one follows from the discriminant.
    """
    means, counts = moments.means(), moments.counts
    bias, rows = np.zeros(len(means)), np.flatnonzero(counts)
    if not len(rows):
        return np.zeros_like(means), bias, None, 1.0
    default = means_temperature(means[rows], counts[rows])
    if options.covariance == "none":
        return unit(means), bias, None, default
    if options.covariance == "ridge":
        weight, found = solve_ridge(moments, options.ridge, balance=options.balance)
        least = min(RIDGE_RESEMBLANCE * resemblance(means[rows]) ** 3, MAX_MEANS_TEMPERATURE)
        return weight, bias, found, max(RIDGE_TEMPERATURE, least)
    weight, bias, found = solve_shared(moments, options.shrinkage)
    return weight, bias, found, default * found.trace / weight.shape[1]


def solve_shared(
    moments: Moments, shrinkage: float | None = None
) -> tuple[Array, Array, Discriminant]:
    """Solve for Gaussian classes with one covariance.

    Args:
        moments: Of the features.
        shrinkage: Share of a multiple of the identity in the covariance.

    Returns:
        The weights, classes x features, the bias of each class, and what the temperature of
        probabilities follows from.

    Raises:
        LinAlgError: The moments contradict each other.
    """
    covariance, freedom = moments.covariance()
    if shrinkage is None:
        shrinkage = oracle_shrinkage(covariance, freedom)
    inverse = inverse_factor(shrink_covariance(covariance, freedom, shrinkage))
    means, counts = moments.means(), moments.counts
    weight = (means @ inverse.T) @ inverse
    bias = -(weight * means).sum(axis=1) / 2
    rows = np.flatnonzero(counts)
    discriminant = Discriminant(
        means[rows],
        weight[rows],
        counts[rows],
        freedom,
        own=1 - shrinkage,
        ridge=shrinkage * float(np.trace(covariance)) / len(covariance),
        trace=float(np.vdot(inverse, inverse)),
        whiten=lambda each: each @ inverse.T,
        scores=lambda products, squares: products - squares / 2,
    )
    return weight, bias, discriminant

"""Counts, sums and second moments of the features of classes: statistics that add up over lessons.

Shrunk covariances follow from them, which can be inverted however few images there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coda_prompt.statistics.algebra import (
    Array,
    Arrays,
    check_names,
    checked,
    grown_rows,
    other_rows,
    packed,
    unpacked,
)

MIN_SINGULAR_VALUE = 1e-6
"""Of the largest one; directions below it are rounding."""
MIN_VARIANCE = 1e-6
"""Of the mean square of features. A smaller variance is rounding: the images are all the same."""
MAX_IMAGES = 2**48
"""Of a class, so that sums of counts cannot overflow."""
CHUNK_SIZE = 1024
"""Images added at once, which bounds the memory for their features in float64."""


def oracle_shrinkage(covariance: Array, freedom: int) -> float:
    """Return the share of the identity for `shrink_covariance`; 1 if the covariance is zero.

    The square root of the oracle approximating shrinkage (Chen et al. 2010,
    https://arxiv.org/abs/0907.4698, eq. 23), which falls with the number of images.
    """
    width, trace = len(covariance), float(np.trace(covariance))
    squares = float(np.vdot(covariance, covariance))
    numerator = (1 - 2 / width) * squares + trace**2
    denominator = (freedom + 1 - 2 / width) * (squares - trace**2 / width)
    return min(1.0, numerator / denominator) ** 0.5 if trace > 0 and denominator > 0 else 1.0


def shrink_covariance(covariance: Array, freedom: int, shrinkage: float | None = None) -> Array:
    """Mix a covariance with a multiple of the identity of the same trace.

    Args:
        covariance: D x D.
        freedom: Its degrees of freedom.
        shrinkage: Share of the identity. Default: `oracle_shrinkage`.

    Returns:
        The mixture; the identity if the covariance is zero, as with one image per class.
    """
    width, trace = len(covariance), float(np.trace(covariance))
    if trace <= 0:
        return np.eye(width)
    if shrinkage is None:
        shrinkage = oracle_shrinkage(covariance, freedom)
    shrunk: Array = (1 - shrinkage) * covariance
    shrunk.flat[:: width + 1] += shrinkage * trace / width
    return shrunk


def squared_sums(sums: Array, counts: Array) -> Array:
    """Return the sum of n m m^T over classes with n images and mean m, D x D, exactly symmetric."""
    scaled = sums / np.sqrt(np.maximum(counts, 1))[:, None]
    result: Array = scaled.T @ scaled
    return result


class LessonSums:
    """Counts, sums and second moments of the images of one lesson, added chunk by chunk.

    Args:
        width: Number of features.
        classes: Number of classes.
        second: Whether to compute second moments.
    """

    def __init__(self, width: int, classes: int, *, second: bool = True) -> None:
        self.counts = np.zeros(classes, np.int64)
        self.sums = np.zeros((classes, width))
        self.squares = np.zeros((width, width)) if second else None
        """Sum of f f^T over all images."""
        self.dtype: np.dtype[np.floating] = np.dtype(np.float32)
        """Precision of the features."""

    def add(self, features: Array, labels: Array) -> None:
        """Add images; `labels` are rows."""
        self.dtype = np.promote_types(self.dtype, features.dtype)
        self.counts += np.bincount(labels, minlength=len(self.counts))
        features = features.astype(np.float64, copy=False)
        for row in np.unique(labels):
            self.sums[row] += features[labels == row].sum(axis=0)
        if self.squares is not None:
            self.squares += features.T @ features


@dataclass(frozen=True, eq=False)
class ClassFactors:
    """The second moments of each class on its own, so that a class can be removed exactly.

    Sum of f f^T of a class = R^T R, where R has a row for each image, at most as many as features.
    The rows are scaled principal directions, not images. Nothing is ever subtracted to remove a
    class, so float32 is precise enough.
    """

    rows: NDArray[np.float32]
    """R of all classes, one after the other."""
    ranks: NDArray[np.int64]
    """Rows of each class."""

    @classmethod
    def empty(cls, width: int) -> ClassFactors:
        return cls(np.zeros((0, width), np.float32), np.zeros(0, np.int64))

    def grown(self, classes: int) -> ClassFactors:
        """Add classes without images up to `classes`."""
        return replace(self, ranks=grown_rows(self.ranks, classes))

    def added(self, features: Array, labels: Array) -> ClassFactors:
        """Add images."""
        factors = self._split()
        for row in np.unique(labels):
            factors[row] = _factor([factors[row], features[labels == row]])
        return self._joined(factors)

    def total(self) -> Array:
        """Sum of f f^T over all classes, D x D in float64."""
        total = np.zeros((self.rows.shape[1],) * 2)
        for start in range(0, len(self.rows), CHUNK_SIZE):
            chunk = self.rows[start : start + CHUNK_SIZE].astype(np.float64)
            total += chunk.T @ chunk
        return total

    def without_classes(self, rows: Sequence[int]) -> ClassFactors:
        factors = self._split()
        return self._joined([factors[row] for row in other_rows(len(factors), rows)])

    def united(self, rows: Sequence[int], into: int) -> ClassFactors:
        factors = self._split()
        factors[into] = _factor([factors[row] for row in rows])
        return self._joined(factors).without_classes([row for row in rows if row != into])

    def joined(self, other: ClassFactors, rows: Sequence[int]) -> ClassFactors:
        factors = self._split()
        for row, added in zip(rows, other._split(), strict=True):
            factors[row] = _factor([factors[row], added]) if len(factors[row]) else added
        return self._joined(factors)

    def moved(self, features: Array, source: int, labels: Array) -> ClassFactors:
        factors = self._split()
        factors[source] = _without(factors[source], features)
        return self._joined(factors).added(features, labels)

    def _split(self) -> list[Array]:
        return np.split(self.rows, np.cumsum(self.ranks)[:-1]) if len(self.ranks) else []

    def _joined(self, factors: list[Array]) -> ClassFactors:
        ranks = np.array([len(each) for each in factors], np.int64)
        return ClassFactors(np.concatenate([self.rows[:0], *factors]), ranks)


def _factor(parts: list[Array]) -> NDArray[np.float32]:
    """Return R with R^T R = the sum of the parts' P^T P, without rows that are rounding."""
    rows = np.concatenate([part.astype(np.float64) for part in parts])
    count, width = rows.shape
    if count <= width:
        _, values, directions = np.linalg.svd(rows, full_matrices=False)
    else:
        squares, vectors = np.linalg.eigh(rows.T @ rows)
        values, directions = np.sqrt(np.maximum(squares, 0))[::-1], vectors.T[::-1]
    significant = values > MIN_SINGULAR_VALUE * (values.max() if count else 0)
    return (values[:, None] * directions)[significant].astype(np.float32)


def _without(factor: Array, features: Array) -> NDArray[np.float32]:
    """Return R with R^T R = factor^T factor - features^T features, as far as that is positive."""
    factor, features = factor.astype(np.float64), features.astype(np.float64)
    basis, _ = np.linalg.qr(np.concatenate([factor, features]).T)  # D x rows
    inside, removed = factor @ basis, features @ basis
    squares, vectors = np.linalg.eigh(inside.T @ inside - removed.T @ removed)
    rows = np.sqrt(np.maximum(squares, 0))[:, None] * (vectors.T @ basis.T)
    return rows[squares > MIN_SINGULAR_VALUE * max(0.0, squares.max())].astype(np.float32)


@dataclass(frozen=True, eq=False)
class Moments:
    """Counts, sums and second moments of the features of all classes: additive.

    The second moments are stored as the scatter within classes: the second moments themselves are
    large sums of which it is a small difference. It has the precision of the features, everything
    is computed in float64.
    """

    counts: NDArray[np.int64]
    """Images of each class."""
    sums: NDArray[np.float64]
    """Sum of f for each class, C x D."""
    within: Array | None
    """Sum of (f - m) (f - m)^T over all images, where m is the mean of their class, D x D."""
    factors: ClassFactors | None
    """The second moments of each class apart, instead of `within`."""

    @classmethod
    def empty(cls, width: int, removable: bool = False, second: bool = True) -> Moments:
        """Return moments without classes.

        Args:
            width: Number of features.
            removable: Store the second moments of each class apart, so that removing a class leaves
                nothing of it: at most images x features x 4 bytes for each class.
            second: Whether there are second moments at all.
        """
        within = np.zeros((width, width), np.float32) if second and not removable else None
        factors = ClassFactors.empty(width) if second and removable else None
        return cls(np.zeros(0, np.int64), np.zeros((0, width)), within, factors)

    def grown(self, classes: int) -> Moments:
        """Add classes without images up to `classes`."""
        return Moments(
            grown_rows(self.counts, classes),
            grown_rows(self.sums, classes),
            self.within,
            self.factors and self.factors.grown(classes),
        )

    def added(
        self, features: Array, labels: Array, mapping: Callable[[Array], Array] = np.asarray
    ) -> Moments:
        """Add images.

        Args:
            features: One row for each image.
            labels: The row of the class of each image.
            mapping: Applied to features before they are added, chunk by chunk.
        """
        classes = max(len(self.counts), int(labels.max(initial=-1)) + 1)
        lesson = LessonSums(self.sums.shape[1], classes, second=self.within is not None)
        moments = self.grown(classes)
        factors = moments.factors
        for start in range(0, len(labels), CHUNK_SIZE):
            rows = labels[start : start + CHUNK_SIZE]
            mapped = mapping(features[start : start + CHUNK_SIZE])
            lesson.add(mapped, rows)
            factors = factors and factors.added(mapped, rows)
        return replace(moments, factors=factors).with_sums(lesson)

    def with_sums(self, lesson: LessonSums) -> Moments:
        """Add the sums of a lesson; its second moments are overwritten."""
        grown = self.grown(len(lesson.counts))
        squares = lesson.squares
        if squares is not None:
            squares += grown.second_moments()
        return grown._changed(
            grown.counts + lesson.counts, grown.sums + lesson.sums, squares, lesson.dtype
        )

    def without_classes(self, rows: Sequence[int]) -> Moments:
        """Remove classes; later classes move up.

        The means of the classes are removed exactly. Without `factors` their scatter cannot be told
        apart from that of the others: the pooled covariance stays, weighted for the images that
        remain.
        """
        kept, within = other_rows(len(self.counts), rows), self.within
        freedom = np.maximum(self.counts - 1, 0)
        if within is not None:
            within = within * within.dtype.type(freedom[kept].sum() / max(1, freedom.sum()))
        factors = self.factors and self.factors.without_classes(rows)
        return Moments(self.counts[kept], self.sums[kept], within, factors)

    def united(self, rows: Sequence[int], into: int) -> Moments:
        """Add up the classes at `rows` in row `into`, one of them, and remove the others."""
        counts, sums = self.counts.copy(), self.sums.copy()
        counts[into], sums[into] = counts[list(rows)].sum(), sums[list(rows)].sum(axis=0)
        kept = other_rows(len(counts), [row for row in rows if row != into])
        factors = self.factors and self.factors.united(rows, into)
        united = replace(self, factors=factors)
        return united._changed(counts[kept], sums[kept], self._squares())

    def joined(self, other: Moments, rows: Sequence[int]) -> Moments:
        """Add other moments; `rows[k]` is the row here of their class k, which may be new."""
        grown, rows = self.grown(max([-1, *rows]) + 1), list(rows)
        counts, sums, squares = grown.counts.copy(), grown.sums.copy(), other._squares()
        np.add.at(counts, rows, other.counts)
        np.add.at(sums, rows, other.sums)
        if squares is not None:
            squares += grown.second_moments()
        if grown.factors is not None and other.factors is not None:
            grown = replace(grown, factors=grown.factors.joined(other.factors, rows))
        dtype = np.dtype(np.float32) if other.within is None else other.within.dtype
        return grown._changed(counts, sums, squares, dtype)

    def moved(self, features: Array, source: int, labels: Array) -> Moments:
        """Move images from the class in row `source` to those in rows `labels`, also new ones."""
        grown = self.grown(int(labels.max(initial=-1)) + 1)
        counts, sums = grown.counts.copy(), grown.sums.copy()
        features = features.astype(np.float64)
        counts[source] -= len(labels)
        sums[source] -= features.sum(axis=0)
        np.add.at(counts, labels, 1)
        np.add.at(sums, labels, features)
        factors = grown.factors and grown.factors.moved(features, source, labels)
        return replace(grown, factors=factors)._changed(counts, sums, self._squares())

    def means(self) -> NDArray[np.float64]:
        """Class means, C x D; zero for a class without images."""
        means: NDArray[np.float64] = self.sums / np.maximum(self.counts, 1)[:, None]
        return means

    def second_moments(self) -> Array:
        """Sum of f f^T over all images, D x D in float64; the caller may change it."""
        if self.factors is not None:
            return self.factors.total()
        squares = squared_sums(self.sums, self.counts)
        squares += self.within
        return squares

    def scatter(self) -> Array:
        """The scatter within classes, D x D in float64; the caller may change it.

        It is zero where all images of a class are the same, and not what rounding leaves of it.
        """
        if self.within is None:
            scatter = self.second_moments()
            scatter -= squared_sums(self.sums, self.counts)
        else:
            scatter = self.within.astype(np.float64)
        return _without_rounding(scatter, self.mean_squares(scatter))

    def mean_squares(self, scatter: Array) -> float:
        """Return the sum of |f|^2 over all images, from the scatter within classes."""
        return float(np.trace(scatter) + np.vdot(self.means(), self.sums))

    def covariance(self) -> tuple[Array, int]:
        """The covariance within classes, D x D, and its degrees of freedom."""
        freedom = int(np.maximum(self.counts - 1, 0).sum())
        scatter = self.scatter()
        scatter /= max(freedom, 1)
        return scatter, freedom

    def total_covariance(self) -> tuple[Array, int]:
        """The covariance of all images, D x D, and its degrees of freedom; see `scatter`."""
        count, total = int(self.counts.sum()), self.sums.sum(axis=0)
        scatter = self.second_moments()
        squares = float(np.trace(scatter))
        scatter -= np.outer(total, total / max(count, 1))
        scatter = _without_rounding(scatter, squares)
        scatter /= max(count - 1, 1)
        return scatter, count - 1

    def is_consistent(self, classes: int) -> bool:
        """Whether all sizes fit the number of classes."""
        return len(self.counts) == len(self.sums) == classes and (
            self.factors is None or len(self.factors.ranks) == classes
        )

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store; of symmetric matrices the upper triangle."""
        arrays: dict[str, Array] = {"counts": self.counts, "sums": self.sums}
        if self.within is not None:
            arrays["within"] = packed(self.within)
        if self.factors is not None:
            arrays |= {"rows": self.factors.rows, "ranks": self.factors.ranks}
        return arrays

    @classmethod
    def of_arrays(
        cls, arrays: Arrays, width: int, removable: bool = False, second: bool = True
    ) -> Moments:
        """Return the moments whose `arrays` were stored.

        Raises:
            ValueError: The arrays contradict each other or the other arguments.
        """
        names = (["rows", "ranks"] if removable else ["within"]) if second else []
        check_names(arrays, ["counts", "sums", *names])
        counts = checked(arrays, "counts", (None,), np.int64)
        sums = checked(arrays, "sums", (len(counts), width), np.float64)
        if (counts > MAX_IMAGES).any():
            raise ValueError("'counts' has values that are too large")
        within = factors = None
        if "within" in names:
            size = width * (width + 1) // 2
            within = unpacked(checked(arrays, "within", (size,), np.float32, np.float64), width)
        elif names:
            rows = checked(arrays, "rows", (None, width), np.float32)
            ranks = checked(arrays, "ranks", (len(counts),), np.int64)
            if (ranks > len(rows)).any() or ranks.sum() != len(rows):
                raise ValueError("'ranks' does not fit 'rows'")
            factors = ClassFactors(rows, ranks)
        return cls(counts, sums, within, factors)

    def _squares(self) -> Array | None:
        """Return the second moments, if they are stored as the scatter within classes."""
        return None if self.within is None else self.second_moments()

    def _changed(
        self,
        counts: Array,
        sums: Array,
        squares: Array | None,
        dtype: np.dtype[np.floating] | None = None,
    ) -> Moments:
        """Return moments with other sums; `squares` are overwritten.

        Args:
            counts: Images of each class.
            sums: Sum of f for each class.
            squares: Sum of f f^T over all images, unless classes have their own.
            dtype: Precision of what was added.
        """
        within = self.within
        if within is not None and squares is not None:
            squares -= squared_sums(sums, counts)
            within = squares.astype(np.promote_types(within.dtype, dtype or within.dtype))
        return Moments(counts, sums, within, self.factors)


def _without_rounding(scatter: Array, squares: float) -> Array:
    """Return zero for a difference of second moments that is nothing but their rounding."""
    if abs(float(np.trace(scatter))) <= MIN_VARIANCE * squares:
        return np.zeros_like(scatter)
    return scatter

"""Counts, sums and second moments of frozen features: statistics that add up over tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from coda_prompt.research.methods.additive import move_sums, without_classes
from coda_prompt.research.methods.bank import Bank, ClassRows, CPUModule, other_rows
from coda_prompt.research.methods.sums import Chunk, ClassSums

MIN_SINGULAR_VALUE = 1e-6
"""Of the largest one; directions below it are rounding."""
MIN_VARIANCE = 1e-6
"""Of the mean square of features. A smaller variance is rounding: the images are all the same."""


class ClassFactors(CPUModule):
    """The second moments of each class on its own, so that a class can be removed exactly.

    Sum of f f^T of a class = R^T R, where R has a row for each image, at most as many as features.
    The rows are scaled principal directions, not images. Nothing is ever subtracted to remove a
    class, so float32 is precise enough. They stay on the CPU.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = Bank((width,))
        self.ranks = Bank(dtype=torch.int64)

    def grow(self, classes: int) -> None:
        """Add classes without images up to `classes`."""
        self.ranks.grow(classes)

    def add(self, features: Tensor, row: int) -> None:
        """Add images of one class."""
        factors = self._split()
        factors[row] = _factor([factors[row], features.cpu()])
        self._join(factors)

    def total(self) -> Tensor:
        """Sum of f f^T over all classes, D x D in float64."""
        rows = self.rows.frozen
        total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        for chunk in rows.split(4096):
            total += chunk.double().T @ chunk.double()
        return total

    def drop_classes(self, rows: Sequence[int]) -> None:
        factors = self._split()
        self._join([factors[row] for row in other_rows(len(factors), rows).tolist()])

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        factors = self._split()
        factors[into] = _factor([factors[row] for row in rows])
        self._join(factors)
        self.drop_classes([row for row in rows if row != into])

    def absorb(self, other: ClassFactors, rows: Sequence[int]) -> None:
        self.grow(max([len(self.ranks) - 1, *rows]) + 1)
        factors = self._split()
        for row, added in zip(rows, other._split(), strict=True):
            factors[row] = _factor([factors[row], added]) if len(factors[row]) else added
        self._join(factors)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        factors, features = self._split(), features.cpu()
        factors[source] = _without(factors[source], features)
        for row in labels.unique().tolist():
            factors[row] = _factor([factors[row], features[labels.cpu() == row]])
        self._join(factors)

    def is_consistent(self, classes: int) -> bool:
        """Whether the sizes fit each other and the number of classes."""
        return len(self.ranks) == classes and int(self.ranks.frozen.sum()) == len(self.rows)

    def _split(self) -> list[Tensor]:
        return list(self.rows.frozen.split(self.ranks.frozen.tolist()))

    def _join(self, factors: list[Tensor]) -> None:
        self.rows.frozen = torch.cat([self.rows.frozen[:0], *factors]).contiguous()
        self.ranks.frozen = torch.tensor([len(each) for each in factors], dtype=torch.int64)


def _factor(parts: list[Tensor]) -> Tensor:
    """Return R with R^T R = the sum of the parts' P^T P, without rows that are rounding."""
    rows = torch.cat([part.float() for part in parts])
    count, width = rows.shape
    if count <= width:
        _, values, directions = torch.linalg.svd(rows.double(), full_matrices=False)
    else:
        squares, vectors = torch.linalg.eigh(rows.double().T @ rows.double())
        values, directions = squares.clamp(min=0).sqrt().flip(0), vectors.T.flip(0)
    significant = values > MIN_SINGULAR_VALUE * values.max() if count else values > 0
    return (values[:, None] * directions)[significant].float()


def _without(factor: Tensor, features: Tensor) -> Tensor:
    """Return R with R^T R = factor^T factor - features^T features, as far as that is positive."""
    both = torch.cat([factor, features.float()]).double()
    basis, _ = torch.linalg.qr(both.T)  # D x rows
    inside, removed = factor.double() @ basis, features.double() @ basis
    squares, vectors = torch.linalg.eigh(inside.T @ inside - removed.T @ removed)
    rows = squares.clamp(min=0).sqrt()[:, None] * (vectors.T @ basis.T)
    return rows[squares > MIN_SINGULAR_VALUE * squares.max().clamp(min=0)].float()


class MomentSums(ClassSums):
    """What a task adds to `FeatureMoments`, in float64 on the CPU.

    Args:
        moments: What it will be added to.
        scaled: Applied to features before they are added.
    """

    reduced = MappingProxyType({**ClassSums.reduced, "total": "sum"})

    def __init__(self, moments: FeatureMoments, scaled: Callable[[Tensor], Tensor]) -> None:
        super().__init__(moments.sums, moments.counts)
        self.total = torch.zeros_like(moments.total)
        self.scaled = scaled

    def add(self, chunk: Chunk) -> None:
        features = self.scaled(chunk.features).cpu().double()
        super().add(chunk._replace(features=features, labels=chunk.labels.cpu()))
        self.total.addmm_(features.T, features)


class FeatureMoments(ClassRows, CPUModule):
    """Counts, sums and second moments of the features of all classes: additive, in float64.

    They stay on the CPU in float64, whatever the model is moved to: the covariance is a small
    difference of large sums, and not every accelerator has float64.

    Args:
        width: Number of features.
        removable: Also store the second moments of each class, so that dropping a class leaves
            nothing of it: at most images x features x 4 bytes for each class.
    """

    total: Tensor
    """Sum of f f^T over all images, D x D; empty if `removable`, where it is that of `factors`."""

    def __init__(self, width: int, *, removable: bool = False) -> None:
        super().__init__()
        self.counts = Bank(dtype=torch.int64)
        self.sums = Bank((width,), dtype=torch.float64)
        self.class_banks = (self.counts, self.sums)
        self.factors = ClassFactors(width) if removable else None
        side = 0 if removable else width
        self.register_buffer("total", torch.zeros(side, side, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        super().grow(classes)
        if self.factors is not None:
            self.factors.grow(classes)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add images; `labels` are rows."""
        features, labels = features.cpu().double(), labels.cpu()
        counts = self.counts.frozen
        self.counts.frozen = counts + torch.bincount(labels, minlength=len(counts))
        self.sums.frozen = self.sums.frozen.index_add(0, labels, features)
        if self.factors is None:
            self.total = self.total + features.T @ features
            return
        for row in labels.unique().tolist():
            self.factors.add(features[labels == row], row)

    def add_sums(self, sums: MomentSums) -> None:
        """Add the sums of a task."""
        sums.add_to(self.sums, self.counts)
        self.total = self.total + sums.total

    def means(self) -> Tensor:
        """Class means, C x D; zero for a class without images."""
        return self.sums.frozen / self.counts.frozen.clamp(min=1)[:, None]

    def second_moments(self) -> Tensor:
        """Sum of f f^T over all images, D x D."""
        return self.total if self.factors is None else self.factors.total()

    def covariance(self) -> tuple[Tensor, int]:
        """The covariance within classes, D x D, and its degrees of freedom.

        It is zero where all images of a class are the same, and not what rounding leaves of it.
        """
        freedom = int((self.counts.frozen - 1).clamp(min=0).sum())
        squares = self.second_moments()
        scatter = squares - self.means().T @ self.sums.frozen
        return _without_rounding(scatter, squares) / max(freedom, 1), freedom

    def total_covariance(self) -> tuple[Tensor, int]:
        """The covariance of all images, D x D, and its degrees of freedom; see `covariance`."""
        count, squares = int(self.counts.frozen.sum()), self.second_moments()
        total = self.sums.frozen.sum(dim=0)
        scatter = squares - total[:, None] * total / max(count, 1)
        return _without_rounding(scatter, squares) / max(count - 1, 1), count - 1

    def drop_classes(self, rows: Sequence[int]) -> None:
        if self.factors is None:
            counts = self.counts.frozen
            self.total = without_classes(self.total, self.sums.frozen, counts, rows)
        else:
            self.factors.drop_classes(rows)
        super().drop_classes(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        super().unite_classes(rows, into)
        if self.factors is not None:
            self.factors.unite_classes(rows, into)

    def absorb(self, other: FeatureMoments, rows: Sequence[int]) -> None:
        super().absorb(other, rows)
        if self.factors is None or other.factors is None:
            self.total = self.total + other.total
        else:
            self.factors.absorb(other.factors, rows)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        features, labels = features.cpu().double(), labels.cpu()
        move_sums(self.sums, self.counts, features, source, labels)
        if self.factors is not None:
            self.factors.move_images(features, source, labels)

    def is_consistent(self, classes: int) -> bool:
        fits = self.factors is None or self.factors.is_consistent(classes)
        return super().is_consistent(classes) and fits


def _without_rounding(scatter: Tensor, squares: Tensor) -> Tensor:
    """Return zero for a difference of second moments that is nothing but their rounding."""
    is_rounding = scatter.trace().abs() <= MIN_VARIANCE * squares.trace()
    return torch.zeros_like(scatter) if is_rounding else scatter

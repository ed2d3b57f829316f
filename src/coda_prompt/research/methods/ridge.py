"""RanPAC's classifier: ridge regression on random features, solved from running sums.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251: h = ReLU(f W), G += h^T h,
C += h^T onehot(y), scores = h (G + lambda I)^-1 C. The sums do not depend on the order of classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import CannotEdit
from coda_prompt.research.methods.additive import move_sums, without_classes
from coda_prompt.research.methods.base import MethodConfig
from coda_prompt.research.methods.moments import ClassFactors
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.random_features import RandomFeatures
from coda_prompt.research.methods.sums import CHUNK_SIZE, Chunk, ClassSums
from coda_prompt.research.seeding import keyed_generator

log = logging.getLogger(__name__)

RIDGE_CANDIDATES = tuple(10.0**power for power in range(-4, 9))
MAX_SELECTION_IMAGES = 4000
"""Maximum number of images for selecting the ridge parameter; the cost is cubic in it."""
MIN_SELECTION_IMAGES = 10
DEFAULT_RIDGE = 1e-5
"""Ridge as a fraction of the Gram matrix's trace until it can be selected; works well on pocket."""
RELATIVE_RIDGE = 0.05
"""Share of an image's squared length in `ridge="relative"`; docs/lab/few-images.md measures it."""
MAX_OWN_SCORE, MIN_SIGNAL = 0.999, 0.05
"""Bounds of the score of a class's own mean, and of the share of it that is not noise."""
MAX_WIDTH = 20_000
MAX_IMAGE_SHARE = 0.5
"""Maximum share of a row of a task's Gram matrix that may come from one image."""
MIN_RIDGE = 1e-6
"""Fraction of the trace below which float32 rounding of the Gram matrix outweighs the ridge."""


@dataclass(frozen=True, config=STRICT)
class RidgeConfig(MethodConfig):
    """Options of methods with RanPAC's classifier."""

    width: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Number of random features. Default: 16 per backbone feature, at most 10,000 (Token RanPAC:
    4,096)."""
    ridge: Annotated[float, Field(gt=0)] | Literal["relative"] | None = None
    """Ridge parameter. Default: selected on a validation fifth of every task so far. `relative`:
    in proportion to the mean squared length of an image's random features, which needs no choice.
    `coda learn` uses `relative`."""
    blend: bool | Literal["removable"] = False
    """Use class means in the Gram matrix where one image dominates a random feature, so that it
    contains no single image's features, even in small tasks. Enabled by `coda learn`. `removable`:
    within each class, whose second moments are stored apart, so that it can be forgotten."""
    balance: bool = False
    """Weight all classes equally, regardless of their number of images. Enabled by `coda learn`."""


class RandomRidge(RandomFeatures):
    """Running sums over all classes seen, and the ridge regression solved from them."""

    gram: Tensor
    ridge: Tensor
    errors: Tensor

    def __init__(self, width: int, projected: int, config: RidgeConfig) -> None:
        super().__init__(width, projected)
        self.fixed_ridge = ridge = config.ridge
        self.blend, self.balance = config.blend, config.balance
        self.factors = ClassFactors(projected) if self.blend == "removable" else None
        # Upper triangle of the symmetric Gram matrix, row by row; empty if classes have their own.
        side = 0 if self.factors is not None else projected
        self.register_buffer("gram", torch.zeros(side * (side + 1) // 2))
        self.register_buffer("ridge", torch.tensor(ridge if isinstance(ridge, float) else 0.0))
        self.register_buffer("errors", torch.zeros(len(RIDGE_CANDIDATES)))

    def grow(self, classes: int) -> None:
        super().grow(classes)
        if self.factors is not None:
            self.factors.grow(classes)

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add the images of a task to the sums and solve the regression again."""
        sums = RidgeSums(self, labels, task)
        sums.add_all(features, labels)
        if self.factors is not None:
            for row in labels.unique().tolist():
                self._add_factors(features[labels == row], row)
        self.add_sums(sums)

    def add_sums(self, sums: RidgeSums) -> None:
        """Add the sums of a task and solve the regression again."""
        if sums.selected is not None:
            self._select_ridge(sums.selected, sums.selected_labels)
        if sums.gram is not None:
            self._add_packed(sums.blended_gram())
            sums.gram = None  # frees its memory before the regression is solved
        sums.add_to(self.sums, self.counts)
        self.solve()

    def _add_factors(self, features: Tensor, row: int) -> None:
        """Add images of one class to its own moments; they hide each other."""
        assert self.factors is not None
        sums = RidgeSums(self, torch.full((len(features),), row, device=features.device), 0)
        sums.add_all(features, sums.labels)
        mean, is_shared = sums.sums[:, row] / len(features), sums.is_shared()
        for chunk in features.split(CHUNK_SIZE):
            self.factors.add(torch.where(is_shared, self.hidden(chunk), mean), row)

    def solve(self) -> None:
        """Solve the regression from the sums."""
        # On the CPU, because not every accelerator supports float64. One matrix (34 MB with 2,048
        # random features) is overwritten again and again; LAPACK copies it unless it is transposed.
        if self.factors is None:
            gram = self._unpacked(torch.float64, "cpu")
        else:
            gram = self.factors.total().cpu().double()
        targets = self.sums.frozen.cpu().double()
        ridge = self._effective_ridge(float(gram.trace()))
        if self.balance:
            targets, ridge = self._balance(gram, targets, ridge)
        gram.diagonal().add_(ridge)
        factor = torch.linalg.cholesky(gram.mT, out=gram.mT)
        halfway = torch.linalg.solve_triangular(factor, targets, upper=False)
        solved = torch.linalg.solve_triangular(factor.mT, halfway, upper=True)
        if self.balance and self.fixed_ridge == "relative":
            inverse = torch.cholesky_inverse(factor, out=factor)
            damping = ridge * float(inverse.trace())
            solved = solved * self._compensation(targets, solved, damping)
        self.weight.frozen = solved.to(self.weight.frozen).contiguous()

    def _compensation(self, means: Tensor, solved: Tensor, damping: float) -> Tensor:
        """Compute by how much a class with few images scores too low, one factor for each class.

        A mean of n images is m + e with covariance S / n of e. With q = m^T A^-1 m (A without the
        class) new images score q / (1 + q + tr(A^-1 S) / n) on average, because the regression
        also fits e; with many images it would be q / (1 + q).

        Args:
            means: Of each class, projected x classes.
            solved: A^-1 times the means.
            damping: r tr(A^-1). With A = S + means means^T + r I, tr(A^-1 S) follows from it.
        """
        counts = self.counts.frozen.cpu().double()
        average = float(counts[counts > 0].mean())
        freedom = float((counts - 1).clamp(min=0).sum())
        own = (solved * means).sum(dim=0)
        spread = average * (len(means) - float(own.sum()) - damping) / max(1.0, freedom)
        own = own.clamp(max=MAX_OWN_SCORE)
        fitted = own / (1 - own)
        noise = max(0.0, spread) / counts.clamp(min=1)
        expected = (fitted - noise).maximum(MIN_SIGNAL * fitted)
        return (1 + fitted) / (1 + expected)

    def drop_classes(self, rows: Sequence[int]) -> None:
        if self.factors is not None:
            self.factors.drop_classes(rows)
        else:
            sums, counts = self.sums.frozen.T.double(), self.counts.frozen
            gram = without_classes(self._unpacked(torch.float64), sums, counts, rows)
            self.gram = torch.zeros_like(self.gram)
            self._add_packed(gram)
        super().drop_classes(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        super().unite_classes(rows, into)
        if self.factors is not None:
            self.factors.unite_classes(rows, into)

    def absorb(self, other: RandomRidge, rows: Sequence[int]) -> None:
        if not torch.equal(self.seed.cpu(), other.seed.cpu()):
            raise CannotEdit("the models have different random features; use one seed for both")
        super().absorb(other, rows)
        if self.factors is not None and other.factors is not None:
            self.factors.absorb(other.factors, rows)
        else:
            self.gram = self.gram + other.gram.to(self.gram)
        self.errors = self.errors + other.errors.to(self.errors)
        if self.fixed_ridge is None and self.errors.any():
            self.ridge = self.ridge.new_tensor(RIDGE_CANDIDATES[int(self.errors.argmin())])

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        hidden = self.hidden(features)
        move_sums(self.sums, self.counts, hidden, source, labels)
        if self.factors is not None:
            self.factors.move_images(hidden, source, labels)

    def is_consistent(self, classes: int) -> bool:
        fits = self.factors is None or self.factors.is_consistent(classes)
        return super().is_consistent(classes) and fits

    def _balance(self, gram: Tensor, sums: Tensor, ridge: float) -> tuple[Tensor, float]:
        """Reweight the sums as if all classes had the same number of images; overwrites `gram`.

        Each class contributes its own mean; the scatter around the means is pooled over classes.
        All results are divided by the average class size, which does not change the solution. With
        classes of equal size the solution is the same as without balancing.

        Returns:
            The class means and the ridge.
        """
        counts = self.counts.frozen.cpu().double()
        average = float(counts[counts > 0].mean())
        means = sums / counts.clamp(min=1)
        gram.addmm_(means * counts, means.T, alpha=-1).div_(average).addmm_(means, means.T)
        return means, ridge / average

    def _effective_ridge(self, trace: float) -> float:
        """Return the configured or selected ridge, or one in proportion to the trace."""
        if self.fixed_ridge == "relative":
            relative = RELATIVE_RIDGE * trace / max(1, int(self.counts.frozen.sum()))
            self.ridge = self.ridge.new_tensor(relative)
        ridge = float(self.ridge) or DEFAULT_RIDGE * trace
        minimum = MIN_RIDGE * trace
        if ridge < minimum and isinstance(self.fixed_ridge, float):
            log.warning("ridge %g is too small for float32 and is raised to %g", ridge, minimum)
            self.ridge = self.ridge.new_tensor(minimum)
        return max(ridge, minimum)

    def _add_packed(self, gram: Tensor) -> None:
        """Add a matrix to the Gram matrix, of which the upper triangle is stored."""
        packed, start = self.gram.clone(), 0
        for row, values in enumerate(gram):
            packed[start : start + len(gram) - row] += values[row:]
            start += len(gram) - row
        self.gram = packed

    def _unpacked(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the full Gram matrix, projected x projected."""
        shape = (self.projected, self.projected)
        gram = self.gram.new_empty(shape, dtype=dtype, device=device)
        start = 0
        for row in range(self.projected):
            count = self.projected - row
            gram[row, row:] = gram[row:, row] = self.gram[start : start + count]
            start += count
        return gram

    def _select_ridge(self, features: Tensor, labels: Tensor) -> None:
        """Choose the ridge by its squared errors on validation images of all tasks so far.

        A single class is always fitted best with the smallest ridge, which says nothing about
        several.
        """
        if len(labels) >= MIN_SELECTION_IMAGES and bool((labels != labels[0]).any()):
            self.errors = self.errors + self._validation_errors(features, labels)
        if self.errors.any():
            self.ridge = self.ridge.new_tensor(RIDGE_CANDIDATES[int(self.errors.argmin())])

    def _validation_errors(self, features: Tensor, labels: Tensor) -> Tensor:
        """Compute the squared validation error of each ridge candidate on the first fifth.

        Errors are summed over images and tasks, so a small task has little influence. In the dual
        form one n x n eigendecomposition serves all candidates.
        """
        hidden = self.hidden(features).cpu().double()
        targets = F.one_hot(labels).cpu().double()
        split = len(labels) // 5  # validation images first, then training images
        trained = targets[split:].sum(dim=0) > 0
        usable = trained[labels[:split].cpu()]
        kernel = hidden @ hidden.T
        values, vectors = torch.linalg.eigh(kernel[split:, split:])
        left = kernel[:split, split:][usable] @ vectors
        right = vectors.T @ targets[split:]
        errors = [
            float(((left / (values + ridge)) @ right - targets[:split][usable]).square().sum())
            for ridge in RIDGE_CANDIDATES
        ]
        return self.errors.new_tensor(errors)


class RidgeSums(ClassSums):
    """What a task adds to a `RandomRidge`.

    Args:
        statistics: What it will be added to.
        labels: Of all images of the task.
        task: Number of tasks; selects the images for choosing the ridge.
    """

    reduced = MappingProxyType(
        {**ClassSums.reduced, "gram": "sum", "weight": "sum", "selected": "sum", "largest": "max"}
    )
    gram: Tensor | None = None
    """Sum of h h^T; None if classes have their own."""
    selected: Tensor | None = None
    """Features of the images for choosing the ridge; None if it is not chosen."""

    def __init__(self, statistics: RandomRidge, labels: Tensor, task: int) -> None:
        super().__init__(statistics.sums, statistics.counts)
        self.statistics, self.labels = statistics, labels
        self.weight = self.largest = self.sums.new_zeros(statistics.projected)
        self.counts_copies = bool(statistics.blend)
        if statistics.factors is None:
            self.gram = self.sums.new_zeros(statistics.projected, statistics.projected)
        if statistics.fixed_ridge is None:
            chosen = _selection(labels.cpu(), int(statistics.seed), task)
            self.selected = self.sums.new_zeros(len(chosen), statistics.width)
            self.selected_labels = labels.to(self.sums.device)[chosen]
            self._slots = torch.full((len(labels),), -1)
            self._slots[chosen] = torch.arange(len(chosen))

    def add(self, chunk: Chunk) -> None:
        hidden = self.statistics.hidden(chunk.features)
        super().add(chunk._replace(features=hidden))
        if self.gram is not None:
            self.gram.addmm_(hidden.T, hidden)
        if self.statistics.blend and len(hidden):
            weight = hidden.abs() * hidden.norm(dim=1, keepdim=True)  # of each image in each row
            image_weight = weight * chunk.copies[:, None]  # copies count as one image
            self.weight = self.weight + weight.sum(dim=0)
            self.largest = self.largest.maximum(image_weight.amax(dim=0))
        if self.selected is not None:
            slots = self._slots[chunk.positions.cpu()]
            taken = slots >= 0
            self.selected[slots[taken]] = chunk.features[taken].to(self.selected)

    def is_shared(self) -> Tensor:
        """Return which random features no single image dominates.

        If only one image activates a random feature, its row of the Gram matrix is that image's
        vector h, scaled, so the model file would contain an embedding of a single image. With
        `blend`, the class mean of a dominated feature enters the Gram matrix instead.
        """
        return self.largest <= MAX_IMAGE_SHARE * self.weight

    def blended_gram(self) -> Tensor:
        """Return the Gram matrix, with class means in dominated features if `blend` is set.

        If h_j is replaced by its class mean, the sum of h_j h_k over a class becomes the product
        of their sums, divided by the number of images: nothing but sums is needed.
        """
        assert self.gram is not None
        if self.statistics.blend:
            dominated = ~self.is_shared()
            rows = self.sums[dominated] @ (self.sums / self.counts.clamp(min=1)).T
            self.gram[dominated], self.gram[:, dominated] = rows, rows.T
        return self.gram


def _selection(labels: Tensor, seed: int, task: int) -> Tensor:
    """Return the positions of the images for choosing the ridge, in random order.

    Only images of classes with several images count: the features of a class whose only image is
    held out say nothing about the ridge.
    """
    several = (torch.bincount(labels)[labels] > 1).nonzero()[:, 0]
    generator = keyed_generator(seed, task, "held out")
    return several[torch.randperm(len(several), generator=generator)[:MAX_SELECTION_IMAGES]]

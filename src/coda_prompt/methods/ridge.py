"""RanPAC's classifier: ridge regression on random features, solved from running sums.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251: h = ReLU(f W), G += h^T h,
C += h^T onehot(y), scores = h (G + lambda I)^-1 C. The sums do not depend on the order of classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import CannotEdit
from coda_prompt.methods.additive import (
    AdditiveMethod,
    AdditiveState,
    absorb_rows,
    other_rows,
    unite_rows,
    without_classes,
)
from coda_prompt.methods.base import MethodConfig
from coda_prompt.methods.moments import ClassFactors
from coda_prompt.methods.options import STRICT
from coda_prompt.methods.random_features import (
    CHUNK_SIZE,
    RandomFeatureMethod,
    RandomFeatures,
    default_projected,
)
from coda_prompt.model.vit import ViT
from coda_prompt.seeding import keyed_generator

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
    """Number of random features. Default: 16 per backbone feature, at most 10,000."""
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


class RidgeClassifier(AdditiveMethod, RandomFeatureMethod):
    """Mixin that classifies with `statistics`; list it before the method family in the bases."""

    config: RidgeConfig
    statistics: RandomRidge

    def __init__(self, backbone: ViT, config: RidgeConfig) -> None:
        super().__init__(backbone, config)
        width = config.width or default_projected(backbone.config.width)
        self.statistics = RandomRidge(
            self.feature_width(),
            width,
            config.ridge,
            blend=config.blend,
            balance=config.balance,
        )

    def feature_width(self) -> int:
        """The number of features of an image."""
        return self.vit_config.width

    def statistics_parts(self) -> Sequence[AdditiveState]:
        return (self.statistics,)

    def solve(self) -> None:
        self.statistics.solve()

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and self.statistics.is_consistent(self.classes_seen)


class RandomRidge(RandomFeatures):
    """Running sums over all classes seen, and the ridge regression solved from them."""

    gram: Tensor
    ridge: Tensor
    errors: Tensor

    def __init__(
        self,
        width: int,
        projected: int,
        ridge: float | Literal["relative"] | None,
        *,
        blend: bool | Literal["removable"] = False,
        balance: bool = False,
    ) -> None:
        super().__init__(width, projected)
        self.fixed_ridge = ridge
        self.factors = ClassFactors(projected) if blend == "removable" else None
        self.blend, self.balance = blend, balance
        # Upper triangle of the symmetric Gram matrix, row by row; empty if classes have their own.
        side = 0 if self.factors is not None else projected
        self.register_buffer("gram", torch.zeros(side * (side + 1) // 2))
        self.register_buffer("ridge", torch.tensor(ridge if isinstance(ridge, float) else 0.0))
        self.register_buffer("errors", torch.zeros(len(RIDGE_CANDIDATES)))

    def grow(self, classes: int, seed: int) -> None:
        super().grow(classes, seed)
        if self.factors is not None:
            self.factors.grow(classes)

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add the images of a task to the sums and solve the regression again."""
        if self.fixed_ridge is None:
            self._select_ridge(features, labels, task)
        if self.factors is None:
            self._add(features, labels)
        else:
            for row in labels.unique().tolist():
                self._add(features[labels == row], labels[labels == row])
        self.solve()

    def _add(self, features: Tensor, labels: Tensor) -> None:
        """Add images to the sums; with `blend`, these images hide each other."""
        gram = None if self.factors is not None else self._unpacked()
        sums, counts = self.sums.frozen, torch.bincount(labels, minlength=self.classes)
        if self.blend:
            task_sums, is_shared = self._added(features, labels)
            means = (task_sums / counts.clamp(min=1)).T
        for chunk, chunk_labels in zip(
            features.split(CHUNK_SIZE), labels.split(CHUNK_SIZE), strict=True
        ):
            hidden = self.hidden(chunk)
            sums = sums.index_add(1, chunk_labels, hidden.T)
            if self.blend:
                hidden = torch.where(is_shared, hidden, means[chunk_labels])
            if gram is not None:
                gram += hidden.T @ hidden
            elif self.factors is not None:
                self.factors.add(hidden, int(labels[0]))
        if gram is not None:
            self._pack(gram)
        self.sums.frozen = sums
        self.counts.frozen = self.counts.frozen + counts

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
            self._pack(without_classes(self._unpacked(torch.float64), sums, counts, rows))
        kept = other_rows(self.classes, rows)
        for bank in (self.sums, self.weight, self.counts):
            bank.keep(kept)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        for bank in (self.sums, self.weight, self.counts):
            unite_rows(bank, rows, into)
        if self.factors is not None:
            self.factors.unite_classes(rows, into)

    def absorb(self, other: RandomRidge, rows: Sequence[int]) -> None:
        if not torch.equal(self.seed.cpu(), other.seed.cpu()):
            raise CannotEdit("the models have different random features; use one seed for both")
        for bank, others in (
            (self.sums, other.sums),
            (self.weight, other.weight),
            (self.counts, other.counts),
        ):
            absorb_rows(bank, others, rows)
        if self.factors is not None and other.factors is not None:
            self.factors.absorb(other.factors, rows)
        else:
            self.gram = self.gram + other.gram.to(self.gram)
        self.errors = self.errors + other.errors.to(self.errors)
        if self.fixed_ridge is None and self.errors.any():
            self.ridge = self.ridge.new_tensor(RIDGE_CANDIDATES[int(self.errors.argmin())])

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        hidden, sums = self.hidden(features), self.sums.frozen
        sources = torch.full_like(labels, source)
        sums = sums.index_add(1, sources, hidden.T, alpha=-1).index_add(1, labels, hidden.T)
        self.sums.frozen = sums
        moved = torch.bincount(labels, minlength=self.classes)
        self.counts.frozen = self.counts.frozen + moved
        self.counts.frozen[source] -= len(labels)
        if self.factors is not None:
            self.factors.move_images(hidden, source, labels)

    def is_consistent(self, classes: int) -> bool:
        """Whether all sizes fit the number of classes."""
        rows = {len(self.sums), len(self.weight), len(self.counts)}
        return rows == {classes} and (self.factors is None or self.factors.is_consistent(classes))

    def _added(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the class sums of a task, and the random features no single image dominates.

        If only one image activates a random feature, its row of the Gram matrix is that image's
        vector h, scaled, so the model file would contain an embedding of a single image. With
        `blend`, the class mean of a dominated feature enters the Gram matrix instead.

        Returns:
            The sums, projected x classes, and a mask over the random features.
        """
        total = largest = self.gram.new_zeros(self.projected)
        sums = torch.zeros_like(self.sums.frozen)
        _, inverse, counts = features.unique(dim=0, return_inverse=True, return_counts=True)
        copies = counts[inverse]
        for chunk, chunk_labels, chunk_copies in zip(
            features.split(CHUNK_SIZE),
            labels.split(CHUNK_SIZE),
            copies.split(CHUNK_SIZE),
            strict=True,
        ):
            hidden = self.hidden(chunk)
            sums = sums.index_add(1, chunk_labels, hidden.T)
            weight = hidden * hidden.norm(dim=1, keepdim=True)  # of each image in each row
            image_weight = weight * chunk_copies[:, None]  # copies count as one image
            total = total + weight.sum(dim=0)
            largest = largest.maximum(image_weight.amax(dim=0))
        return sums, largest <= MAX_IMAGE_SHARE * total

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

    def _pack(self, gram: Tensor) -> None:
        """Store the upper triangle of the Gram matrix."""
        self.gram = torch.cat([row[index:] for index, row in enumerate(gram)]).to(self.gram)

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

    def _select_ridge(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Choose the ridge by its squared errors on validation images of all tasks so far.

        Only images of classes with several images count: the features of a class whose only image
        is held out say nothing about the ridge. A single class is always fitted best with the
        smallest ridge, which says nothing about several.
        """
        several = torch.bincount(labels)[labels] > 1
        features, labels = features[several], labels[several]
        if len(labels) >= MIN_SELECTION_IMAGES and bool((labels != labels[0]).any()):
            self.errors = self.errors + self._validation_errors(features, labels, task)
        if self.errors.any():
            self.ridge = self.ridge.new_tensor(RIDGE_CANDIDATES[int(self.errors.argmin())])

    def _validation_errors(self, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Compute the squared validation error of each ridge candidate on a fifth of the task.

        Errors are summed over images and tasks, so a small task has little influence. In the dual
        form one n x n eigendecomposition serves all candidates.
        """
        generator = keyed_generator(int(self.seed), task, "held out")
        selected = torch.randperm(len(labels), generator=generator)[:MAX_SELECTION_IMAGES]
        selected = selected.to(features.device)
        hidden = self.hidden(features[selected]).cpu().double()
        targets = F.one_hot(labels[selected]).cpu().double()
        split = len(selected) // 5  # validation images first, then training images
        trained = targets[split:].sum(dim=0) > 0
        usable = trained[labels[selected[:split]].cpu()]
        kernel = hidden @ hidden.T
        values, vectors = torch.linalg.eigh(kernel[split:, split:])
        left = kernel[:split, split:][usable] @ vectors
        right = vectors.T @ targets[split:]
        errors = [
            float(((left / (values + ridge)) @ right - targets[:split][usable]).square().sum())
            for ridge in RIDGE_CANDIDATES
        ]
        return self.errors.new_tensor(errors)

"""RanPAC's classifier: ridge regression on random features, solved from running sums.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251: h = ReLU(f W), G += h^T h,
C += h^T onehot(y), scores = h (G + lambda I)^-1 C. The sums do not depend on the order of classes.
"""

from __future__ import annotations

import logging

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.methods.base import MethodConfig
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
    ridge: float | None = Field(default=None, gt=0)
    """Ridge parameter. Default: selected on a validation fifth of every task so far."""
    blend: bool = False
    """Use class means in the Gram matrix where one image dominates a random feature, so that it
    contains no single image's features, even in small tasks. Enabled by `coda learn`."""
    balance: bool = False
    """Weight all classes equally, regardless of their number of images. Enabled by `coda learn`."""


class RidgeClassifier(RandomFeatureMethod):
    """Mixin that classifies with `statistics`; list it before the method family in the bases."""

    config: RidgeConfig
    statistics: RandomRidge

    def __init__(self, backbone: ViT, config: RidgeConfig) -> None:
        super().__init__(backbone, config)
        features = backbone.config.width
        width = config.width or default_projected(features)
        self.statistics = RandomRidge(
            features, width, config.ridge, blend=config.blend, balance=config.balance
        )


class RandomRidge(RandomFeatures):
    """Running sums over all classes seen, and the ridge regression solved from them."""

    gram: Tensor
    ridge: Tensor
    errors: Tensor

    def __init__(
        self,
        width: int,
        projected: int,
        ridge: float | None,
        *,
        blend: bool = False,
        balance: bool = False,
    ) -> None:
        super().__init__(width, projected)
        self.fixed_ridge, self.blend, self.balance = ridge, blend, balance
        # Upper triangle of the symmetric Gram matrix, row by row.
        self.register_buffer("gram", torch.zeros(projected * (projected + 1) // 2))
        self.register_buffer("ridge", torch.tensor(ridge or 0.0))
        self.register_buffer("errors", torch.zeros(len(RIDGE_CANDIDATES)))

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add the images of a task to the sums and solve the regression again."""
        if self.fixed_ridge is None and _can_select_ridge(labels):
            self.errors = self.errors + self._validation_errors(features, labels, task)
            self.ridge = self.ridge.new_tensor(RIDGE_CANDIDATES[int(self.errors.argmin())])
        gram, sums = self._unpacked(), self.sums.frozen
        counts = torch.bincount(labels, minlength=self.classes)
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
            gram = gram + hidden.T @ hidden
        self.gram = torch.cat([row[index:] for index, row in enumerate(gram)])
        self.sums.frozen = sums
        self.counts.frozen = self.counts.frozen + counts
        # On the CPU, because not every accelerator supports float64.
        damped, targets = gram.to("cpu", torch.float64, copy=True), sums.cpu().double()
        ridge = self._effective_ridge(float(damped.trace()))
        if self.balance:
            damped, targets, ridge = self._balanced(damped, targets, ridge)
        damped.diagonal().add_(ridge)
        solved = torch.cholesky_solve(targets, torch.linalg.cholesky(damped))
        self.weight.frozen = solved.to(self.weight.frozen).contiguous()

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

    def _balanced(self, gram: Tensor, sums: Tensor, ridge: float) -> tuple[Tensor, Tensor, float]:
        """Reweight the sums as if all classes had the same number of images.

        Each class contributes its own mean; the scatter around the means is pooled over classes.
        All results are divided by the average class size, which does not change the solution. With
        classes of equal size the solution is the same as without balancing.
        """
        counts = self.counts.frozen.cpu().double()
        average = float(counts[counts > 0].mean())
        means = sums / counts.clamp(min=1)
        scatter = gram - (means * counts) @ means.T
        return scatter / average + means @ means.T, means, ridge / average

    def _effective_ridge(self, trace: float) -> float:
        """Return the configured or selected ridge, or a default in proportion to the trace."""
        ridge = float(self.ridge) or DEFAULT_RIDGE * trace
        minimum = MIN_RIDGE * trace
        if ridge < minimum and self.fixed_ridge is not None:
            log.warning("ridge %g is too small for float32 and is raised to %g", ridge, minimum)
            self.ridge = self.ridge.new_tensor(minimum)
        return max(ridge, minimum)

    def _unpacked(self) -> Tensor:
        """Return the full Gram matrix, projected x projected."""
        gram = self.gram.new_zeros(self.projected, self.projected)
        start = 0
        for row in range(self.projected):
            count = self.projected - row
            gram[row, row:] = self.gram[start : start + count]
            start += count
        return gram + gram.triu(1).T

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
        kernel = hidden @ hidden.T
        values, vectors = torch.linalg.eigh(kernel[split:, split:])
        left = kernel[:split, split:] @ vectors
        right = vectors.T @ targets[split:]
        errors = [
            float(((left / (values + ridge)) @ right - targets[:split]).square().sum())
            for ridge in RIDGE_CANDIDATES
        ]
        return self.errors.new_tensor(errors)


def _can_select_ridge(labels: Tensor) -> bool:
    """Whether a task has enough images, and several classes.

    A single class is always fitted best with the smallest ridge, which says nothing about several.
    """
    return len(labels) >= MIN_SELECTION_IMAGES and bool((labels != labels[0]).any())

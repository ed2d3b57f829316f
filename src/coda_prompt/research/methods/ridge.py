"""RanPAC's classifier: ridge regression on random features, solved from running sums.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251: h = ReLU(f W), G += h^T h,
C += h^T onehot(y), scores = h (G + lambda I)^-1 C. The sums do not depend on the order of classes.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.base import MethodConfig
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.random_features import RandomFeatures
from coda_prompt.research.methods.sums import Chunk, ClassSums
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.statistics.moments import Moments, squared_sums
from coda_prompt.statistics.ridge import MIN_RIDGE, solve_ridge

log = logging.getLogger(__name__)

RIDGE_CANDIDATES = tuple(10.0**power for power in range(-4, 9))
MAX_SELECTION_IMAGES = 4000
"""Maximum number of images for selecting the ridge parameter; the cost is cubic in it."""
MIN_SELECTION_IMAGES = 10
DEFAULT_RIDGE = 1e-5
"""Ridge as a fraction of the Gram matrix's trace until it can be selected; works well on pocket."""
MAX_WIDTH = 20_000


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
    balance: bool = False
    """Weight all classes equally, regardless of their number of images, as `coda learn` does."""


class RandomRidge(RandomFeatures):
    """Running sums over all classes seen, and the ridge regression solved from them."""

    gram: Tensor
    ridge: Tensor
    errors: Tensor

    def __init__(self, width: int, projected: int, config: RidgeConfig) -> None:
        super().__init__(width, projected)
        self.fixed_ridge = ridge = config.ridge
        self.balance = config.balance
        # Upper triangle of the symmetric Gram matrix, row by row.
        self.register_buffer("gram", torch.zeros(projected * (projected + 1) // 2))
        self.register_buffer("ridge", torch.tensor(ridge if isinstance(ridge, float) else 0.0))
        self.register_buffer("errors", torch.zeros(len(RIDGE_CANDIDATES)))

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add the images of a task to the sums and solve the regression again."""
        sums = RidgeSums(self, labels, task)
        sums.add_all(features, labels)
        self.add_sums(sums)

    def add_sums(self, sums: RidgeSums) -> None:
        """Add the sums of a task and solve the regression again."""
        if sums.selected is not None:
            self._select_ridge(sums.selected, sums.selected_labels)
        self._add_packed(sums.gram)
        del sums.gram  # frees its memory before the regression is solved
        sums.add_to(self.sums, self.counts)
        self.solve()

    def solve(self) -> None:
        """Solve the regression from the sums."""
        gram, sums = self._unpacked().numpy(), self.sums.frozen.T.cpu().double().numpy()
        counts, trace = self.counts.frozen.cpu().numpy(), float(gram.trace())
        ridge: float | Literal["relative"] = "relative"
        if self.fixed_ridge != "relative":
            ridge = float(self.ridge) or DEFAULT_RIDGE * trace
            if ridge < MIN_RIDGE * trace and isinstance(self.fixed_ridge, float):
                minimum = MIN_RIDGE * trace
                log.warning("ridge %g is too small for float32 and is raised to %g", ridge, minimum)
                self.ridge = self.ridge.new_tensor(minimum)
        gram -= squared_sums(sums, counts)
        weight, _ = solve_ridge(Moments(counts, sums, gram, None), ridge, balance=self.balance)
        self.weight.frozen = torch.from_numpy(weight.T).to(self.weight.frozen).contiguous()

    def _add_packed(self, gram: Tensor) -> None:
        """Add a matrix to the Gram matrix, of which the upper triangle is stored."""
        packed, start = self.gram.clone(), 0
        for row, values in enumerate(gram):
            packed[start : start + len(gram) - row] += values[row:]
            start += len(gram) - row
        self.gram = packed

    def _unpacked(self) -> Tensor:
        """Return the full Gram matrix, projected x projected, in float64 on the CPU."""
        gram = torch.empty(self.projected, self.projected, dtype=torch.float64)
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

    reduced = MappingProxyType({**ClassSums.reduced, "gram": "sum", "selected": "sum"})
    gram: Tensor
    """Sum of h h^T."""
    selected: Tensor | None = None
    """Features of the images for choosing the ridge; None if it is not chosen."""

    def __init__(self, statistics: RandomRidge, labels: Tensor, task: int) -> None:
        super().__init__(statistics.sums, statistics.counts)
        self.statistics, self.labels = statistics, labels
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
        self.gram.addmm_(hidden.T, hidden)
        if self.selected is not None:
            slots = self._slots[chunk.positions.cpu()]
            taken = slots >= 0
            self.selected[slots[taken]] = chunk.features[taken].to(self.selected)


def _selection(labels: Tensor, seed: int, task: int) -> Tensor:
    """Return the positions of the images for choosing the ridge, in random order.

    Only images of classes with several images count: the features of a class whose only image is
    held out say nothing about the ridge.
    """
    several = (torch.bincount(labels)[labels] > 1).nonzero()[:, 0]
    generator = keyed_generator(seed, task, "held out")
    return several[torch.randperm(len(several), generator=generator)[:MAX_SELECTION_IMAGES]]

"""A classifier in closed form: ridge regression on random features, from running sums.

After RanPAC (McDonnell et al. 2023): h = ReLU(f W), G += h^T h, C += h^T onehot(y),
scores = h (G + lambda I)^-1 C. Sums do not care in which order classes come.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.methods.bank import Bank
from coda_prompt.methods.base import Method, MethodConfig, TaskBrief, full_precision
from coda_prompt.methods.options import STRICT
from coda_prompt.model.vit import ViT
from coda_prompt.seeding import keyed_generator, keyed_seed

log = logging.getLogger(__name__)

RIDGES = tuple(10.0**power for power in range(-4, 9))
MOST_FOR_RIDGE = 4000
"""Images the ridge parameter is chosen on at the most: its cost is cubic in them."""
FEWEST_FOR_RIDGE = 10
UNCHOSEN = 1e-5
"""The ridge in shares of the Gram matrix's trace while all tasks had one class: good on pocket."""
MOST_FEATURES = 20_000
PART = 4096
"""Images that are projected at once."""
MOST_OF_A_ROW = 0.5
"""Share of a row of a task's Gram matrix that may come from one image."""
RESOLVED = 1e-6
"""Below this share the rounding of a float32 Gram matrix outweighs the ridge."""


@dataclass(frozen=True, config=STRICT)
class RidgeConfig(MethodConfig):
    """Options of methods with this classifier."""

    width: int | None = Field(default=None, ge=1, le=MOST_FEATURES)
    """Random features; None: 16 per feature of the backbone, at most 10,000."""
    ridge: float | None = Field(default=None, gt=0)
    """Ridge parameter; None: chosen on a held-out fifth of the images of all tasks so far."""
    blend: bool = False
    """Keep no image's features in the sums, however few images a task has. `coda learn` does."""
    balance: bool = False
    """Every class counts alike, however many images it has. `coda learn` does."""


class RidgeClassifier(Method):
    """A method, named before its family among the bases, that classifies by `statistics`."""

    fits = True
    temperature = 0.1  # of scores between 0 and 1: fitted values on pocket are around it
    config: RidgeConfig

    def __init__(self, backbone: ViT, config: RidgeConfig) -> None:
        super().__init__(backbone, config)
        features = backbone.config.width
        width = config.width or min(10_000, 16 * features)
        self.statistics = RandomRidge(
            features, width, config.ridge, blend=config.blend, balance=config.balance
        )

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        seed = keyed_seed(brief.seed, "projection") % 2**32
        self.statistics.grow(self.classes_seen, seed)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.statistics.fit(features, labels, len(self.task_sizes))

    def _is_consistent(self) -> bool:
        statistics = self.statistics
        rows = {len(statistics.sums), len(statistics.weight), len(statistics.counts)}
        return super()._is_consistent() and rows == {self.classes_seen}


class RandomRidge(nn.Module):
    """The statistics of all classes seen, and the map they give."""

    seed: Tensor
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
        super().__init__()
        self.width, self.projected, self.fixed_ridge = width, projected, ridge
        self.blend, self.balance = blend, balance
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        # A symmetric matrix, the rows of its upper triangle one after another.
        self.register_buffer("gram", torch.zeros(projected * (projected + 1) // 2))
        self.sums, self.weight = Bank(groups=projected), Bank(groups=projected)
        self.counts = Bank(dtype=torch.int64)
        self.register_buffer("ridge", torch.tensor(ridge or 0.0))
        self.register_buffer("errors", torch.zeros(len(RIDGES)))
        self._projection: tuple[int, Tensor] | None = None

    @property
    def classes(self) -> int:
        return len(self.sums)

    def grow(self, classes: int, seed: int) -> None:
        """Add zeros up to this number of classes; the first seed counts."""
        if not self.classes:
            self.seed = self.seed.new_tensor(seed)
        new = classes - self.classes
        self.sums.append(torch.zeros(self.projected, new))
        self.weight.append(torch.zeros(self.projected, new))
        self.counts.append(torch.zeros(new))

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add these images to the sums and solve again."""
        if self.fixed_ridge is None and _can_choose(labels):
            self.errors = self.errors + self._held_out_errors(features, labels, task)
            self.ridge = self.ridge.new_tensor(RIDGES[int(self.errors.argmin())])
        gram, sums = self._unpacked(), self.sums.frozen
        counts = torch.bincount(labels, minlength=self.classes)
        if self.blend:
            added, mixed = self._added(features, labels)
            means = (added / counts.clamp(min=1)).T
        for part, part_labels in zip(features.split(PART), labels.split(PART), strict=True):
            hidden = self.hidden(part)
            sums = sums.index_add(1, part_labels, hidden.T)
            if self.blend:
                hidden = torch.where(mixed, hidden, means[part_labels])
            gram = gram + hidden.T @ hidden
        self.gram = torch.cat([row[place:] for place, row in enumerate(gram)])
        self.sums.frozen = sums
        self.counts.frozen = self.counts.frozen + counts
        # On the CPU in float64, which not every accelerator has.
        damped, targets = gram.to("cpu", torch.float64, copy=True), sums.cpu().double()
        ridge = self._used_ridge(float(damped.trace()))
        if self.balance:
            damped, targets, ridge = self._balanced(damped, targets, ridge)
        damped.diagonal().add_(ridge)
        solved = torch.cholesky_solve(targets, torch.linalg.cholesky(damped))
        self.weight.frozen = solved.to(self.weight.frozen).contiguous()

    def forward(self, features: Tensor) -> Tensor:
        """Scores, B x classes."""
        hidden = self.hidden(features)
        with full_precision(features.device):
            return hidden @ self.weight.frozen

    def hidden(self, features: Tensor) -> Tensor:
        """h = ReLU(f W), n x projected."""
        with full_precision(features.device):
            features = features.to(self.weight.frozen.dtype)
            return F.relu(features @ self.projection(features))

    def projection(self, like: Tensor) -> Tensor:
        """W, made again from its seed instead of being stored: NumPy froze this generator."""
        held = self._projection
        if held is not None and torch.compiler.is_exporting():
            return held[1]  # a graph cannot look at the seed's value
        seed = int(self.seed)
        if held is None or held[0] != seed or held[1].device != like.device:
            shape = (self.width, self.projected)
            drawn = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
            held = self._projection = (seed, torch.from_numpy(drawn).to(like.device))
        return held[1].to(like.dtype)

    def _added(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of these images, and which random features answer to several of them.

        In the Gram matrix the row of a feature that answers to one image would be that image's
        vector h, scaled: an embedding of a single image in the file of a model. Blended, such a
        feature counts there with its mean over the class instead.
        """
        total = most = self.gram.new_zeros(self.projected)
        added = torch.zeros_like(self.sums.frozen)
        _, copies, times = features.unique(dim=0, return_inverse=True, return_counts=True)
        for part, part_labels, same in zip(
            features.split(PART), labels.split(PART), times[copies].split(PART), strict=True
        ):
            hidden = self.hidden(part)
            added = added.index_add(1, part_labels, hidden.T)
            weight = hidden * hidden.norm(dim=1, keepdim=True)  # of each image in each row
            own = weight * same[:, None]  # copies are one image
            total, most = total + weight.sum(dim=0), most.maximum(own.amax(dim=0))
        return added, most <= MOST_OF_A_ROW * total

    def _balanced(self, gram: Tensor, sums: Tensor, ridge: float) -> tuple[Tensor, Tensor, float]:
        """As if every class had as many images as they have on average, up to that factor.

        Of a class with few images the mean is known, and how images scatter around a mean is taken
        from all classes together. Where all have as many, nothing changes.
        """
        counts = self.counts.frozen.cpu().double()
        average = float(counts[counts > 0].mean())
        means = sums / counts.clamp(min=1)
        scatter = gram - (means * counts) @ means.T
        return scatter / average + means @ means.T, means, ridge / average

    def _used_ridge(self, trace: float) -> float:
        """The one given or chosen; before there was anything to choose it on, in scale."""
        ridge = float(self.ridge) or UNCHOSEN * trace
        least = RESOLVED * trace
        if ridge < least and self.fixed_ridge is not None:
            log.warning("ridge %g is raised to %g, the least that float32 resolves", ridge, least)
            self.ridge = self.ridge.new_tensor(least)
        return max(ridge, least)

    def _unpacked(self) -> Tensor:
        gram = self.gram.new_zeros(self.projected, self.projected)
        start = 0
        for place in range(self.projected):
            count = self.projected - place
            gram[place, place:] = self.gram[start : start + count]
            start += count
        return gram + gram.triu(1).T

    def _held_out_errors(self, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Of each candidate: squared errors on a random fifth, learned from the others, summed.

        Summed over tasks as well, they let a task of few images change little. In the dual form
        one eigendecomposition, n x n, serves all candidates.
        """
        generator = keyed_generator(int(self.seed), task, "held out")
        chosen = torch.randperm(len(labels), generator=generator)[:MOST_FOR_RIDGE]
        chosen = chosen.to(features.device)
        hidden = self.hidden(features[chosen]).cpu().double()
        targets = F.one_hot(labels[chosen]).cpu().double()
        held = len(chosen) // 5
        kernel = hidden @ hidden.T
        values, vectors = torch.linalg.eigh(kernel[held:, held:])
        left = kernel[:held, held:] @ vectors
        right = vectors.T @ targets[held:]
        errors = [
            float(((left / (values + ridge)) @ right - targets[:held]).square().sum())
            for ridge in RIDGES
        ]
        return self.errors.new_tensor(errors)


def _can_choose(labels: Tensor) -> bool:
    """One class is fitted best by no ridge at all, which says nothing about several."""
    return len(labels) >= FEWEST_FOR_RIDGE and bool((labels != labels[0]).any())

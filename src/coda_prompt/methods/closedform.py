"""Yardsticks without training on the frozen features: nearest class mean and RanPAC."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.methods.base import (
    Method,
    MethodConfig,
    ParameterCount,
    TaskBrief,
    cosines,
    full_precision,
)
from coda_prompt.methods.options import STRICT
from coda_prompt.model.vit import ViT
from coda_prompt.seeding import keyed_generator, keyed_seed

log = logging.getLogger(__name__)


class ClosedForm(Method):
    """The query is the feature, and a task is learned from all its queries at once."""

    needs_queries = True
    closed_form = True
    sums: Tensor

    def features(self, images: Tensor, queries: Tensor | None) -> Tensor:
        assert queries is not None
        return queries

    def logits(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        return self.scores(self.queries(images) if queries is None else queries)

    def scores(self, queries: Tensor) -> Tensor:
        """B x classes seen."""
        raise NotImplementedError

    def _sizes_agree(self, state: Mapping[str, Tensor]) -> bool:
        per_class = {name: axis for name, axis in self.grows.items() if name != "task_sizes"}
        sizes = {state[name].shape[axis] for name, axis in per_class.items()}
        return super()._sizes_agree(state) and sizes == {int(state["task_sizes"].sum())}

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.sums.numel())


class NearestClassMean(ClosedForm):
    """Nearest class mean: cosine similarity to the mean frozen feature of each class."""

    variants = MappingProxyType({"ncm": {}})
    grows: ClassVar[Mapping[str, int]] = {**ClosedForm.grows, "sums": 0, "counts": 0}

    counts: Tensor

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.register_buffer("sums", torch.zeros(0, backbone.config.width))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        new = self.classes_seen - len(self.sums)
        self.sums = F.pad(self.sums, (0, 0, 0, new))
        self.counts = F.pad(self.counts, (0, new))

    def fit(self, queries: Tensor, labels: Tensor) -> None:
        self.sums = self.sums.index_add(0, labels, queries.to(self.sums.dtype))
        self.counts = self.counts + torch.bincount(labels, minlength=len(self.counts))

    def scores(self, queries: Tensor) -> Tensor:
        scores = cosines(queries, self.sums)
        return scores.masked_fill((self.counts == 0).to(scores.device), -1.0)


@dataclass(frozen=True, config=STRICT)
class RanPACConfig(MethodConfig):
    """Options of RanPAC."""

    width: int | None = Field(default=None, ge=1)
    """Random features; None: 16 per feature of the backbone, at most 10,000."""
    ridge: float | None = Field(default=None, gt=0)
    """Ridge parameter; None: chosen anew in each task on a held-out fifth of its images."""


class RanPAC(ClosedForm):
    """RanPAC: ridge regression on a random ReLU projection of frozen features.

    After McDonnell et al. 2023. The projection is fixed and the statistics are running sums.
    """

    Config: ClassVar[type[MethodConfig]] = RanPACConfig
    variants = MappingProxyType({"ranpac": {}})
    grows: ClassVar[Mapping[str, int]] = {**ClosedForm.grows, "sums": 1, "weight": 1}
    config: RanPACConfig

    seed: Tensor
    gram: Tensor
    weight: Tensor
    ridge: Tensor

    RIDGES = tuple(10.0**power for power in range(-4, 9))
    MOST_FOR_RIDGE = 4000
    """Images the ridge parameter is chosen on at the most: its cost is cubic in them."""
    FEWEST_FOR_RIDGE = 10

    def __init__(self, backbone: ViT, config: RanPACConfig) -> None:
        super().__init__(backbone, config)
        self.projected = config.width or min(10_000, 16 * backbone.config.width)
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gram", torch.zeros(self.projected, self.projected))
        self.register_buffer("sums", torch.zeros(self.projected, 0))
        self.register_buffer("weight", torch.zeros(self.projected, 0))
        self.register_buffer("ridge", torch.tensor(config.ridge or 1e2))
        self._projection: tuple[int, Tensor] | None = None

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if brief.index == 0:
            self.seed = self.seed.new_tensor(keyed_seed(brief.seed, "projection") % 2**32)
        new = self.classes_seen - self.sums.shape[1]
        self.sums = F.pad(self.sums, (0, new))
        self.weight = F.pad(self.weight, (0, new))

    def fit(self, queries: Tensor, labels: Tensor) -> None:
        """G += h^T h, C += h^T onehot(y), head = (G + lambda I)^-1 C."""
        if self.config.ridge is None and len(labels) >= self.FEWEST_FOR_RIDGE:
            self.ridge = self.ridge.new_tensor(self._best_ridge(queries, labels))
        gram, sums = self.gram, self.sums
        for part, part_labels in zip(queries.split(4096), labels.split(4096), strict=True):
            hidden = self.hidden(part).to(gram.dtype)
            gram = gram + hidden.T @ hidden
            sums = sums.index_add(1, part_labels, hidden.T)
        self.gram, self.sums = gram, sums
        # On the CPU in float64, which not every accelerator has.
        damped = gram.to("cpu", torch.float64, copy=True)
        # Below this the rounding of a float32 Gram matrix outweighs the ridge.
        least = 1e-6 * float(damped.trace())
        if float(self.ridge) < least:
            log.warning(
                "ridge %g is raised to %g, the least that float32 resolves", self.ridge, least
            )
            self.ridge = self.ridge.new_tensor(least)
        damped.diagonal().add_(float(self.ridge))
        solved = torch.cholesky_solve(sums.cpu().double(), torch.linalg.cholesky(damped))
        self.weight = solved.to(self.weight).contiguous()

    def scores(self, queries: Tensor) -> Tensor:
        hidden = self.hidden(queries)
        with full_precision(queries.device):
            return hidden @ self.weight

    def hidden(self, queries: Tensor) -> Tensor:
        """h = ReLU(f W), n x width."""
        with full_precision(queries.device):
            queries = queries.to(self.weight.dtype)
            return F.relu(queries @ self.projection(queries))

    def projection(self, like: Tensor) -> Tensor:
        """W, made again from its seed instead of being stored: NumPy froze this generator."""
        seed, held = int(self.seed), self._projection
        if held is None or held[0] != seed or held[1].device != like.device:
            shape = (self.backbone.config.width, self.projected)
            drawn = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
            held = self._projection = (seed, torch.from_numpy(drawn).to(like.device))
        return held[1].to(like.dtype)

    def _best_ridge(self, queries: Tensor, labels: Tensor) -> float:
        """The ridge with the least squared error on a random fifth, learned from the others.

        In the dual form one eigendecomposition, n x n, serves all candidates.
        """
        generator = keyed_generator(int(self.seed), len(self.task_sizes), "held out")
        chosen = torch.randperm(len(labels), generator=generator)[: self.MOST_FOR_RIDGE]
        chosen = chosen.to(queries.device)
        hidden = self.hidden(queries[chosen]).cpu().double()
        targets = F.one_hot(labels[chosen]).cpu().double()
        held = len(chosen) // 5
        kernel = hidden @ hidden.T
        values, vectors = torch.linalg.eigh(kernel[held:, held:])
        left = kernel[:held, held:] @ vectors
        right = vectors.T @ targets[held:]
        errors = [
            float(((left / (values + ridge)) @ right - targets[:held]).square().mean())
            for ridge in self.RIDGES
        ]
        return self.RIDGES[int(np.argmin(errors))]

"""EASE: Expandable Subspace Ensemble.

Zhou et al., CVPR 2024, https://arxiv.org/abs/2403.12030. Every task adds adapters, whose features
are a subspace; classes have a prototype in each. Old classes have no images for prototypes in later
subspaces: these are synthesised (eq. 9), from the classes of the subspace's own task (`paper`), or
from all classes since then (`release`, recomputed after each task).
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.adapters import AdapterConfig, AdapterMethod
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import ParameterCount, TaskBrief
from coda_prompt.research.methods.frozen_cache import FrozenCache
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import Images, ViT


@dataclass(frozen=True, config=STRICT)
class EASEConfig(AdapterConfig):
    """Options of EASE."""

    alpha: float = Field(default=0.1, ge=0)
    """Weight of all subspaces other than the one of a class's own task, together."""
    preset: Literal["paper", "release"] = "release"
    """The classes that missing prototypes are synthesised from."""


class EASE(AdapterMethod):
    """EASE: one set of adapters per task; prototypes in the subspaces of all of them."""

    Config = EASEConfig
    variants = MappingProxyType({"ease": {}})
    config: EASEConfig
    learning_rate = 0.025

    def __init__(self, backbone: ViT, config: EASEConfig) -> None:
        super().__init__(backbone, config)
        self.homes = Bank(dtype=torch.int64)
        """The subspace of each class's first task."""
        self.sums, self.counts = Bank((backbone.config.width,)), Bank(dtype=torch.int64)
        """Of the features of a class in a subspace, for each pair that had images."""
        self.pairs = Bank((2,), dtype=torch.int64)
        """The class and subspace of each sum."""
        self._completed = FrozenCache(partial(complete, later=config.preset == "release"))

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        self.homes.append([len(self.adapters) - 1] * (self.classes_seen - len(self.homes)))

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        """B x (sets D)."""
        return self.all_adapted(images).flatten(1)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        by_set = features.unflatten(1, (len(self.adapters), -1)).to(self.sums.frozen)
        known = {tuple(pair): position for position, pair in enumerate(self.pairs.rows.tolist())}
        for row in labels.unique().tolist():
            sums, count = by_set[labels == row].sum(0), int((labels == row).sum())
            for subspace, total in enumerate(sums):
                position = known.get((row, subspace))
                if position is None:
                    self.pairs.append(torch.tensor([[row, subspace]]))
                    self.sums.append(total[None])
                    self.counts.append([count])
                else:
                    self.sums.frozen[position] += total
                    self.counts.frozen[position] += count

    def prototypes(self) -> tuple[Tensor, Tensor]:
        """Prototypes, classes x sets x D, and which of them are real."""
        tensors = (self.sums.frozen, self.counts.frozen, self.pairs.frozen, self.homes.frozen)
        return self._completed(*tensors, self.adapters.up.frozen)

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        """cos(f_i, w_i) + alpha / t sum_{j != i} cos(f_j, w_j), i being a class's own subspace."""
        prototypes, real = self.prototypes()
        features = self.all_adapted(images).to(prototypes.dtype)
        with full_precision(features.device):
            cosines = torch.einsum(
                "btd,ctd->bct", F.normalize(features, dim=-1), F.normalize(prototypes, dim=-1)
            )
        own = F.one_hot(self.homes.frozen.to(cosines.device), cosines.shape[2])
        others = self.config.alpha / max(cosines.shape[2] - 1, 1)
        scores = (cosines * torch.where(own > 0, 1.0, others)).sum(2)
        return scores.masked_fill(~(real & (own > 0)).any(1), -1 - self.config.alpha)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(self.adapters.count(), self.sums.frozen.numel())

    def _is_consistent(self) -> bool:
        agree = len(self.sums) == len(self.counts) == len(self.pairs)
        inside = torch.tensor(
            [self.classes_seen, len(self.adapters)], device=self.pairs.rows.device
        )
        agree &= bool(((self.pairs.rows >= 0) & (self.pairs.rows < inside)).all())
        return super()._is_consistent() and agree and len(self.homes) == self.classes_seen


def complete(
    sums: Tensor, counts: Tensor, pairs: Tensor, homes: Tensor, up: Tensor, later: bool
) -> tuple[Tensor, Tensor]:
    """Synthesise missing prototypes: w_{c,j} = sum_c' softmax_c'(cos(w_{c,i}, w_{c',i})) w_{c',j}.

    i is the own subspace of class c. The classes c' have real prototypes in both subspaces; without
    `later`, j is their own. `up` tells the number of subspaces.
    """
    classes, subspaces = len(homes), up.shape[1]
    counts, pairs, homes = (each.to(sums.device) for each in (counts, pairs, homes))
    prototypes = sums.new_zeros(classes, subspaces, sums.shape[1])
    real = torch.zeros(classes, subspaces, dtype=torch.bool, device=sums.device)
    prototypes[pairs[:, 0], pairs[:, 1]] = sums / counts[:, None]
    real[pairs[:, 0], pairs[:, 1]] = True
    completed = prototypes.clone()
    for i in range(subspaces):
        unit = F.normalize(prototypes[:, i], dim=-1)
        similarity = unit @ unit.T
        for j in range(subspaces):
            donors = real[:, i] & real[:, j] & (later | (homes == j))
            weights = similarity.masked_fill(~donors, -torch.inf).softmax(1).nan_to_num()
            missing = (homes == i) & ~real[:, j]
            synthesised = torch.where(missing[:, None], weights @ prototypes[:, j], 0.0)
            completed[:, j] += synthesised
    return completed, real

"""InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning.

Liang and Li, CVPR 2024, https://arxiv.org/abs/2404.00228. As in the released code, gradients of old
tasks are replaced by the second moments of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, ParameterCount, TaskBrief
from coda_prompt.research.methods.lowrank import (
    LowRankDelta,
    LowRankMethod,
    attention_moments,
    check_rank,
    edits_of,
)
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.vit.vit import BlockEdits, ViT

NO_ENERGY = 1e-7
"""Singular values below this share of the largest one are rounding."""


@dataclass(frozen=True, config=STRICT)
class InfLoRAConfig(MethodConfig):
    """Options of InfLoRA."""

    rank: int = Field(default=10, ge=1)
    """Rank of the component of a task."""
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Share of the energy of a task's inputs that later tasks must not use (lambda): 0.95 for
    CIFAR-100 and 0.98 for ImageNet-R in the paper."""
    tasks: int | None = Field(default=None, ge=1)
    """Number of tasks T, over which the share rises to 1; None: it does not rise."""


class InfLoRA(LowRankMethod):
    """InfLoRA: low-rank updates of keys and values in input directions that old tasks do not use.

    A, the input side, is computed before a task and fixed; B, the output side, trains.
    """

    Config = InfLoRAConfig
    variants = MappingProxyType({"inflora": {}})
    prepares_on = "augmented"
    concludes_on = "augmented"
    learning_rate = 5e-4
    config: InfLoRAConfig

    def __init__(self, backbone: ViT, config: InfLoRAConfig) -> None:
        super().__init__(backbone, config)
        depth, width = backbone.config.depth, backbone.config.width
        check_rank("InfLoRA", config.rank, width)
        self.delta = LowRankDelta(backbone.config, ("k", "v"), shared_down=True)
        # Orthonormal rows: the input directions of old tasks in each block (M).
        self.protected = nn.ModuleList(Bank((width,)) for _ in range(depth))

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if len(brief.classes) > 1:  # no loss could train the component of a single class
            inputs = self.delta.banks()[0]
            depth, _, width = inputs.frozen.shape
            inputs.append(torch.zeros(depth, self.config.rank, width))
            self.delta.open_up(self.config.rank)

    def prepare(self, batches: Iterator[TrainingBatch]) -> None:
        """A = U[:, :r]^T / sqrt(3), where U S V^T = (I - M M^T) E[x x^T]."""
        inputs, rank = self.delta.banks()[0], self.config.rank
        if self.delta.banks()[1].trainable is None:
            return
        moments, rows = attention_moments(self.backbone, batches, self.edits()), []
        for moment, old in zip(moments, self._bases(), strict=True):
            vectors, values = _free_directions(moment, old)
            rows.append(vectors[:, :rank].T * (values[:rank, None] > 0) / 3**0.5)
        older = inputs.frozen[:, : len(inputs) - rank]
        inputs.frozen = torch.cat([older, torch.stack(rows).to(older)], dim=1)

    def conclude(self, batches: Iterator[TrainingBatch]) -> None:
        """Protect directions until they have a share of the energy of the task's inputs.

        The share is lambda + (1 - lambda) t / T for task t.
        """
        start, tasks = self.config.threshold, self.config.tasks
        rise = 0.0 if tasks is None else min(1.0, (len(self.task_sizes) - 1) / tasks)
        share = start + (1 - start) * rise
        moments = attention_moments(self.backbone, batches, self.edits())
        for bank, moment, old in zip(self.protected, moments, self._bases(), strict=True):
            assert isinstance(bank, Bank)
            bank.append(directions_to_protect(moment, old, share).to(bank.frozen))

    def _bases(self) -> list[Tensor]:
        """M^T of each block, rows x D in float64."""
        banks = [bank for bank in self.protected if isinstance(bank, Bank)]
        return [bank.frozen.cpu().double() for bank in banks]

    def edits(self) -> dict[int, BlockEdits]:
        """W_k and W_v gain sum_i B_i A_i."""
        return edits_of(self.delta.factors())

    def parameter_count(self) -> ParameterCount:
        body = sum(bank.frozen.numel() for bank in self.delta.banks())
        return ParameterCount(body, self.head.weight.frozen.numel())

    def _is_consistent(self) -> bool:
        rows = {len(bank) for bank in self.delta.banks()}
        return super()._is_consistent() and len(rows) == 1


def directions_to_protect(moment: Tensor, old: Tensor, share: float) -> Tensor:
    """The leading directions outside of `old` that raise the protected energy to a share.

    Energies are squared singular values of the second moment. In the first task the direction that
    reaches the share is left out, but for the very first one.

    Args:
        moment: E[x x^T] of the inputs, D x D.
        old: Protected directions, orthonormal rows x D.
        share: The share of the energy of the inputs, at most 1.

    Returns:
        Orthonormal rows x D.
    """
    vectors, values = _free_directions(moment, old)
    energies = values.square() / moment.square().sum()
    protected = 1 - energies.sum() + energies.cumsum(0)  # with this direction and all before it
    count = (protected - energies < share).sum() if len(old) else (protected < share).sum()
    limit = int((values > 0).sum())
    return vectors[:, : min(max(int(count), int(not len(old))), limit)].T


def _free_directions(moment: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (columns) and values of (I - M M^T) S; rounding errors are 0."""
    vectors, values, _ = torch.linalg.svd(moment - old.T @ (old @ moment))
    noise = NO_ENERGY * torch.linalg.matrix_norm(moment)
    return vectors, values * (values > noise)

"""SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning.

Wu et al., ICLR 2025, https://arxiv.org/abs/2501.13198. Paper and released code differ in the
component of the current task; each is a preset:

- `release` (default): it is not normalised, so its magnitude changes when the next task begins;
- `paper`: it is normalised as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, TaskBrief
from coda_prompt.research.methods.lowrank import LowRankDelta, LowRankMethod, check_rank, edits_of
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import Stage
from coda_prompt.research.vit.vit import BlockEdits, ViT

SMOOTHING = 0.1
"""Added in squares to the norm of B in the preset `paper`: B starts at zero, which has no norm."""


@dataclass(frozen=True, config=STRICT)
class SDLoRAConfig(MethodConfig):
    """Options of SD-LoRA."""

    rank: int = Field(default=10, ge=1)
    """Rank of the component of a task."""
    rank_changes: tuple[tuple[int, int], ...] = ()
    """Pairs (task, rank): the rank of this and later tasks, counted from 0."""
    magnitude: float = Field(default=0.8, gt=0)
    """The value at which the magnitudes of all components start in every task (alpha)."""
    preset: Literal["release", "paper"] = "release"
    """The published form: whether the component of the current task is normalised."""


class SDLoRA(LowRankMethod):
    """SD-LoRA: old low-rank directions are fixed, their magnitudes are learned again.

    A magnitude is one number, shared by all blocks and by queries and values.
    """

    Config = SDLoRAConfig
    variants = MappingProxyType({"sd-lora": {}, "sd-lora-rr": {"rank_changes": ((4, 8), (8, 6))}})
    learning_rate = 8e-3
    config: SDLoRAConfig

    def __init__(self, backbone: ViT, config: SDLoRAConfig) -> None:
        super().__init__(backbone, config)
        for rank in (config.rank, *(rank for _, rank in config.rank_changes)):
            check_rank("SD-LoRA", rank, backbone.config.width)
        self.directions = LowRankDelta(backbone.config, ("q", "v"))  # A_i, B_i
        self.magnitudes = Bank()  # alpha_i
        self.ranks = Bank(dtype=torch.int64)
        self._rank_list: list[int] = []

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if len(brief.classes) == 1:  # no loss could train its direction
            return
        changes = [rank for task, rank in self.config.rank_changes if brief.index >= task]
        rank = changes[-1] if changes else self.config.rank
        self.directions.open_down(rank, brief.generator("directions"))
        self.directions.open_up(rank)
        self.ranks.append([rank])
        start = self.magnitudes.frozen.new_full((len(self.ranks),), self.config.magnitude)
        self.magnitudes.frozen = start
        self.magnitudes.reopen()

    def edits(self) -> dict[int, BlockEdits]:
        """dW x = sum_i alpha_i B_i A_i x / (|B_i| |A_i|), for queries and values."""
        sizes, scaled = self._sizes(), {}
        for target, (down, up) in self.directions.factors().items():
            parts = []
            for index, (a, b) in enumerate(
                zip(down.split(sizes, dim=1), up.split(sizes, dim=1), strict=True)
            ):
                is_current = index == len(sizes) - 1
                parts.append(a * (self.magnitudes.rows[index] / self._norm(a, b, is_current)))
            scaled[target] = (torch.cat(parts, dim=1) if parts else down, up)
        return edits_of(scaled)

    def _norm(self, a: Tensor, b: Tensor, is_current: bool) -> Tensor:
        """|B_i| |A_i| in each block, blocks x 1 x 1."""
        squares = a.square().sum(dim=(1, 2), keepdim=True), b.square().sum(dim=(1, 2), keepdim=True)
        if self.config.preset == "paper":
            return (squares[0] * (squares[1] + SMOOTHING**2)).sqrt()
        if is_current:
            return torch.ones_like(squares[0])
        return (squares[0] * squares[1]).clamp_min(1e-24).sqrt()

    def _sizes(self) -> list[int]:
        """The rank of each component; an exported graph cannot read the values of `ranks`."""
        if not torch.compiler.is_exporting():
            self._rank_list = [int(rank) for rank in self.ranks.frozen.tolist()]
        return self._rank_list

    def stages(self) -> Sequence[Stage]:
        trained = super().stages()
        return [Stage(optimizer="sgd", schedule="constant")] if trained else []

    def _is_consistent(self) -> bool:
        total, components = int(self.ranks.rows.sum()), len(self.ranks)
        rows = {len(bank) for bank in self.directions.banks()}
        agree = rows == {total} and len(self.magnitudes) == components
        return super()._is_consistent() and agree and bool((self.ranks.rows > 0).all())

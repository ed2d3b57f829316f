"""L2P++ and Deep L2P++: Learning to Prompt for Continual Learning, with prefix-tuning.

Wang et al., CVPR 2022, https://arxiv.org/abs/2112.08654; "++" as in CODA-Prompt's comparison.
"""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.errors import BadOption
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import PromptConfig, PromptMethod, TaskBrief, cosines
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.orthogonal import uniform_rows
from coda_prompt.research.vit.vit import Prefixes, ViT


@dataclass(frozen=True, config=STRICT)
class L2PConfig(PromptConfig):
    """Options of L2P++."""

    pool: int = Field(default=30, ge=1)
    """Prompts per block, shared by all tasks."""
    top: int = Field(default=5, ge=1)
    """Prompts selected for an image."""
    length: int = Field(default=20, ge=1)
    """Rows of one prompt; half go to the keys, half to the values."""
    blocks: tuple[int, ...] = (0,)
    """Prompted blocks, counted from 0."""
    key_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss that pulls selected keys to the image's query."""


class L2P(PromptMethod):
    """L2P++: a pool of prompts trained in every task; each image selects those with nearest keys.

    Selection is per image, never by a vote of the batch.
    """

    Config = L2PConfig
    variants = MappingProxyType(
        {"l2p++": {}, "deep-l2p++": {"pool": 100, "blocks": (0, 1, 2, 3, 4)}}
    )
    config: L2PConfig

    def __init__(self, backbone: ViT, config: L2PConfig) -> None:
        super().__init__(backbone, config, {"blocks": "length"})
        if config.top > config.pool:
            problem = f"{config.top} prompts cannot be selected from a pool of {config.pool}"
            raise BadOption("L2P++", "top", problem)
        width = backbone.config.width
        self.prompts = Bank((config.length, width), groups=len(config.blocks))  # P
        self.keys = Bank((width,), groups=len(config.blocks))  # k

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if len(brief.classes) == 1:  # no loss could train its prompt
            return
        for name, bank in (("prompts", self.prompts), ("keys", self.keys)):
            if not len(bank):
                bank.append(uniform_rows(bank.frozen, self.config.pool, brief.generator(name)))
            bank.reopen()  # the pool trains in every task

    def prefixes(self, queries: Tensor) -> Prefixes:
        return self.training_prefixes(queries)[0]

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """The key loss: the sum of 1 - cos(q, k) over the keys an image selected (eq. 5)."""
        if not len(self.prompts):
            return {}, queries.new_zeros(len(queries))
        nearest = cosines(queries, self.keys.rows).topk(self.config.top, dim=-1)  # eq. 3
        prefixes = {}
        for block, rows, selected in zip(
            self.blocks, self.prompts.rows, nearest.indices, strict=True
        ):
            keys, values = rows[selected].chunk(2, dim=2)  # each B x top x L/2 x D
            prefixes[block] = (keys.flatten(1, 2), values.flatten(1, 2))  # eq. 2
        return prefixes, self.config.key_weight * (1 - nearest.values).sum(dim=(0, 2))

    def _is_consistent(self) -> bool:
        sizes = {len(self.prompts), len(self.keys)}
        return super()._is_consistent() and sizes in ({0}, {self.config.pool})

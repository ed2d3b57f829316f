"""DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning.

Wang et al., ECCV 2022, https://arxiv.org/abs/2204.04799.
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
class DualPromptConfig(PromptConfig):
    """Options of DualPrompt."""

    general_length: int = Field(default=6, ge=1)
    """Rows of a general prompt (the paper's text says 5; it has to be even)."""
    general_blocks: tuple[int, ...] = (0, 1)
    """Blocks with a general prompt, counted from 0."""
    expert_length: int = Field(default=20, ge=1)
    """Rows of an expert prompt."""
    expert_blocks: tuple[int, ...] = (2, 3, 4)
    """Blocks with an expert prompt per task, counted from 0."""
    key_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss that pulls the task's keys to its queries."""


class DualPrompt(PromptMethod):
    """DualPrompt: general prompts for all tasks, and an expert prompt per task.

    Training uses the task's expert, inference the one with the nearest key, per block and image.
    """

    Config = DualPromptConfig
    variants = MappingProxyType({"dualprompt": {}})
    config: DualPromptConfig

    def __init__(self, backbone: ViT, config: DualPromptConfig) -> None:
        prompts = {"general_blocks": "general_length", "expert_blocks": "expert_length"}
        super().__init__(backbone, config, prompts)
        if not config.expert_blocks:
            raise BadOption("dualprompt", "expert_blocks", "experts need at least one block")
        width, experts = backbone.config.width, len(config.expert_blocks)
        self.general = Bank((config.general_length, width), groups=len(config.general_blocks))  # g
        self.experts = Bank((config.expert_length, width), groups=experts)  # e
        self.keys = Bank((width,), groups=experts)  # k

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if len(brief.classes) > 1:  # no loss could train the prompt of a single class
            if not len(self.general):
                rows = uniform_rows(self.general.frozen, 1, brief.generator("general"))
                self.general.append(rows)
            self.general.reopen()
            self.experts.open(uniform_rows(self.experts.frozen, 1, brief.generator("expert")))
            self.keys.open(uniform_rows(self.keys.frozen, 1, brief.generator("key")))

    def prefixes(self, queries: Tensor) -> Prefixes:
        if not len(self.keys):
            return {}
        nearest = cosines(queries, self.keys.rows).argmax(dim=-1)  # blocks x B
        experts = [rows[task] for rows, task in zip(self.experts.rows, nearest, strict=True)]
        return self._with_general(experts)

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """The current task's expert; its keys are pulled to the queries by 1 - cos(q, k)."""
        if self.experts.trainable is None or self.keys.trainable is None:
            return self.prefixes(queries), queries.new_zeros(len(queries))
        similarity = cosines(queries, self.keys.trainable)  # blocks x B x 1
        key_loss = self.config.key_weight * (1 - similarity).sum(dim=(0, 2))
        return self._with_general(list(self.experts.trainable)), key_loss

    def _with_general(self, experts: list[Tensor]) -> Prefixes:
        """Split each prompt (1 or B x L x D) into the prefixes of its block."""
        prefixes = {}
        for block, prompt in zip(self.blocks, (*self.general.rows, *experts), strict=True):
            keys, values = prompt.chunk(2, dim=1)
            prefixes[block] = (keys, values)
        return prefixes

    def _is_consistent(self) -> bool:
        tasks = len(self.experts)
        agree = len(self.keys) == tasks and len(self.general) == (tasks > 0)
        return super()._is_consistent() and agree

"""DualPrompt: general prompts for all tasks, and an expert prompt per task found by its key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from coda_prompt.errors import BadOption
from coda_prompt.methods.base import (
    MethodConfig,
    PromptConfig,
    PromptMethod,
    TaskBrief,
    cosines,
    split_prompts,
)
from coda_prompt.methods.options import STRICT, check_blocks, check_length
from coda_prompt.methods.orthogonal import uniform_rows
from coda_prompt.model.vit import Prefixes, ViT


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

    Training uses the task's own expert; inference the nearest key's, per block and image.
    """

    Config: ClassVar[type[MethodConfig]] = DualPromptConfig
    variants = MappingProxyType({"dualprompt": {}})
    grows: ClassVar[Mapping[str, int]] = {
        **PromptMethod.grows,
        "general": 1,
        "experts": 1,
        "keys": 1,
    }
    config: DualPromptConfig

    general: Tensor
    experts: Tensor
    keys: Tensor

    def __init__(self, backbone: ViT, config: DualPromptConfig) -> None:
        super().__init__(backbone, config, config.general_blocks + config.expert_blocks)
        check_length("general_length", config.general_length)
        check_length("expert_length", config.expert_length)
        check_blocks("general_blocks", config.general_blocks, backbone)
        check_blocks("expert_blocks", config.expert_blocks, backbone)
        if not config.expert_blocks:
            raise BadOption("dualprompt", "expert_blocks", "experts need at least one block")
        shared = set(config.general_blocks) & set(config.expert_blocks)
        if shared:
            raise BadOption(
                "dualprompt", "expert_blocks", f"{sorted(shared)} already have general prompts"
            )
        width, blocks = backbone.config.width, len(config.expert_blocks)
        general = torch.zeros(len(config.general_blocks), 0, config.general_length, width)
        self.register_buffer("general", general)
        self.register_buffer("experts", torch.zeros(blocks, 0, config.expert_length, width))
        self.register_buffer("keys", torch.zeros(blocks, 0, width))
        self.open_general: nn.Parameter | None = None
        self.new_expert: nn.Parameter | None = None
        self.new_key: nn.Parameter | None = None

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if not self._learns_prompts(brief):
            return
        if not self.general.shape[1]:
            self.general = uniform_rows(self.general, 1, brief.generator("general"))
        self.open_general = nn.Parameter(self.general.clone())
        self.new_expert = nn.Parameter(uniform_rows(self.experts, 1, brief.generator("expert")))
        self.new_key = nn.Parameter(uniform_rows(self.keys, 1, brief.generator("key")))

    def end_task(self) -> None:
        if self.open_general is not None and self.new_expert is not None:
            assert self.new_key is not None
            self.general = self.open_general.detach()
            self.experts = torch.cat([self.experts, self.new_expert.detach()], dim=1)
            self.keys = torch.cat([self.keys, self.new_key.detach()], dim=1)
            self.open_general = self.new_expert = self.new_key = None
        super().end_task()

    def _sizes_agree(self, state: Mapping[str, Tensor]) -> bool:
        experts = state["experts"].shape[1]
        same = experts == state["keys"].shape[1] and state["general"].shape[1] == (experts > 0)
        return super()._sizes_agree(state) and same

    def prefixes(self, queries: Tensor) -> Prefixes:
        """Experts of the tasks learned so far; the one in training is among them."""
        experts, keys = self.experts, self.keys
        if self.new_expert is not None and self.new_key is not None:
            experts = torch.cat([experts, self.new_expert], dim=1)
            keys = torch.cat([keys, self.new_key], dim=1)
        if not keys.shape[1]:
            return {}
        similarity = cosines(queries, keys)  # blocks x B x tasks
        nearest = similarity.argmax(dim=-1)
        taken = [rows[choice] for rows, choice in zip(experts, nearest, strict=True)]
        return self._with_general(taken)

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        if self.new_expert is None or self.new_key is None:
            return self.prefixes(queries), queries.new_zeros(len(queries))
        similarity = cosines(queries, self.new_key)  # blocks x B x 1
        key_loss = self.config.key_weight * (1 - similarity).sum(dim=(0, 2))
        return self._with_general(list(self.new_expert)), key_loss

    def _with_general(self, experts: list[Tensor]) -> Prefixes:
        general = self.general if self.open_general is None else self.open_general
        prompts = (*general, *experts)  # each 1 or B x L x D
        blocks = self.config.general_blocks + self.config.expert_blocks
        return {block: split_prompts(prompt) for block, prompt in zip(blocks, prompts, strict=True)}

"""L2P++ and Deep L2P++: a pool of prompts; each image takes those with the nearest keys."""

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
class L2PConfig(PromptConfig):
    """Options of L2P++."""

    pool: int = Field(default=30, ge=1)
    """Prompts per block, shared by all tasks."""
    top: int = Field(default=5, ge=1)
    """Prompts an image takes."""
    length: int = Field(default=20, ge=1)
    """Rows of one prompt; half go to the keys, half to the values."""
    blocks: tuple[int, ...] = (0,)
    """Prompted blocks, counted from 0."""
    key_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss that pulls chosen keys to the image's query."""


class L2P(PromptMethod):
    """L2P++: a pool of prompts trained in every task; each image takes those with nearest keys.

    Selection is per image, never by a vote of the batch.
    """

    Config: ClassVar[type[MethodConfig]] = L2PConfig
    variants = MappingProxyType(
        {"l2p++": {}, "deep-l2p++": {"pool": 100, "blocks": (0, 1, 2, 3, 4)}}
    )
    grows: ClassVar[Mapping[str, int]] = {**PromptMethod.grows, "prompts": 1, "keys": 1}
    config: L2PConfig

    prompts: Tensor
    keys: Tensor

    def __init__(self, backbone: ViT, config: L2PConfig) -> None:
        super().__init__(backbone, config, config.blocks)
        check_length("length", config.length)
        check_blocks("blocks", config.blocks, backbone)
        if not config.blocks:
            raise BadOption("L2P++", "blocks", "prompts need at least one block")
        if config.top > config.pool:
            raise BadOption(
                "l2p++", "top", f"{config.top} prompts cannot be taken from a pool of {config.pool}"
            )
        blocks, width = len(config.blocks), backbone.config.width
        self.register_buffer("prompts", torch.zeros(blocks, 0, config.length, width))
        self.register_buffer("keys", torch.zeros(blocks, 0, width))
        self.open_prompts: nn.Parameter | None = None
        self.open_keys: nn.Parameter | None = None

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if not self._learns_prompts(brief):
            return
        if not self.prompts.shape[1]:
            self.prompts = uniform_rows(self.prompts, self.config.pool, brief.generator("prompts"))
            self.keys = uniform_rows(self.keys, self.config.pool, brief.generator("keys"))
        self.open_prompts = nn.Parameter(self.prompts.clone())
        self.open_keys = nn.Parameter(self.keys.clone())

    def end_task(self) -> None:
        if self.open_prompts is not None and self.open_keys is not None:
            self.prompts, self.keys = self.open_prompts.detach(), self.open_keys.detach()
            self.open_prompts = self.open_keys = None
        super().end_task()

    def _sizes_agree(self, state: Mapping[str, Tensor]) -> bool:
        sizes = {state["prompts"].shape[1], state["keys"].shape[1]}
        return super()._sizes_agree(state) and sizes in ({0}, {self.config.pool})

    def prefixes(self, queries: Tensor) -> Prefixes:
        return self._chosen(queries)[0]

    def training_prefixes(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """The key loss is sum of (1 - cos) over the image's own chosen keys, as L2P defines it."""
        prefixes, similarity = self._chosen(queries)
        return prefixes, self.config.key_weight * (1 - similarity).sum(dim=(0, 2))

    def _chosen(self, queries: Tensor) -> tuple[Prefixes, Tensor]:
        """Prefixes, and the similarity of each image to its chosen keys, blocks x B x top."""
        prompts = self.prompts if self.open_prompts is None else self.open_prompts
        keys = self.keys if self.open_keys is None else self.open_keys
        if not prompts.shape[1]:
            return {}, queries.new_zeros(len(prompts), len(queries), 0)
        nearest = cosines(queries, keys).topk(self.config.top, dim=-1)  # blocks x B x top
        prefixes = {}
        for position, block in enumerate(self.config.blocks):
            taken = prompts[position][nearest.indices[position]]  # B x top x L x D
            own_keys, own_values = split_prompts(taken)
            prefixes[block] = (own_keys.flatten(1, 2), own_values.flatten(1, 2))
        return prefixes, nearest.values

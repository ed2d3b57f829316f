"""VQ-Prompt: Vector Quantization Prompting for Continual Learning.

Jiao et al., NeurIPS 2024, https://arxiv.org/abs/2410.20444. The defaults are those of the released
code, without its first iterations at a learning rate near zero, and with class Gaussians of
un-augmented images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import Loss, TaskBrief
from coda_prompt.research.methods.gaussians import AlignedPromptConfig, AlignedPrompts
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.orthogonal import uniform_rows
from coda_prompt.research.methods.stages import ParameterGroup, Stage, TrainingBatch
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import Prefixes, ViT


@dataclass(frozen=True, config=STRICT)
class VQPromptConfig(AlignedPromptConfig):
    """Options of VQ-Prompt."""

    pool: int = Field(default=10, ge=1)
    """Prompts per block, shared by all tasks."""
    length: int = Field(default=8, ge=1)
    """Rows of a prompt; half go to the keys, half to the values."""
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Prompted blocks, counted from 0."""
    softness: float = Field(default=1.0, gt=0)
    """Temperature of the softmax over keys."""
    mixture_weight: float = Field(default=0.4, ge=0)
    """Weight of the loss that moves the mixture to its nearest prompt."""
    prompt_weight: float = Field(default=0.1, ge=0)
    """Weight of the loss that moves the nearest prompt to the mixture."""
    prompt_factor: float = Field(default=5.0, gt=0)
    """Learning rate of the prompts as a multiple of the head's."""
    align_epochs: int = Field(default=10, ge=1)
    """Epochs of the alignment."""
    align_learning_rate: float = Field(default=1e-5, gt=0)
    """Initial learning rate of the alignment."""
    align_samples: int = Field(default=512, ge=1)
    """Samples in a batch of the alignment (the paper: four times the batch size)."""


class VQPrompt(AlignedPrompts):
    """VQ-Prompt: the prompt nearest to a mixture of prompts, with a straight-through gradient."""

    Config = VQPromptConfig
    variants = MappingProxyType({"vq-prompt": {}})
    config: VQPromptConfig
    learning_rate = 2.5e-3

    def __init__(self, backbone: ViT, config: VQPromptConfig) -> None:
        super().__init__(backbone, config, {"blocks": "length"})
        blocks, width = len(config.blocks), backbone.config.width
        self.prompts = Bank((config.length, width), groups=blocks)  # P
        self.keys = Bank((width,), groups=blocks)  # K

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if len(brief.classes) > 1:  # no loss could train the prompts with a single class
            for name, bank in (("prompts", self.prompts), ("keys", self.keys)):
                if not len(bank):
                    count = self.config.pool
                    bank.append(uniform_rows(bank.frozen, count, brief.generator(name)))
                bank.reopen()

    def stages(self) -> Sequence[Stage]:
        stages = []
        head, prompts = list(self.head.parameters()), [self.prompts, self.keys]
        if head:
            pool = [parameter for bank in prompts for parameter in bank.parameters()]
            groups = [ParameterGroup(pool, factor=self.config.prompt_factor), ParameterGroup(head)]
            groups = [group for group in groups if group.parameters]
            cosine = Stage(groups=groups, optimizer="adamw", schedule="annealing")
            stages.append(replace(cosine, per_iteration=True))
        if len(self.task_sizes) > 1:
            align = self.aligned.stage(weight_decay=5e-4)
            stages.append(replace(align, optimizer="adamw", final_factor=0.1))
        return stages

    def quantised(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture p = sum_m softmax_m(q . K_m / |K_m|) P_m and its nearest prompt P*.

        Both blocks x B x length x D.
        """
        prompts = self.prompts.rows.flatten(2)  # blocks x pool x LD
        with full_precision(queries.device):
            similarity = queries.to(prompts.dtype) @ F.normalize(self.keys.rows, dim=-1).mT
            mixture = (similarity / self.config.softness).softmax(-1) @ prompts
            nearest = torch.cdist(mixture, prompts).argmin(-1)  # blocks x B
        chosen = torch.stack([rows[best] for rows, best in zip(prompts, nearest, strict=True)])
        shape = (self.config.length, -1)
        return mixture.unflatten(2, shape), chosen.unflatten(2, shape)

    def prefixes(self, queries: Tensor) -> Prefixes:
        return self.straight_through(*self.quantised(queries)) if len(self.prompts) else {}

    def straight_through(self, mixture: Tensor, nearest: Tensor) -> Prefixes:
        """P*, with the gradient of p."""
        return self.as_prefixes(mixture + (nearest - mixture).detach())

    def loss(self, batch: TrainingBatch) -> Loss:
        """Cross-entropy, and the quantisation loss of all blocks."""
        if batch.images is None or batch.queries is None or self.prompts.trainable is None:
            return super().loss(batch)
        mixture, nearest = self.quantised(batch.queries)
        features = self.backbone.features(batch.images, self.straight_through(mixture, nearest))
        quantisation = self.quantisation_loss(mixture, nearest).sum(0)
        return Loss.of(self.head.masked_loss(features, batch.labels) + quantisation)

    def quantisation_loss(self, mixture: Tensor, nearest: Tensor) -> Tensor:
        """w_p MSE(p, sg P*) + w_P MSE(P*, sg p), blocks x B."""
        to_nearest = self.config.mixture_weight * (mixture - nearest.detach()).square()
        to_mixture = self.config.prompt_weight * (nearest - mixture.detach()).square()
        return (to_nearest + to_mixture).mean(dim=(2, 3))

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and len(self.prompts) == len(self.keys)

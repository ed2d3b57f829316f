"""TUNA: task-specific adapters and a universal one merged from them.

Wang, Zhou and Ye, ICCV 2025, https://arxiv.org/abs/2508.08165. The released code means to use the
merged adapters as universal ones, but an index selects the newest task's: `universal="newest"`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.adapters import AdapterConfig, AdapterMethod
from coda_prompt.research.methods.base import Loss, ParameterCount, TaskBrief
from coda_prompt.research.methods.gaussians import AlignedHead, AlignedMethod, AlignmentConfig
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import Stage, TrainingBatch
from coda_prompt.research.vit.vit import Images, ViT


@dataclass(frozen=True, config=STRICT)
class TUNAConfig(AlignmentConfig, AdapterConfig):
    """Options of TUNA."""

    rank: int = Field(default=16, ge=1)
    """Hidden units of an adapter."""
    cosine_scale: float = Field(default=20.0, gt=0)
    """Factor of cosines in the loss and in probabilities."""
    orthogonality: float = Field(default=0.0, ge=0)
    """Weight of the penalty for similar adapters (the paper: 0 for CIFAR-100, else 0.001)."""
    universal: Literal["merged", "newest"] = "merged"
    """The adapters of the second opinion: merged from all tasks, or the newest task's."""
    align_epochs: int = Field(default=30, ge=1)
    """Epochs of the alignment."""
    align_learning_rate: float = Field(default=0.005, gt=0)
    """Initial learning rate of the alignment."""
    align_samples: int = Field(default=80, ge=1)
    """Samples in a batch of the alignment (the paper: five times the batch size)."""


class TUNA(AlignedMethod, AdapterMethod):
    """TUNA: the adapters of the task with the surest answer, and universal ones, vote."""

    Config = TUNAConfig
    variants = MappingProxyType({"tuna": {}})
    config: TUNAConfig

    def __init__(self, backbone: ViT, config: TUNAConfig) -> None:
        super().__init__(backbone, config)
        self.aligned = AlignedHead(backbone.config.width, config, cosine=True, kind="full")

    def initial_adapters(self, brief: TaskBrief) -> list[Tensor]:
        """Continue from the adapters of the task before."""
        if not len(self.adapters):
            return super().initial_adapters(brief)
        return [values[:, None] for values in self.adapters.values(-1)]

    def stages(self) -> Sequence[Stage]:
        later = len(self.task_sizes) > 1
        align = [self.aligned.stage(self.config.weight_decay)] if later else []
        return [*super().stages(), *align]

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        """The features under the newest adapters."""
        return self.adapted(images)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.aligned.gaussians.update(features, labels)
        rows = torch.tensor(self.task_rows, device=features.device)
        means = self.aligned.gaussians.means.frozen[rows, 0]
        self.aligned.start(rows, self.proxies.rows if len(self.proxies) else means)

    def loss(self, batch: TrainingBatch) -> Loss:
        loss = super().loss(batch)
        return loss._replace(penalty=self.penalty()) if batch.features is None else loss

    def alignment_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().alignment_loss(self.config.cosine_scale * logits, labels)

    def penalty(self) -> Tensor:
        """lambda e^-(t+1) sum_{i<t} mean_l |mean(U_t U_i^T)|, rows of W_u scaled to unit length."""
        new, old = self.adapters.up.trainable, F.normalize(self.adapters.up.frozen, dim=-1)
        if new is None or not self.config.orthogonality or not old.shape[1]:
            return old.new_zeros(())
        # mean(U V^T) is the product of the mean rows.
        products = old.mean(2) @ F.normalize(new, dim=-1).mean(2).mT  # blocks x sets x 1
        weight = self.config.orthogonality * math.exp(-(old.shape[1] + 1))
        return weight * products.abs().mean(0).sum()

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        """log of (softmax(s z_i*) + softmax(s z_u)) / 2, i* having the smallest entropy."""
        started = self.backbone.start(images)
        features = self.all_adapted(started)  # B x sets x D
        if self.config.universal == "merged":
            edits = self.adapters.edits(self.adapters.merged())
            universal = self.backbone.features(started, edits)
        else:
            universal = features[:, -1]
        features = torch.cat([features, universal[:, None]], dim=1)
        scores = self.config.cosine_scale * self.aligned(features.flatten(0, 1))
        logs = scores.unflatten(0, features.shape[:2]).log_softmax(-1)  # B x sets + 1 x C
        entropies = -(logs.exp() * logs).sum(-1)
        surest = entropies[:, :-1].argmin(1)
        chosen = logs[torch.arange(len(logs), device=logs.device), surest]
        return torch.logaddexp(chosen, logs[:, -1]) - math.log(2)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(self.adapters.count(), self.aligned.weight.frozen.numel())

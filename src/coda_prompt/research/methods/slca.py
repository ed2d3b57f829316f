"""SLCA: Slow Learner with Classifier Alignment.

Zhang et al., ICCV 2023, https://arxiv.org/abs/2303.05118. The whole network is fine-tuned with a
small learning rate; a head is then aligned on samples from the Gaussians of all classes. Each
alignment starts from the rows as they were trained in their tasks, so both are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.base import ParameterCount
from coda_prompt.research.methods.finetune import WholeNetwork
from coda_prompt.research.methods.gaussians import AlignedHead, AlignedMethod, AlignmentConfig
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import ParameterGroup, Stage
from coda_prompt.research.vit.vit import Images, ViT

EPSILON = 1e-7


@dataclass(frozen=True, config=STRICT)
class SLCAConfig(AlignmentConfig):
    """Options of SLCA."""

    slow_factor: float = Field(default=0.01, ge=0)
    """Learning rate of the network as a multiple of the head's."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """Weight decay of both stages."""
    drop_at: float = Field(default=0.9, ge=0, le=1)
    """Share of the epochs after which the learning rate is divided by 10 (the paper: 0.9 for
    CIFAR-100, 0.8 for ImageNet-R)."""
    logit_temperature: float | None = Field(default=0.1, gt=0)
    """tau of the logit normalisation in the alignment; None: plain cross-entropy."""


class SLCA(AlignedMethod, WholeNetwork):
    """SLCA: the network learns slowly, the head is aligned on samples from class Gaussians."""

    Config = SLCAConfig
    variants = MappingProxyType({"slca": {}})
    config: SLCAConfig
    learning_rate = 0.01
    trains_all_rows = False

    def __init__(self, backbone: ViT, config: SLCAConfig) -> None:
        super().__init__(backbone, config)
        self.aligned = AlignedHead(backbone.config.width, config, kind="full")

    def stages(self) -> Sequence[Stage]:
        config, stages = self.config, []
        head = [self.head.weight.trainable, self.head.bias.trainable]
        if opened := [parameter for parameter in head if parameter is not None]:
            network: list[nn.Parameter] = list(self.network.parameters())
            groups = [ParameterGroup(opened), ParameterGroup(network, factor=config.slow_factor)]
            stages.append(
                Stage(
                    groups=groups,
                    optimizer="sgd",
                    weight_decay=config.weight_decay,
                    schedule="drop",
                    drop_at=config.drop_at,
                    final_factor=0.1,
                )
            )
        if len(self.task_sizes) > 1:
            stages.append(self.aligned.stage(config.weight_decay))
        return stages

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.aligned.fit(features, labels, self.head, range(self.classes_seen))

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The mean of a class of task i is multiplied by 0.9 + 0.1 (i + 1) / (t + 1)."""
        sizes = self.task_sizes.rows
        scale = 0.9 + 0.1 * torch.arange(1, len(sizes) + 1, device=sizes.device) / len(sizes)
        return self.aligned.generate(
            stage, generator, self.classes_seen, scale.repeat_interleave(sizes)
        )

    def per_image_loss(self, images: Images, labels: Tensor, features: Tensor) -> Tensor:
        return self.head.masked_loss(features, labels)

    def alignment_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CE(z / (tau * mean_i |z_i|), y), z_i being the logits of the classes of task i."""
        if self.config.logit_temperature is not None:
            sizes = [size for size in self.task_sizes.rows.tolist() if size]
            norms = [part.norm(dim=1) + EPSILON for part in logits.split(sizes, dim=1)]
            mean = torch.stack(norms).mean(0)[:, None]
            logits = logits / (self.config.logit_temperature * mean)
        return F.cross_entropy(logits, labels, reduction="none")

    def parameter_count(self) -> ParameterCount:
        network = sum(parameter.numel() for parameter in self.network.parameters())
        return ParameterCount(network, self.aligned.weight.frozen.numel())

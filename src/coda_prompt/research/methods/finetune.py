"""FT, FT++ and the upper bound: baselines that train the whole network.

As compared in CODA-Prompt, Smith et al., CVPR 2023, https://arxiv.org/abs/2211.13218.
"""

from __future__ import annotations

import copy
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.methods.base import Loss, MethodConfig, TaskBrief, TrainedMethod
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.vit.vit import Images, ViT


class WholeNetwork(TrainedMethod):
    """Base of methods that train a copy of the backbone; the original is not used."""

    learning_rate = 1e-4
    frozen_backbone = False
    trains_all_rows = True

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.network = copy.deepcopy(backbone).requires_grad_(False)

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        # With an imprinted head there is no loss, and weight decay must not change the network.
        self.network.requires_grad_(self.head.weight.trainable is not None)

    def end_task(self) -> None:
        self.network.requires_grad_(False)
        super().end_task()

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.network.features(images)

    def loss(self, batch: TrainingBatch) -> Loss:
        assert batch.images is not None
        features = self.network.features(batch.images)
        return Loss.of(self.per_image_loss(batch.images, batch.labels, features))

    def per_image_loss(self, images: Images, labels: Tensor, features: Tensor) -> Tensor:
        """Compute the cross-entropy over all classes seen so far, one value per image."""
        return F.cross_entropy(self.head(features), labels, reduction="none")


class FineTuning(WholeNetwork):
    """FT: trains the network on the new task with a softmax over all classes seen so far."""

    variants = MappingProxyType({"ft": {}})


class FineTuningMasked(WholeNetwork):
    """FT++: FT with old classes excluded from the softmax and their head rows frozen."""

    variants = MappingProxyType({"ft++": {}})
    trains_all_rows = False

    def per_image_loss(self, images: Images, labels: Tensor, features: Tensor) -> Tensor:
        return self.head.masked_loss(features, labels)


class UpperBound(WholeNetwork):
    """Upper bound: trains the network on all classes jointly; evaluated on the stream's tasks."""

    variants = MappingProxyType({"upper-bound": {}})
    trains_on = "all"

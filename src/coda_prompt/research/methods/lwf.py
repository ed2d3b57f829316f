"""LwF.MC: Learning without Forgetting, multi-class.

Li and Hoiem, ECCV 2016, https://arxiv.org/abs/1606.09282, in the multi-class form of iCaRL's
comparison (Rebuffi et al., CVPR 2017, https://arxiv.org/abs/1611.07725).
"""

from __future__ import annotations

import copy
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.base import MethodConfig, TaskBrief
from coda_prompt.research.methods.finetune import WholeNetwork
from coda_prompt.research.methods.head import Head
from coda_prompt.research.vit.vit import Images, ViT


class LearningWithoutForgetting(WholeNetwork):
    """LwF.MC: sigmoid outputs; old classes are distilled from the network before the task.

    The loss is the binary cross-entropy, summed over classes and averaged over the batch.
    """

    variants = MappingProxyType({"lwf-mc": {}})
    learns_lone_class = True  # sigmoid outputs

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        self.teacher: Teacher | None = None

    def begin_task(self, brief: TaskBrief) -> None:
        self.teacher = Teacher(self.network, self.head) if self.classes_seen else None
        super().begin_task(brief)

    def end_task(self) -> None:
        self.teacher = None
        super().end_task()

    def per_image_loss(self, images: Images, labels: Tensor, features: Tensor) -> Tensor:
        logits = self.head(features)
        targets = torch.zeros_like(logits)
        if self.teacher is not None:
            outputs = self.teacher(images)
            targets[:, : outputs.shape[1]] = outputs
            targets[:, list(self.task_rows)] = 0
        targets.scatter_(1, labels[:, None], 1)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)


class Teacher(nn.Module):
    """Frozen copy of the network and head before the task."""

    def __init__(self, network: ViT, head: Head) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.head = copy.deepcopy(head)

    @torch.no_grad()
    def forward(self, images: Images) -> Tensor:
        """Compute the sigmoid outputs, B x classes seen before the task."""
        return self.head(self.network.features(images)).sigmoid()

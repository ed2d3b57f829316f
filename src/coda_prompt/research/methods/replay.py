"""ER: experience replay with a class-balanced buffer of past images.

Chaudhry et al., On Tiny Episodic Memories in Continual Learning, https://arxiv.org/abs/1902.10486.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, TaskBrief
from coda_prompt.research.methods.finetune import WholeNetwork
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.vit.vit import ViT


@dataclass(frozen=True, config=STRICT)
class ReplayConfig(MethodConfig):
    """Options of ER."""

    buffer: int = Field(default=5000, ge=1)
    """Total number of past images in the buffer."""


class ExperienceReplay(WholeNetwork):
    """ER: trains the network on the task and on a class-balanced buffer of past images.

    A row of the buffer is (task, image, class, priority). Each image gets a random priority in its
    task; a class retains the images with the smallest, a uniform sample of all its images.
    """

    Config = ReplayConfig
    variants = MappingProxyType({"er-5000": {}})
    keeps_images = True
    config: ReplayConfig

    def __init__(self, backbone: ViT, config: ReplayConfig) -> None:
        super().__init__(backbone, config)
        self.buffer = Bank((4,), dtype=torch.int64)
        self.candidates = torch.zeros(0, 4, dtype=torch.int64)

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        count = len(brief.labels)
        priorities = torch.randint(2**62, (count,), generator=brief.generator("buffer"))
        task = torch.full((count,), brief.index)
        self.candidates = torch.stack(
            [task, torch.arange(count), brief.labels.cpu(), priorities], dim=1
        )

    def end_task(self) -> None:
        """Reduce the buffer and the task's images to an equal number of images per class."""
        candidates = torch.cat([self.buffer.frozen.cpu(), self.candidates])
        candidates = candidates[candidates[:, 3].argsort()]
        share, remainder = divmod(self.config.buffer, max(1, self.classes_seen))
        parts = []
        for row in range(self.classes_seen):
            class_candidates = candidates[candidates[:, 2] == row]
            parts.append(class_candidates[: share + (row < remainder)])
        self.buffer.frozen = torch.cat(parts).to(self.buffer.frozen.device)
        self.candidates = self.candidates[:0]
        super().end_task()

    def replay(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` past images with replacement; return rows of (task, image)."""
        if not len(self.buffer):
            return super().replay(count, generator)
        rows = torch.randint(len(self.buffer), (count,), generator=generator)
        return self.buffer.frozen.cpu()[rows, :2]

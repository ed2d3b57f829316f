"""HiDe-Prompt: hierarchical decomposition of prompt-based continual learning.

Wang et al., NeurIPS 2023, https://arxiv.org/abs/2310.07234. A classifier on plain features infers
the task of an image, whose prompt is then used; both heads are aligned on class Gaussians. The
released code hands prompts to other images of the batch and mixes up keys and values; here every
image gets the prompt of its own task.
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
from coda_prompt.research.methods.task_classifier import TaskClassifier
from coda_prompt.research.vit.vit import Images, Prefixes, ViT


@dataclass(frozen=True, config=STRICT)
class HiDeConfig(AlignedPromptConfig):
    """Options of HiDe-Prompt."""

    length: int = Field(default=10, ge=1)
    """Rows of a prompt; half go to the keys, half to the values (ImageNet-R: 40)."""
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Prompted blocks, counted from 0."""
    momentum: float = Field(default=0.01, ge=0, le=1)
    """Share of the mean of older prompts in the prompt of a task."""
    contrast: float = Field(default=0.1, ge=0)
    """Weight of the contrastive loss (ImageNet-R: 0.5)."""
    contrast_temperature: float = Field(default=0.8, gt=0)
    """Temperature of the contrastive loss."""
    centroids: int = Field(default=10, ge=1)
    """Gaussians per class."""
    infer_epochs: int = Field(default=20, ge=1)
    """Epochs of the classifier that infers the task."""
    infer_learning_rate: float = Field(default=4.7e-5, gt=0)
    """Learning rate of the classifier that infers the task."""
    align_epochs: int = Field(default=30, ge=1)
    """Epochs of both alignments."""
    align_learning_rate: float = Field(default=0.005, gt=0)
    """Initial learning rate of both alignments."""
    align_samples: int = Field(default=120, ge=1)
    """Samples in a batch of the alignment; that of the task's classifier has a fifth."""


class HiDePrompt(AlignedPrompts):
    """HiDe-Prompt: a classifier on plain features chooses the prompt of a task."""

    Config = HiDeConfig
    variants = MappingProxyType({"hide-prompt": {}})
    config: HiDeConfig
    learning_rate = 2.8e-3
    loss_in_parts = False  # images of a batch are contrasted with each other

    def __init__(self, backbone: ViT, config: HiDeConfig) -> None:
        super().__init__(backbone, config, {"blocks": "length"}, config.centroids)
        width = backbone.config.width
        self.tasks = TaskClassifier(width, config, config.centroids)
        self.prompts = Bank((config.length, width), groups=len(config.blocks))
        self.homes = Bank(dtype=torch.int64)
        """The prompt of each class."""

    def begin_task(self, brief: TaskBrief) -> None:
        several = len(brief.classes) > 1  # no loss could train the prompt of a single class
        home = len(self.prompts) if several else max(len(self.prompts) - 1, 0)
        self.homes.append([home] * sum(row >= len(self.homes) for row in brief.classes))
        super().begin_task(brief)
        generator = brief.generator("task classifier")
        self.tasks.begin_task(brief.classes, self.classes_seen, generator)
        if several:
            older = self.prompts.frozen
            drawn = 2 * uniform_rows(older, 1, brief.generator("prompt")) - 1
            self.prompts.open(older[:, -1:] if len(self.prompts) else drawn)

    def stages(self) -> Sequence[Stage]:
        config, stages = self.config, []
        mapping = [parameter for bank in self.tasks.mlp for parameter in bank.parameters()]
        if self.prompts.trainable is not None:
            infer = [ParameterGroup([*mapping, *self.tasks.head.parameters()])]
            rate, epochs = config.infer_learning_rate, config.infer_epochs
            stages.append(Stage("infer", infer, learning_rate=rate, epochs=epochs))
            groups = [
                ParameterGroup([self.prompts.trainable]),
                ParameterGroup(list(self.head.parameters()), factor=0.1),
            ]
            drop = Stage(groups=groups, schedule="drop", drop_at=0.6, final_factor=0.1)
            stages.append(replace(drop, clip_norm=1.0))
        if len(self.task_sizes) > 1:
            plain = self.tasks.aligned.stage(5e-4, mapping)
            fifth = max(config.align_samples // 5, 1)
            stages.append(replace(plain, name="align-tasks", batch_size=fifth))
            stages.append(self.aligned.stage(5e-4))
        return stages

    def prefixes(self, queries: Tensor) -> Prefixes:
        """The prompt of the task that has the most likely class."""
        if not len(self.prompts):
            return {}
        task = self.homes.rows[self.tasks.aligned(self.tasks(queries)).argmax(1)]
        return self.as_prefixes(self.prompts.rows[:, task])

    def mixed_prompt(self) -> Tensor:
        """(1 - m) P_t + m mean(P_<t)."""
        new, older, share = self.prompts.trainable, self.prompts.frozen, self.config.momentum
        assert new is not None
        if not older.shape[1]:
            return new
        return (1 - share) * new + share * older.mean(1, keepdim=True)

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        """Within a task under its prompt, else under the prompt of the inferred task."""
        if not self.in_task or not len(self.prompts):
            return super().features(images, queries)
        new = self.prompts.trainable
        newest = self.prompts.frozen[:, -1:] if new is None else new
        return self.backbone.features(images, self.as_prefixes(newest))

    def loss(self, batch: TrainingBatch) -> Loss:
        if batch.stage == "infer":
            assert batch.queries is not None
            mapped = self.tasks(batch.queries)
            return Loss.of(self.tasks.head.masked_loss(mapped, batch.labels))
        if batch.stage == "align-tasks":
            assert batch.features is not None
            logits = self.tasks.aligned(self.tasks(batch.features))
            return Loss.of(F.cross_entropy(logits, batch.labels, reduction="none"))
        if batch.images is None:
            return super().loss(batch)
        features = self.backbone.features(batch.images, self.as_prefixes(self.mixed_prompt()))
        per_image = self.head.masked_loss(features, batch.labels)
        return Loss.of(per_image + self.config.contrast * self.contrastive_loss(features))

    def contrastive_loss(self, features: Tensor) -> Tensor:
        """CE(M M^T / tau, identity), M being the centroids of old classes and the batch.

        Over the images of a forward pass: with micro-batches each contrasts its own.
        """
        old = int(self.task_sizes.rows[:-1].sum())
        rows = torch.cat([self.aligned.gaussians.means.frozen[:old].flatten(0, 1), features])
        similarity = rows @ rows.T / self.config.contrast_temperature
        return F.cross_entropy(similarity, torch.arange(len(rows), device=rows.device))

    def end_stage(self, stage: Stage) -> None:
        """Make the mixture with older prompts permanent."""
        if stage.name == "train" and self.prompts.trainable is not None:
            self.prompts.trainable.data.copy_(self.mixed_prompt().detach())

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        assert queries is not None
        super().fit(features, queries, labels)
        self.tasks.aligned.fit(queries, labels, self.tasks.head, self.task_rows)

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        aligned = self.aligned if stage.name == "align" else self.tasks.aligned
        return aligned.generate(stage, generator, self.alignment_steps)

    def _is_consistent(self) -> bool:
        agree = self.tasks.aligned.is_consistent(self.classes_seen)
        agree &= len(self.homes) == self.classes_seen == len(self.tasks.head.weight)
        inside = (self.homes.rows >= 0) & (self.homes.rows < max(len(self.prompts), 1))
        return super()._is_consistent() and agree and bool(inside.all())

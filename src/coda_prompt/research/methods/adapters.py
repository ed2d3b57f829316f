"""Adapters beside the MLPs of a frozen ViT, one set per task, trained with a cosine classifier.

AdaptFormer, Chen et al., NeurIPS 2022, https://arxiv.org/abs/2205.13535. Released code of methods
that use them drops hidden units at random in training; here they are not dropped, because a resumed
training has to repeat every step exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import Loss, Method, MethodConfig, TaskBrief, cosines
from coda_prompt.research.methods.frozen_cache import FrozenCache
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import ParameterGroup, Stage, TrainingBatch
from coda_prompt.research.vit.vit import BlockEdits, Images, ViT, ViTConfig


@dataclass(frozen=True, config=STRICT)
class AdapterConfig(MethodConfig):
    """Options of methods with adapters."""

    rank: int = Field(default=64, ge=1)
    """Hidden units of an adapter."""
    adapter_scale: float = 0.1
    """Factor of an adapter's output."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """Weight decay of SGD."""
    cosine_scale: float | None = Field(default=None, gt=0)
    """Factor of cosines in the loss; None: learned, starting at 1."""


class Adapters(nn.Module):
    """Sets of adapters, a(x) = s (W_u ReLU(W_d x + b_d) + b_u), one per block of the ViT."""

    def __init__(self, vit: ViTConfig, rank: int, scale: float) -> None:
        super().__init__()
        width, depth = vit.width, vit.depth
        self.scale = scale
        self.down = Bank((rank, width), groups=depth)
        self.down_bias = Bank((rank,), groups=depth)
        self.up = Bank((width, rank), groups=depth)
        self.up_bias = Bank((width,), groups=depth)
        self._merged = FrozenCache(merge)

    def __len__(self) -> int:
        return len(self.up)

    @property
    def banks(self) -> tuple[Bank, Bank, Bank, Bank]:
        return self.down, self.down_bias, self.up, self.up_bias

    def fresh(self, generator: torch.Generator) -> list[Tensor]:
        """A set that changes nothing: W_d as `nn.Linear` draws it, the rest zero."""
        shapes = [(bank.frozen.shape[0], 1, *bank.frozen.shape[2:]) for bank in self.banks]
        bound = self.down.frozen.shape[-1] ** -0.5
        down = torch.empty(shapes[0]).uniform_(-bound, bound, generator=generator)
        return [down, *(torch.zeros(shape) for shape in shapes[1:])]

    def append(self, values: Sequence[Tensor]) -> None:
        """Add a set that does not train."""
        for bank, rows in zip(self.banks, values, strict=True):
            bank.append(rows)

    def open(self, values: Sequence[Tensor]) -> None:
        """Add a set that trains until the end of the task."""
        for bank, rows in zip(self.banks, values, strict=True):
            bank.open(rows)

    def count(self) -> int:
        """The number of parameters of all frozen sets."""
        return sum(bank.frozen.numel() for bank in self.banks)

    def values(self, index: int) -> list[Tensor]:
        """The tensors of one set; -1: the newest."""
        if index == -1 and self.up.trainable is not None:
            return [bank.trainable[:, 0] for bank in self.banks if bank.trainable is not None]
        return [bank.frozen[:, index] for bank in self.banks]

    def merged(self) -> list[Tensor]:
        """The tensors of a set merged from all frozen ones."""
        return self._merged(*(bank.frozen for bank in self.banks))

    def edits(self, values: Sequence[Tensor]) -> dict[int, BlockEdits]:
        """What a set changes in the ViT."""
        return {
            block: BlockEdits(adapter=partial(adapt, tensors, self.scale))
            for block, tensors in enumerate(zip(*values, strict=True))
        }


def merge(*banks: Tensor) -> list[Tensor]:
    """Merge sets: per scalar, the sign of the mean times the largest magnitude with that sign.

    EMR-Merging, Huang et al., NeurIPS 2024, https://arxiv.org/abs/2405.17461.
    """
    merged = []
    for rows in banks:  # blocks x sets x ...
        sign = torch.where(rows.mean(1) > 0, 1.0, -1.0).to(rows)
        merged.append(sign * (rows * sign[:, None]).clamp(min=0).amax(1))
    return merged


def adapt(values: Sequence[Tensor], scale: float, tokens: Tensor) -> Tensor:
    """a(x) = s (W_u ReLU(W_d x + b_d) + b_u)."""
    down, down_bias, up, up_bias = values
    return scale * F.linear(F.linear(tokens, down, down_bias).relu(), up, up_bias)


class AdapterMethod(Method):
    """Base: each task trains a set of adapters and one proxy per class with cosine scores.

    The proxies are discarded after the task. A task of one class trains nothing, because its loss
    is constant, and uses the newest set.
    """

    config: AdapterConfig
    learning_rate = 0.01
    fits = True
    loss_in_parts = True

    def __init__(self, backbone: ViT, config: AdapterConfig) -> None:
        super().__init__(backbone, config)
        self.adapters = Adapters(backbone.config, config.rank, config.adapter_scale)
        self.proxies = Bank((backbone.config.width,))
        self.sigma = Bank()

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if self.adapts():
            self.adapters.open(self.initial_adapters(brief))
            bound = self.vit_config.width**-0.5
            proxies = torch.empty(len(brief.classes), self.vit_config.width)
            self.proxies.open(proxies.uniform_(-bound, bound, generator=brief.generator("proxies")))
            if self.config.cosine_scale is None:
                self.sigma.open(torch.ones(1))
        elif not len(self.adapters):
            self.adapters.append(self.adapters.fresh(brief.generator("adapters")))

    def adapts(self) -> bool:
        """Whether the current task trains adapters."""
        return len(self.task_rows) > 1

    def initial_adapters(self, brief: TaskBrief) -> list[Tensor]:
        """Where the adapters of a task start."""
        return self.adapters.fresh(brief.generator("adapters"))

    def end_task(self) -> None:
        super().end_task()
        self.proxies.frozen, self.sigma.frozen = self.proxies.frozen[:0], self.sigma.frozen[:0]

    def stages(self) -> Sequence[Stage]:
        """One stage over the adapters, the proxies and their scale."""
        trained = [module.parameters() for module in (self.adapters, self.proxies, self.sigma)]
        if self.proxies.trainable is None:
            return []
        return [
            Stage(
                groups=[ParameterGroup([each for part in trained for each in part])],
                optimizer="sgd",
                weight_decay=self.config.weight_decay,
                schedule="annealing",
            )
        ]

    def adapted(self, images: Images, index: int = -1) -> Tensor:
        """The features under one set of adapters, B x D; -1: the newest."""
        return self.backbone.features(images, self.adapters.edits(self.adapters.values(index)))

    def all_adapted(self, images: Images) -> Tensor:
        """The features under every set, B x sets x D; the patch embedding is computed once."""
        started = self.backbone.start(images)
        newest = len(self.adapters) - 1
        sets = [self.adapted(started, index) for index in (*range(newest), -1)]
        return torch.stack(sets, dim=1)

    def loss(self, batch: TrainingBatch) -> Loss:
        """CE(sigma cos(f, w)) over the classes of the task."""
        assert batch.images is not None
        sigma = self.config.cosine_scale or self.sigma.rows
        scores = sigma * cosines(self.adapted(batch.images), self.proxies.rows)
        rows = torch.tensor(self.task_rows, device=batch.labels.device)
        labels = torch.searchsorted(rows, batch.labels)
        return Loss.of(F.cross_entropy(scores, labels, reduction="none"))

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and len({len(bank) for bank in self.adapters.banks}) == 1

"""A classifier on plain features behind a residual MLP, which tells the task of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.gaussians import AlignedHead, AlignmentConfig
from coda_prompt.research.methods.head import Head


class TaskClassifier(nn.Module):
    """A head on LayerNorm(f + MLP(f)), whose classes tell the task."""

    def __init__(self, width: int, config: AlignmentConfig, centroids: int) -> None:
        super().__init__()
        self.width = width
        self.up, self.up_bias = Bank((width,)), Bank()
        self.down, self.down_bias = Bank((2 * width,)), Bank()
        self.scale, self.shift = Bank(), Bank()
        self.head = Head(width)
        self.aligned = AlignedHead(width, config, kind="diagonal", centroids=centroids)

    @property
    def mlp(self) -> list[Bank]:
        """Weights and biases of both layers, scale and shift of the normalisation."""
        return [self.up, self.up_bias, self.down, self.down_bias, self.scale, self.shift]

    def begin_task(self, rows: tuple[int, ...], classes: int, generator: torch.Generator) -> None:
        """Open the MLP, the head rows of the task and all aligned rows.

        Args:
            rows: Classes of the task.
            classes: Number of classes seen.
            generator: Source of initial values.
        """
        if not len(self.up):
            wide, width = 2 * self.width, self.width
            drawn = []
            for shape in ((wide, width), (wide,), (width, wide), (width,)):
                bound = (width if shape[0] == wide else wide) ** -0.5  # as nn.Linear
                drawn.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
            initial = [*drawn, torch.ones(self.width), torch.zeros(self.width)]
            for bank, values in zip(self.mlp, initial, strict=True):
                bank.append(values)
        for bank in self.mlp:
            bank.reopen()
        self.head.begin_task(rows, generator, None)
        self.aligned.begin_task(classes)

    def forward(self, features: Tensor) -> Tensor:
        """B x D."""
        hidden = F.gelu(F.linear(features, self.up.rows, self.up_bias.rows))
        mapped = features + F.linear(hidden, self.down.rows, self.down_bias.rows)
        return F.layer_norm(mapped, (self.width,), self.scale.rows, self.shift.rows)

"""The classifier: one linear map with bias over all classes seen, of which a task opens rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    """Closed rows are buffers; a task's open rows are one parameter beside them until closed."""

    weight: Tensor
    bias: Tensor
    open_rows: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("weight", torch.zeros(0, width))
        self.register_buffer("bias", torch.zeros(0))
        self.register_buffer("open_rows", torch.zeros(0, dtype=torch.int64), persistent=False)
        self.open_weight: nn.Parameter | None = None
        self.open_bias: nn.Parameter | None = None

    @property
    def classes(self) -> int:
        return len(self.weight)

    def begin_task(
        self, rows: tuple[int, ...], generator: torch.Generator, means: Tensor | None
    ) -> None:
        """Append rows for the new classes and open `rows`, old and new.

        New rows start as `nn.Linear` would start them, or, given `means` (the mean feature of each
        class of the task, new ones last), as that mean scaled to the length of the older rows.
        """
        old = self.classes
        new = [row for row in rows if row >= old]
        if means is None:
            bound = self.width**-0.5
            drawn = torch.empty(len(new), self.width + 1).uniform_(
                -bound, bound, generator=generator
            )
            weight, bias = drawn[:, :-1], drawn[:, -1]
        else:
            weight, bias = self._imprinted(means[len(means) - len(new) :])
        self.weight = torch.cat([self.weight, weight.to(self.weight)])
        self.bias = torch.cat([self.bias, bias.to(self.bias)])
        self.open_rows = torch.tensor(sorted(rows), device=self.weight.device)
        self.open_weight = nn.Parameter(self.weight[self.open_rows])
        self.open_bias = nn.Parameter(self.bias[self.open_rows])

    def close(self) -> None:
        """Write what was learned into the buffers; nothing trains until the next task."""
        if self.open_weight is not None and self.open_bias is not None:
            self.weight = self.weight.index_copy(0, self.open_rows, self.open_weight.detach())
            self.bias = self.bias.index_copy(0, self.open_rows, self.open_bias.detach())
        self.open_weight = self.open_bias = None
        self.open_rows = self.open_rows[:0]

    def forward(self, features: Tensor) -> Tensor:
        """B x classes."""
        logits = F.linear(features, self.weight, self.bias)
        if self.open_weight is None:
            return logits
        return logits.index_copy(1, self.open_rows, self.open_logits(features).to(logits.dtype))

    def open_logits(self, features: Tensor) -> Tensor:
        """B x open rows."""
        assert self.open_weight is not None
        return F.linear(features, self.open_weight, self.open_bias)

    def position_of(self, labels: Tensor) -> Tensor:
        """Where each label stands among the open rows."""
        return torch.searchsorted(self.open_rows, labels)

    def _imprinted(self, means: Tensor) -> tuple[Tensor, Tensor]:
        means = means.to(self.weight)
        if self.classes:
            length, bias = self.weight.norm(dim=1).mean(), self.bias.mean()
        else:
            # The expected length of a row that nn.Linear would have drawn.
            length, bias = means.new_tensor(3**-0.5), means.new_zeros(())
        return F.normalize(means, dim=1) * length, bias.expand(len(means))

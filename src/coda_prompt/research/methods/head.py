"""The linear classifier over all classes seen; a task opens some of its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank, ClassRows
from coda_prompt.research.vit.linear import full_precision


class Head(ClassRows, nn.Module):
    """One linear map with bias. A task trains its rows; all other rows are frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight, self.bias = Bank((width,)), Bank()
        self.class_banks = (self.weight, self.bias)

    def begin_task(
        self, rows: tuple[int, ...], generator: torch.Generator, means: Tensor | None
    ) -> None:
        """Append rows for the new classes and open `rows`, old and new.

        New rows start as `nn.Linear` would start them, or, given `means` (the mean feature of each
        class of the task, new ones last), as that mean scaled to the length of the older rows.
        """
        new = [row for row in rows if row >= len(self.weight)]
        if means is None:
            bound = self.width**-0.5
            drawn = torch.empty(len(new), self.width + 1).uniform_(
                -bound, bound, generator=generator
            )
            weight, bias = drawn[:, :-1], drawn[:, -1]
        else:
            weight, bias = self._imprinted(means[len(means) - len(new) :])
        opened = torch.tensor(sorted(rows), device=self.weight.frozen.device)
        for bank, initial in zip(self.class_banks, (weight, bias), strict=True):
            bank.append(initial)
            bank.reopen(opened)

    def close(self) -> None:
        """Freeze the open rows."""
        self.weight.close()
        self.bias.close()

    def forward(self, features: Tensor) -> Tensor:
        """B x classes."""
        logits = linear_logits(features, self.weight.frozen, self.bias.frozen)
        if self.weight.trainable is None or self.weight.reopened is None:
            return logits
        trained = linear_logits(features, self.weight.trainable, self.bias.trainable)
        return logits.index_copy(1, self.weight.reopened, trained.to(logits.dtype))

    def masked_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the open rows; the logits of other classes are left out.

        In a task of one known class its row trains against all other rows, which are frozen.
        """
        rows = self.weight.reopened
        assert rows is not None
        assert self.weight.trainable is not None
        if len(rows) == 1:
            return F.cross_entropy(self(features), labels, reduction="none")
        logits = linear_logits(features, self.weight.trainable, self.bias.trainable)
        return F.cross_entropy(logits, torch.searchsorted(rows, labels), reduction="none")

    def _imprinted(self, means: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight.frozen
        means = means.to(weight)
        if len(weight):
            length, bias = weight.norm(dim=1).mean(), self.bias.frozen.mean()
        else:
            # The expected length of a row that nn.Linear would have drawn.
            length, bias = means.new_tensor(3**-0.5), means.new_zeros(())
        return F.normalize(means, dim=1) * length, bias.expand(len(means))


def linear_logits(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute features W' + b in full precision: rounded logits of two classes may be equal."""
    with full_precision(features.device):
        return F.linear(features.to(weight), weight, bias)

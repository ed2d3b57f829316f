"""`Bank`: rows that grow by task, and the names older files had for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


class Bank(nn.Module):
    """Rows that grow by task: rows of earlier tasks are frozen, open rows train.

    Frozen rows are a buffer, so no optimizer or weight decay can reach them; open rows are one
    parameter. Both have shape (groups, rows, *row_shape), or (rows, *row_shape) without groups.

    Example:
        >>> keys = Bank((768,), groups=5)
        >>> keys.open(torch.randn(5, 10, 768))  # begin_task
        >>> keys.close()                        # end_task: the new rows freeze
        >>> keys.frozen.shape
        torch.Size([5, 10, 768])
    """

    frozen: Tensor
    reopened: Tensor | None
    """Positions of open rows among the frozen ones; None: open rows follow them."""

    def __init__(
        self,
        row_shape: tuple[int, ...] = (),
        *,
        groups: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        leading = () if groups is None else (groups,)
        self.axis = len(leading)
        """The axis along which rows are counted."""
        self.register_buffer("frozen", torch.zeros(*leading, 0, *row_shape, dtype=dtype))
        self.trainable: nn.Parameter | None = None
        self.register_buffer("reopened", None, persistent=False)

    def __len__(self) -> int:
        """Frozen and open rows."""
        frozen = self.frozen.shape[self.axis]
        if self.trainable is None or self.reopened is not None:
            return frozen
        return frozen + self.trainable.shape[self.axis]

    @property
    def rows(self) -> Tensor:
        """All rows as one tensor, open ones last."""
        if self.trainable is None:
            return self.frozen
        if self.reopened is not None:
            return self.frozen.index_copy(self.axis, self.reopened, self.trainable)
        if not self.frozen.shape[self.axis]:
            return self.trainable
        return torch.cat([self.frozen, self.trainable], dim=self.axis)

    def append(self, rows: Tensor | list[int]) -> None:
        """Add rows that do not train."""
        new = torch.as_tensor(rows, dtype=self.frozen.dtype, device=self.frozen.device)
        self.frozen = torch.cat([self.frozen, new], dim=self.axis)

    def open(self, rows: Tensor) -> None:
        """Add rows that train until `close`; they are copied, and may be older rows."""
        self.trainable = nn.Parameter(rows.detach().to(self.frozen, copy=True))

    def reopen(self, positions: Tensor | None = None) -> None:
        """Train existing rows again: all of them, or those at `positions`.

        Rows in the middle cannot be cut out: with `positions`, `frozen` retains their old values
        until `close` replaces them.
        """
        if positions is None:
            self.trainable = nn.Parameter(self.frozen.clone())
            self.frozen = self.frozen.narrow(self.axis, 0, 0)
        else:
            self.trainable = nn.Parameter(self.frozen.index_select(self.axis, positions))
            self.reopened = positions

    def close(self) -> None:
        """Freeze the open rows."""
        if self.trainable is not None:
            self.frozen = self.rows.detach()
            self.trainable = self.reopened = None

    def keep(self, positions: Tensor) -> None:
        """Remove all frozen rows except those at `positions`."""
        self.frozen = self.frozen.index_select(self.axis, positions.to(self.frozen.device))

    def resize(self, like: Tensor) -> bool:
        """Make `frozen` as long as a tensor about to be loaded; False if that cannot fit."""
        shape = list(self.frozen.shape)
        if like.dim() != len(shape) or like.is_floating_point() != self.frozen.is_floating_point():
            return False
        shape[self.axis] = like.shape[self.axis]
        self.frozen = self.frozen.new_zeros(shape)
        return shape == list(like.shape)


FORMAT1_OPEN_ROWS = {
    "new_components": "components",
    "new_keys": "keys",
    "new_attention": "attention",
    "open_prompts": "prompts",
    "open_keys": "keys",
    "open_general": "general",
    "new_expert": "experts",
    "new_key": "keys",
    "head.open_weight": "head.weight",
    "head.open_bias": "head.bias",
}
"""Names of open rows in format 1 -> the bank that has them now."""


def upgrade_format1(method: nn.Module, state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename a learned state of format 1 (`keys` -> `keys.frozen`); current names stay."""
    banks = {name for name, module in method.named_modules() if isinstance(module, Bank)}
    return {f"{name}.frozen" if name in banks else name: value for name, value in state.items()}


def upgrade_training_format1(method: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an unfinished task in format 1; current names stay.

    Open rows had other names (`parameter.new_keys` is `parameter.keys.trainable` now), and the
    optimizer's parameters were numbered, prompts before the head (`optimizer.0.exp_avg`).
    """
    old_names = {f"parameter.{old}": bank for old, bank in FORMAT1_OPEN_ROWS.items()}
    if not tensors.keys() & old_names.keys():
        return dict(tensors)
    names = [name for name, parameter in method.named_parameters() if parameter.requires_grad]
    old_order = sorted(
        names, key=lambda name: name.startswith("head.") + 2 * name.startswith("net")
    )
    upgraded = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if name in old_names:
            name = f"parameter.{old_names[name]}.trainable"
        elif kind == "optimizer":
            number, _, key = rest.partition(".")
            if number.isdecimal() and int(number) < len(names):
                name = f"optimizer.{old_order[int(number)]}.{key}"
        upgraded[name] = tensor
    return upgraded

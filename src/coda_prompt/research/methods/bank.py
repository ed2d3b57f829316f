"""`Bank`: rows that grow by task, and what banks with a row for each class share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Self


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

    def grow(self, count: int) -> None:
        """Add rows of zeros that do not train, up to `count` rows."""
        shape = list(self.frozen.shape)
        shape[self.axis] = count - len(self)
        self.append(self.frozen.new_zeros(shape))

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
        if like.dim() != self.frozen.dim() or not is_loadable(like, self.frozen):
            return False
        shape = list(self.frozen.shape)
        shape[self.axis] = like.shape[self.axis]
        if shape != list(like.shape):
            return False
        self.frozen = self.frozen.new_zeros(shape)
        return True


def is_loadable(stored: Tensor, own: Tensor) -> bool:
    """Whether a tensor from a file has the type of an own one, or one nearly as large."""
    same_kind = stored.is_floating_point() == own.is_floating_point()
    return same_kind and 2 * stored.element_size() >= own.element_size()


class CPUModule(nn.Module):
    """A module that stays on the CPU in its own precision, whatever the model is moved to."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self


class ClassRows:
    """State in banks with a row for each class."""

    class_banks: tuple[Bank, ...]

    def grow(self, classes: int) -> None:
        """Add classes without images up to `classes`."""
        for bank in self.class_banks:
            bank.grow(classes)

    def is_consistent(self, classes: int) -> bool:
        """Whether all sizes fit the number of classes."""
        return {len(bank) for bank in self.class_banks} == {classes}

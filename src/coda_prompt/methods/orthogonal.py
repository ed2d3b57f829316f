"""Vectors that start orthogonal to those already there, and the penalty that keeps them so."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.methods.base import full_precision


def orthonormal_rows(older: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` new rows per block: orthonormal, and orthogonal to the span of the older ones.

    `older` is blocks x rows x dimensions. One QR decomposition of old and random rows together
    does it. Where the space is full the rest are random unit vectors.
    """
    blocks, rows, dimensions = older.shape
    # On the CPU in float64, which not every accelerator has (the meta device has no values).
    held = older if older.is_meta else older.cpu()
    drawn = torch.randn(blocks, count, dimensions, generator=generator)
    drawn = drawn.to(held.device, torch.float64)
    room = max(0, min(count, dimensions - rows))
    crowded = F.normalize(drawn[:, room:], dim=-1)
    if not room:
        return crowded.to(older)
    together = torch.cat([held.double(), drawn[:, :room]], dim=1).mT  # blocks x D x rows
    basis = torch.linalg.qr(together).Q[:, :, rows:].mT  # blocks x room x D
    return torch.cat([basis, crowded], dim=1).to(older)


def uniform_rows(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` rows per block drawn from [0, 1), as L2P starts its prompts."""
    shape = (like.shape[0], count, *like.shape[2:])
    return torch.rand(shape, generator=generator).to(like)


def gram_error(rows: Tensor) -> Tensor:
    """The sum of squares of B B^T - I, B being the rows of a block (blocks x rows x ...)."""
    rows = rows.flatten(2)
    with full_precision(rows.device):
        gram = rows @ rows.mT
        identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return (gram - identity).square().sum(dim=(1, 2))


def _joint_error(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """`gram_error` of the frozen rows over the new ones; that of the frozen alone is known."""
    with full_precision(new.device):
        across = (frozen.flatten(2) @ new.flatten(2).mT).square().sum(dim=(1, 2))
    return frozen_error + 2 * across + gram_error(new)


def mean_square_penalty(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """Sum over blocks of mean((B B^T - I)^2): what the released code computes."""
    rows = frozen.shape[1] + new.shape[1]
    return _joint_error(frozen, new, frozen_error).sum() / rows**2


def frobenius_penalty(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """Sum over blocks of |B B^T - I|_F (eq. 6), smoothed at zero, where training starts.

    Orthonormal rows rounded to float32 are about 1e-5 off. Well above that the norm bends into a
    parabola; else rounding would decide the direction of a gradient of length 1.
    """
    bend = 1e-3
    return (_joint_error(frozen, new, frozen_error) + bend**2).sqrt().sum()

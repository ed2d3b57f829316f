"""Initialisation orthogonal to existing vectors, and orthogonality penalties, for prompts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.research.vit.linear import full_precision


def orthonormal_rows(older: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` orthonormal rows per block, orthogonal to the span of the older rows.

    Computed by one QR decomposition of the older rows and random rows. Rows beyond the dimension of
    the space are random unit vectors.

    Args:
        older: Existing rows, blocks x rows x ...
        count: Number of new rows per block.
        generator: Source of the random rows, on the CPU.
    """
    # On the CPU, because not every accelerator supports float64 (meta tensors have no values).
    existing = (older if older.is_meta else older.cpu()).flatten(2)
    blocks, rows, dimensions = existing.shape
    random = torch.randn(blocks, count, dimensions, generator=generator)
    random = random.to(existing.device, torch.float64)
    free = max(0, min(count, dimensions - rows))  # dimensions left for new orthogonal rows
    new = F.normalize(random[:, free:], dim=-1)
    if free:
        columns = torch.cat([existing.double(), random[:, :free]], dim=1).mT  # blocks x D x rows
        basis = torch.linalg.qr(columns).Q[:, :, rows:].mT  # blocks x free x D
        new = torch.cat([basis, new], dim=1)
    return new.to(older).unflatten(2, older.shape[2:])


def uniform_rows(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` rows per block uniformly from [0, 1), as L2P initialises its prompts."""
    shape = (like.shape[0], count, *like.shape[2:])
    return torch.rand(shape, generator=generator).to(like)


def gram_error(rows: Tensor) -> Tensor:
    """Compute |B B^T - I|_F^2 for the rows B of each block (blocks x rows x ...)."""
    rows = rows.flatten(2)
    with full_precision(rows.device):
        gram = rows @ rows.mT
        identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return (gram - identity).square().sum(dim=(1, 2))


def _joint_error(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """Compute `gram_error` of the frozen and new rows together, given that of the frozen rows."""
    with full_precision(new.device):
        cross_error = (frozen.flatten(2) @ new.flatten(2).mT).square().sum(dim=(1, 2))
    return frozen_error + 2 * cross_error + gram_error(new)


def mean_square_penalty(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """Compute the sum over blocks of mean((B B^T - I)^2), as in the released code."""
    rows = frozen.shape[1] + new.shape[1]
    return _joint_error(frozen, new, frozen_error).sum() / rows**2


def frobenius_penalty(frozen: Tensor, new: Tensor, frozen_error: Tensor) -> Tensor:
    """Compute the sum over blocks of |B B^T - I|_F (CODA-Prompt, eq. 6), smoothed near zero.

    Training starts at zero up to float32 rounding, about 1e-5, where the norm's gradient would have
    length 1 in a direction set by rounding. With smoothing the norm is quadratic below 1e-3.
    """
    smoothing = 1e-3
    return (_joint_error(frozen, new, frozen_error) + smoothing**2).sqrt().sum()

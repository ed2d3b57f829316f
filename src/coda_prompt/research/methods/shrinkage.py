"""Shrunk covariances: they can be inverted however few images there are."""

from __future__ import annotations

import torch
from torch import Tensor


def shrink_covariance(covariance: Tensor, freedom: int, shrinkage: float | None = None) -> Tensor:
    """Mix a covariance with a multiple of the identity of the same trace.

    Args:
        covariance: D x D.
        freedom: Its degrees of freedom.
        shrinkage: Share of the identity. Default: the square root of the oracle approximating
            shrinkage (Chen et al. 2010, https://arxiv.org/abs/0907.4698, eq. 23), which falls with
            the number of images.

    Returns:
        The mixture; the identity if the covariance is zero, as with one image per class.
    """
    width = len(covariance)
    identity = torch.eye(width, dtype=covariance.dtype)
    trace, squares = float(covariance.trace()), float(covariance.square().sum())
    if trace <= 0:
        return identity
    if shrinkage is None:
        numerator = (1 - 2 / width) * squares + trace**2
        denominator = (freedom + 1 - 2 / width) * (squares - trace**2 / width)
        shrinkage = min(1.0, numerator / denominator) ** 0.5 if denominator > 0 else 1.0
    return (1 - shrinkage) * covariance + shrinkage * trace / width * identity

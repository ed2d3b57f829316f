"""Tensors of torch as the arrays that checked tensor files hold, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return tensors as arrays, on the CPU."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def as_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Return copies of arrays as tensors."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

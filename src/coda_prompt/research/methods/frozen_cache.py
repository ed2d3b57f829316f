"""A cache for values computed from frozen tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class FrozenCache(Generic[Value]):
    """Function of frozen tensors that is recomputed only after they are replaced or modified."""

    def __init__(self, compute: Callable[..., Value]) -> None:
        self._compute = compute
        self._cached: tuple[tuple[tuple[Tensor, int], ...], Value] | None = None

    def __call__(self, *tensors: Tensor) -> Value:
        if any(tensor.is_inference() for tensor in tensors):  # these have no version counter
            return self._compute(*tensors)
        if self._cached is None or not _unchanged(self._cached[0], tensors):
            with torch.inference_mode(False), torch.no_grad():
                value = self._compute(*tensors)
            self._cached = (tuple((tensor, tensor._version) for tensor in tensors), value)
        return self._cached[1]


def _unchanged(inputs: tuple[tuple[Tensor, int], ...], tensors: tuple[Tensor, ...]) -> bool:
    return len(inputs) == len(tensors) and all(
        previous is tensor and version == tensor._version
        for (previous, version), tensor in zip(inputs, tensors, strict=True)
    )

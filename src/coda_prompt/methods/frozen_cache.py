"""What follows from frozen tensors alone, worked out once instead of at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class FrozenCache(Generic[Value]):
    """A function of frozen tensors that computes again only when they are others or changed."""

    def __init__(self, compute: Callable[..., Value]) -> None:
        self._compute = compute
        self._held: tuple[tuple[tuple[Tensor, int], ...], Value] | None = None

    def __call__(self, *tensors: Tensor) -> Value:
        if any(tensor.is_inference() for tensor in tensors):  # they do not tell of changes
            return self._compute(*tensors)
        if self._held is None or not _same(self._held[0], tensors):
            with torch.inference_mode(False), torch.no_grad():
                value = self._compute(*tensors)
            self._held = (tuple((tensor, tensor._version) for tensor in tensors), value)
        return self._held[1]


def _same(held: tuple[tuple[Tensor, int], ...], tensors: tuple[Tensor, ...]) -> bool:
    return len(held) == len(tensors) and all(
        before is now and version == now._version
        for (before, version), now in zip(held, tensors, strict=True)
    )

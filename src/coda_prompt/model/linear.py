"""Products with frozen weights, the bulk of all computing.

On a CPU they go through oneDNN, which takes a tenth less time for them than torch's BLAS, and less
still where GELU follows and no gradient is asked for (benchmarks/tried.py measures it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""What torch.compile makes of linear layers on a CPU; absent in builds without oneDNN."""


class Linear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def with_gelu(self, inputs: Tensor) -> Tensor:
        """GELU of the product."""
        if torch.is_grad_enabled() or not _takes(inputs, self.weight):
            return F.gelu(self(inputs))
        return _PRODUCT(inputs, self.weight, self.bias, "gelu", [], "none")


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `F.linear`."""
    if not _takes(inputs, weight):
        return F.linear(inputs, weight, bias)
    return _Product.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """With the gradient of the inputs alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.weight = weight
        return _PRODUCT(inputs, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _PRODUCT(gradient, ctx.weight.t(), None, "none", [], ""), None, None


def _takes(inputs: Tensor, weight: Tensor) -> bool:
    return (
        _PRODUCT is not None
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and not weight.requires_grad
        and inputs.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )

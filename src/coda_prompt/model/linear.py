"""Products with frozen weights, the bulk of all computing.

On a CPU they go through oneDNN, which takes a tenth less time for them than torch's BLAS, and less
still where GELU follows and no gradient is asked for (benchmarks/tried.py measures it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""What torch.compile makes of linear layers on a CPU; absent in builds without oneDNN."""


class Linear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def with_gelu(self, inputs: Tensor) -> Tensor:
        """GELU of the product."""
        if torch.is_grad_enabled() or not _takes(inputs, self.weight, self.bias):
            return F.gelu(self(inputs))
        return _PRODUCT(inputs, self.weight, self.bias, "gelu", [], "none")


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `F.linear`."""
    if not _takes(inputs, weight, bias):
        return F.linear(inputs, weight, bias)
    return _Product.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """With the gradient of the inputs alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _PRODUCT(inputs, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _PRODUCT(gradient, weight.t(), None, "none", [], ""), None, None


def _takes(inputs: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return (
        _PRODUCT is not None
        and inputs.shape[-1:] == weight.shape[1:]
        and not bias.requires_grad
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and not weight.requires_grad
        and inputs.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )

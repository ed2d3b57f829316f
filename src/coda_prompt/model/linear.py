"""Linear layers with frozen weights, computed with oneDNN on CPUs.

oneDNN takes about 10% less time than PyTorch's BLAS, and even less if GELU is fused in passes
without gradients (measured by benchmarks/tried.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""The operator torch.compile uses for linear layers on CPUs; missing in builds without oneDNN."""


class Linear(nn.Linear):
    """`nn.Linear` that uses oneDNN while its weights are frozen."""

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def with_gelu(self, inputs: Tensor) -> Tensor:
        """Apply the layer, then GELU; fused if no gradient is needed."""
        if torch.is_grad_enabled() or not _supports_onednn(inputs, self.weight, self.bias):
            return F.gelu(self(inputs))
        return _PRODUCT(inputs, self.weight, self.bias, "gelu", [], "none")


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `F.linear`, with oneDNN where it is supported."""
    if not _supports_onednn(inputs, weight, bias):
        return F.linear(inputs, weight, bias)
    return _FrozenLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


class _FrozenLinear(torch.autograd.Function):
    """oneDNN product that is differentiable in its inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _PRODUCT(inputs, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _PRODUCT(gradient, weight.t(), None, "none", [], ""), None, None


def _supports_onednn(inputs: Tensor, weight: Tensor, bias: Tensor) -> bool:
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

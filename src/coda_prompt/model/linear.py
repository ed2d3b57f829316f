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

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        """Apply the layer, or only some rows of it; then GELU, fused if no gradient is needed."""
        weight, bias = (
            (self.weight, self.bias) if rows is None else (self.weight[rows], self.bias[rows])
        )
        if not _supports_onednn(inputs, weight, bias):
            outputs = F.linear(inputs, weight, bias)
        elif gelu and not torch.is_grad_enabled():
            return _PRODUCT(inputs, weight, bias, "gelu", [], "none")
        else:
            outputs = _FrozenLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
        return F.gelu(outputs) if gelu else outputs


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

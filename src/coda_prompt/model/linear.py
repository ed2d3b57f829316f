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
    """`nn.Linear` that, while its weights are frozen, uses oneDNN and casts them for autocast once.

    Autocast would cast frozen weights in every call.
    """

    _cast: tuple[tuple[Any, ...], Tensor, Tensor] | None = None
    """What was cast, and the weight and bias in the precision of autocast."""

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        """Apply the layer, or only some rows of it; then GELU, fused if no gradient is needed."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        dtype = _autocast_dtype(inputs, weight, bias)
        if dtype is not None:
            inputs, (weight, bias) = inputs.to(dtype), self._cast_once(dtype)
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        if not _supports_onednn(inputs, weight, bias):
            outputs = F.linear(inputs, weight, bias)
        elif gelu and not torch.is_grad_enabled():
            return _PRODUCT(inputs, weight, bias, "gelu", [], "none")
        else:
            outputs = _FrozenLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
        return F.gelu(outputs) if gelu else outputs

    def _cast_once(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight and bias in another precision."""
        key = (dtype, self.weight.data_ptr(), self.weight._version, self.bias._version)
        if self._cast is None or self._cast[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # may be used in training later
                self._cast = (key, self.weight.to(dtype), self.bias.to(dtype))
        return self._cast[1:]


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


def _autocast_dtype(inputs: Tensor, weight: Tensor, bias: Tensor) -> torch.dtype | None:
    """Return the precision of autocast, if the weights are frozen, whole, and it is on."""
    device = inputs.device.type
    trains = weight.requires_grad or bias.requires_grad
    if trains or not weight.is_leaf or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _supports_onednn(inputs: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return (
        _PRODUCT is not None
        and inputs.shape[-1:] == weight.shape[1:]
        and not bias.requires_grad
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype
        and (inputs.dtype == torch.float32 or _supports_bfloat16(inputs.dtype))
        and not weight.requires_grad
        and inputs.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and torch.is_autocast_enabled("cpu") == (inputs.dtype != torch.float32)
        and not torch.compiler.is_compiling()
    )


def _supports_bfloat16(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

"""Operators of torch without a public name, for frozen weights on CPUs: the only ones in use.

Times with and without each part: docs/lab/performance.md, "Parts alone".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The operator torch.compile uses for linear layers on CPUs; missing in builds without oneDNN.
_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_HAS_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NORM_BACKWARD: Any = torch.ops.aten.native_layer_norm_backward
_GELU_BACKWARD: Any = torch.ops.aten.gelu_backward.grad_input


# -- products with oneDNN, which take half the time of BLAS on AMD's processors


def computes(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN can multiply a frozen weight with inputs of its precision."""
    return (
        _PRODUCT is not None
        and inputs.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and inputs.numel() > 0
        and (
            weight.dtype == torch.bfloat16 and bool(_HAS_BFLOAT16())
            if torch.is_autocast_enabled("cpu")
            else weight.dtype == torch.float32
        )
        and bool(torch.backends.mkldnn.enabled)
    )


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """Compute inputs W' + b, and GELU of it, without recording it for autograd."""
    fused, algorithm = ("gelu", "none") if gelu else ("none", "")
    outputs: Tensor = _PRODUCT(inputs, weight, bias, fused, [], algorithm)
    return outputs


class FrozenProduct(torch.autograd.Function):
    """Product that is differentiable in its inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)  # raises an error if weights change until then
        return product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return product(gradient, weight.t(), None), None, None


# -- attention in float32, whose backward pass takes a third of the time of that in bfloat16


def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the outputs of attention in float32, and what its backward pass needs of them.

    Args:
        query: B x heads x tokens x D/h.
        key: B x heads x rows x D/h.
        value: B x heads x rows x D/h.

    Returns:
        The outputs, in the precision of the queries, and the log-sum-exp of the scores.
    """
    outputs, logsumexp = _ATTENTION(query.float(), key.float(), value.float())
    return outputs.to(query.dtype), logsumexp


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, outputs: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of queries, keys and values, in the precision of the gradient."""
    converted = [rows.float() for rows in (gradient, query, key, value, outputs)]
    gradients = _ATTENTION_BACKWARD(*converted, logsumexp, 0.0, False)
    return tuple(rows.to(gradient.dtype) for rows in gradients)


class AttentionInFloat32(torch.autograd.Function):
    """`scaled_dot_product_attention` of bfloat16 queries, keys and values, computed in float32.

    Inputs and outputs are stored for backward in bfloat16: in float32 they would take twice the
    memory.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs, logsumexp = attention(query, key, value)
        ctx.save_for_backward(query, key, value, outputs, logsumexp)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return attention_backward(gradient, *ctx.saved_tensors)


# -- gradients that autograd computes, for the backward passes written out in half_blocks.py


def norm_backward(
    gradient: Tensor, tokens: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Compute the gradient of the inputs of a layer norm, in float32."""
    arguments = (tokens.float(), [tokens.shape[-1]], mean, rstd, weight, bias)
    grad_tokens: Tensor = _NORM_BACKWARD(gradient.float(), *arguments, [True, False, False])[0]
    return grad_tokens


def gelu_backward_(gradient: Tensor, hidden: Tensor) -> None:
    """Replace the gradient of GELU by that of its inputs."""
    _GELU_BACKWARD(gradient, hidden, grad_input=gradient)

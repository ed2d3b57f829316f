"""Attention on CPUs: computed in float32, stored in the precision of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the outputs of attention in float32, and what its backward pass needs of them.

    On CPUs the backward pass of attention takes three times as long in bfloat16.

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
    gradients = _BACKWARD(*converted, logsumexp, 0.0, False)
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

"""Attention on CPUs with inputs in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionInFloat32(torch.autograd.Function):
    """`scaled_dot_product_attention` of bfloat16 queries, keys and values, computed in float32.

    On CPUs the backward pass of attention takes three times as long in bfloat16. Inputs and outputs
    are stored for backward in bfloat16: in float32 they would take twice the memory.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs, logsumexp = _ATTENTION(query.float(), key.float(), value.float())
        rounded: Tensor = outputs.to(query.dtype)
        ctx.save_for_backward(query, key, value, rounded, logsumexp)
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *saved, logsumexp = ctx.saved_tensors
        converted = [rows.float() for rows in (gradient, *saved)]
        gradients = _BACKWARD(*converted, logsumexp, 0.0, False)
        return tuple(rows.to(gradient.dtype) for rows in gradients)

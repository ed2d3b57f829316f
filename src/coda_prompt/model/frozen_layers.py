"""The two halves of a transformer block with frozen weights on a CPU, each as one operation.

Their backward passes are written out: gradients of the tokens and of a prefix and nothing else, in
place where possible; in autocast, tokens are stored in half precision for them. If autograd records
every operation instead, a step of a small ViT takes longer (docs/lab/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coda_prompt.model.attention import attention, attention_backward
from coda_prompt.model.linear import Weights, product, product_backward

_NORM: Any = torch.ops.aten.native_layer_norm
_NORM_BACKWARD: Any = torch.ops.aten.native_layer_norm_backward
_GELU_BACKWARD: Any = torch.ops.aten.gelu_backward.grad_input

Projected = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each B x tokens x D."""


class FrozenLayers(NamedTuple):
    """A layer norm, the linear layers of half a block, and what scales the result."""

    norm_weight: Tensor
    norm_bias: Tensor
    norm_eps: float
    first: Weights
    """oneDNN computes products with them, in the precision of their biases: float32, or bfloat16
    for autocast."""
    second: Weights
    scale: Tensor | None
    """Of LayerScale."""


class FrozenAttention(torch.autograd.Function):
    """x + attention(norm(x)), differentiable in x and in a prefix."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        prefix_keys: Tensor | None,
        prefix_values: Tensor | None,
        projected: Sequence[Tensor] | None,
        layers: FrozenLayers,
        heads: int,
    ) -> Tensor:
        """Run the half block.

        Args:
            ctx: Of autograd.
            tokens: B x tokens x D, float32.
            prefix_keys: B x rows x D.
            prefix_values: B x rows x D.
            projected: Queries, keys and values of the tokens, if known; neither they nor the tokens
                need a gradient then.
            layers: The norm, the joint projection and the projection after the attention.
            heads: Of the attention.
        """
        dtype = layers.first.bias.dtype
        mean = rstd = None
        if projected is None:
            normed, mean, rstd = _normed(tokens, layers)
            projected = product(normed.to(dtype), layers.first).chunk(3, dim=-1)
        query, key, value = projected
        if prefix_keys is not None and prefix_values is not None:
            key = torch.cat([prefix_keys.to(dtype), key.to(dtype)], dim=1)
            value = torch.cat([prefix_values.to(dtype), value.to(dtype)], dim=1)
            query = query.contiguous()  # a view would keep the keys and values twice
        by_head = [_by_head(rows.to(dtype), heads) for rows in (query, key, value)]
        attended, logsumexp = attention(*by_head)
        ctx.heads, ctx.rows = heads, None if prefix_keys is None else prefix_keys.shape[1]
        of_norm: tuple[Tensor | None, ...] = (None,) * 6
        if ctx.needs_input_grad[0]:
            of_norm = (layers.first.backward, *_for_norm_backward(tokens, mean, rstd, layers))
        of_product = (layers.second.backward, layers.scale)
        ctx.save_for_backward(*of_norm, *of_product, *by_head, attended, logsumexp)
        return add_residual(tokens, product(_joined(attended), layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the prefix."""
        first, *norm, second, scale, query, key, value, outputs, logsumexp = ctx.saved_tensors
        of_attended = product_backward(_scaled(gradient, scale).to(outputs.dtype), second)
        of_attended = _by_head(of_attended, ctx.heads)
        query, key, value = (
            _joined(rows)
            for rows in attention_backward(of_attended, query, key, value, outputs, logsumexp)
        )
        rows = ctx.rows or 0
        of_prefix = (None, None) if ctx.rows is None else (key[:, :rows], value[:, :rows])
        of_tokens = None
        if ctx.needs_input_grad[0]:
            joint = torch.cat([query, key[:, rows:], value[:, rows:]], dim=-1)
            of_tokens = _norm_backward(product_backward(joint, first), *norm).add_(gradient)
        return of_tokens, *of_prefix, None, None, None


class FrozenMLP(torch.autograd.Function):
    """x + MLP(norm(x)), differentiable in x."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layers: FrozenLayers) -> Tensor:
        """Run the half block on tokens B x tokens x D, float32."""
        normed, mean, rstd = _normed(tokens, layers)
        normed = normed.to(layers.first.bias.dtype)
        if ctx.needs_input_grad[0]:
            hidden = product(normed, layers.first)
            ctx.save_for_backward(
                layers.first.backward,
                *_for_norm_backward(tokens, mean, rstd, layers),
                *(layers.second.backward, layers.scale, hidden),
            )
            activated = F.gelu(hidden)
        else:
            activated = product(normed, layers.first, gelu=True)
        return add_residual(tokens, product(activated, layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the tokens."""
        first, *norm, second, scale, hidden = ctx.saved_tensors
        of_hidden = product_backward(_scaled(gradient, scale).to(hidden.dtype), second)
        _GELU_BACKWARD(of_hidden, hidden, grad_input=of_hidden)
        of_normed = product_backward(of_hidden, first)
        del of_hidden
        return _norm_backward(of_normed, *norm).add_(gradient), None


def add_residual(tokens: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """The residual stream after an update, which LayerScale may scale."""
    return tokens + update if scale is None else torch.addcmul(tokens, update, scale)


def _scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    return gradient if scale is None else gradient * scale


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """B x tokens x D to B x heads x tokens x D/h."""
    return rows.view(*rows.shape[:2], heads, -1).transpose(1, 2)


def _joined(rows: Tensor) -> Tensor:
    """B x heads x tokens x D/h to B x tokens x D."""
    return rows.transpose(1, 2).flatten(2)


def _normed(tokens: Tensor, layers: FrozenLayers) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised tokens, and the mean and the reciprocal deviation of each."""
    outputs: tuple[Tensor, Tensor, Tensor] = _NORM(tokens, [tokens.shape[-1]], *layers[:3])
    return outputs


def _for_norm_backward(
    tokens: Tensor, mean: Tensor | None, rstd: Tensor | None, layers: FrozenLayers
) -> tuple[Tensor | None, ...]:
    """What the backward pass of a norm needs: all its arguments but the gradient."""
    dtype = layers.first.bias.dtype
    if dtype != tokens.dtype and mean is not None:  # rounding would be relative to the mean, too
        tokens, mean = (tokens - mean).to(dtype), torch.zeros_like(mean)
    return tokens, mean, rstd, layers.norm_weight, layers.norm_bias


def _norm_backward(
    gradient: Tensor, tokens: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    arguments = (tokens.float(), [tokens.shape[-1]], mean, rstd, weight, bias)
    of_tokens: Tensor = _NORM_BACKWARD(gradient.float(), *arguments, [True, False, False])[0]
    return of_tokens

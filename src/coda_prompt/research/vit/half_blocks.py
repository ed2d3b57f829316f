"""The two halves of a transformer block with frozen weights on a CPU, each as one operation.

Their backward passes are written out: gradients of the tokens and of a prefix and nothing else, in
place where possible; in autocast, tokens are stored in half precision for them. If autograd records
every operation instead, a step of a small ViT takes longer (docs/lab/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coda_prompt.research.vit.fast_cpu import (
    attention,
    attention_backward,
    computes,
    gelu_backward_,
    norm_backward,
    product,
)
from coda_prompt.research.vit.linear import Linear

Projected = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each B x tokens x D."""


class FrozenLayers(NamedTuple):
    """A layer norm, the linear layers of half a block, and what scales the result."""

    norm_weight: Tensor
    norm_bias: Tensor
    norm_eps: float
    first: tuple[Tensor, Tensor]
    """Weight and bias, cast for autocast."""
    second: tuple[Tensor, Tensor]
    scale: Tensor | None
    """Of LayerScale."""


def frozen_layers(
    tokens: Tensor, norm: nn.LayerNorm, first: Linear, second: Linear, scale: Tensor | None
) -> FrozenLayers | None:
    """Return half of a block as layers of one operation; None if it cannot be one."""
    if tokens.dtype != torch.float32 or not (first.frozen and second.frozen):
        return None
    if norm.weight.requires_grad or norm.bias.requires_grad:
        return None
    if scale is not None and scale.requires_grad:
        return None
    before, after = (layer.weights(tokens.device.type) for layer in (first, second))
    if not (computes(tokens, before[0]) and computes(tokens, after[0])):
        return None
    return FrozenLayers(norm.weight, norm.bias, norm.eps, before, after, scale)


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
        dtype = layers.first[0].dtype
        mean = rstd = None
        if projected is None:
            normed, mean, rstd = _normed(tokens, layers)
            projected = product(normed.to(dtype), *layers.first).chunk(3, dim=-1)
        query, key, value = projected
        if prefix_keys is not None and prefix_values is not None:
            key = torch.cat([prefix_keys.to(dtype), key.to(dtype)], dim=1)
            value = torch.cat([prefix_values.to(dtype), value.to(dtype)], dim=1)
            query = query.contiguous()  # a view would keep the keys and values twice
        by_head = [_by_head(rows.to(dtype), heads) for rows in (query, key, value)]
        attended, logsumexp = attention(*by_head)
        ctx.heads, ctx.rows = heads, None if prefix_keys is None else prefix_keys.shape[1]
        for_norm: tuple[Tensor | None, ...] = (None,) * 6
        if ctx.needs_input_grad[0]:
            for_norm = (layers.first[0], *_for_norm_backward(tokens, mean, rstd, layers))
        for_product = (layers.second[0], layers.scale)
        ctx.save_for_backward(*for_norm, *for_product, *by_head, attended, logsumexp)
        return add_residual(tokens, product(_joined(attended), *layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the prefix."""
        first, *norm, second, scale, query, key, value, outputs, logsumexp = ctx.saved_tensors
        grad_attended = product(_scaled(gradient, scale).to(outputs.dtype), second.t(), None)
        grad_attended = _by_head(grad_attended, ctx.heads)
        query, key, value = (
            _joined(rows)
            for rows in attention_backward(grad_attended, query, key, value, outputs, logsumexp)
        )
        rows = ctx.rows or 0
        grad_prefix = (None, None) if ctx.rows is None else (key[:, :rows], value[:, :rows])
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            joint = torch.cat([query, key[:, rows:], value[:, rows:]], dim=-1)
            grad_tokens = norm_backward(product(joint, first.t(), None), *norm).add_(gradient)
        return grad_tokens, *grad_prefix, None, None, None


class FrozenMLP(torch.autograd.Function):
    """x + MLP(norm(x)), differentiable in x."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layers: FrozenLayers) -> Tensor:
        """Run the half block on tokens B x tokens x D, float32."""
        normed, mean, rstd = _normed(tokens, layers)
        normed = normed.to(layers.first[0].dtype)
        if ctx.needs_input_grad[0]:
            hidden = product(normed, *layers.first)
            ctx.save_for_backward(
                layers.first[0],
                *_for_norm_backward(tokens, mean, rstd, layers),
                *(layers.second[0], layers.scale, hidden),
            )
            activated = F.gelu(hidden)
        else:
            activated = product(normed, *layers.first, gelu=True)
        return add_residual(tokens, product(activated, *layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the tokens."""
        first, *norm, second, scale, hidden = ctx.saved_tensors
        grad_hidden = product(_scaled(gradient, scale).to(hidden.dtype), second.t(), None)
        gelu_backward_(grad_hidden, hidden)
        grad_normed = product(grad_hidden, first.t(), None)
        del grad_hidden
        return norm_backward(grad_normed, *norm).add_(gradient), None


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
    outputs: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(
        tokens, [tokens.shape[-1]], *layers[:3]
    )
    return outputs


def _for_norm_backward(
    tokens: Tensor, mean: Tensor | None, rstd: Tensor | None, layers: FrozenLayers
) -> tuple[Tensor | None, ...]:
    """What the backward pass of a norm needs: all its arguments but the gradient."""
    dtype = layers.first[0].dtype
    if dtype != tokens.dtype and mean is not None:  # rounding would be relative to the mean, too
        tokens, mean = (tokens - mean).to(dtype), torch.zeros_like(mean)
    return tokens, mean, rstd, layers.norm_weight, layers.norm_bias

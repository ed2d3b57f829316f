"""The two halves of a transformer block with frozen weights on a CPU, each as one operation.

Their backward passes are written out: gradients of the tokens and of a prefix and nothing else, in
place where possible; in autocast, all that they need is stored in half precision. Recorded by
autograd operation by operation, a step of a small ViT takes 8 % longer (docs/lab/performance.md).
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
    """In float32, or in bfloat16 for autocast; oneDNN computes products with them."""
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
            projected: Queries, keys and values of the tokens, if known.
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
        ctx.layers, ctx.heads = layers, heads
        ctx.rows = 0 if prefix_keys is None else prefix_keys.shape[1]
        weights = (layers.first.backward, layers.second.backward)
        statistics = (tokens.to(dtype), mean, rstd)
        ctx.save_for_backward(*weights, *statistics, *by_head, attended, logsumexp)
        return added(tokens, product(_joined(attended), layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the prefix."""
        first, second, tokens, mean, rstd, *attended = ctx.saved_tensors
        dtype, rows = attended[0].dtype, ctx.rows
        of_attended = product_backward(_scaled(gradient, ctx.layers).to(dtype), second)
        of_heads = attention_backward(_by_head(of_attended, ctx.heads), *attended)
        query, key, value = (_joined(each) for each in of_heads)
        of_prefix = (key[:, :rows], value[:, :rows]) if rows else (None, None)
        of_tokens = None
        if ctx.needs_input_grad[0]:
            joint = torch.cat([query, key[:, rows:], value[:, rows:]], dim=-1)
            of_normed = product_backward(joint, first)
            of_tokens = _norm_backward(of_normed, tokens, mean, rstd, ctx.layers).add_(gradient)
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
            ctx.layers = layers
            weights = (layers.first.backward, layers.second.backward)
            ctx.save_for_backward(*weights, tokens.to(hidden.dtype), mean, rstd, hidden)
            activated = F.gelu(hidden)
        else:
            activated = product(normed, layers.first, gelu=True)
        return added(tokens, product(activated, layers.second), layers.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the tokens."""
        first, second, tokens, mean, rstd, hidden = ctx.saved_tensors
        of_hidden = product_backward(_scaled(gradient, ctx.layers).to(hidden.dtype), second)
        _GELU_BACKWARD(of_hidden, hidden, grad_input=of_hidden)
        of_normed = product_backward(of_hidden, first)
        del of_hidden
        return _norm_backward(of_normed, tokens, mean, rstd, ctx.layers).add_(gradient), None


def added(tokens: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """The residual stream after an update, which LayerScale may scale."""
    return tokens + update if scale is None else torch.addcmul(tokens, update, scale)


def _scaled(gradient: Tensor, layers: FrozenLayers) -> Tensor:
    return gradient if layers.scale is None else gradient * layers.scale


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


def _norm_backward(
    gradient: Tensor, tokens: Tensor, mean: Tensor, rstd: Tensor, layers: FrozenLayers
) -> Tensor:
    weight, bias, _ = layers[:3]
    of_tokens: Tensor = _NORM_BACKWARD(
        gradient.float(),
        tokens.float(),
        [tokens.shape[-1]],
        mean,
        rstd,
        weight,
        bias,
        [True, False, False],
    )[0]
    return of_tokens

"""Attention of bfloat16 inputs on a CPU: computed in float32, stored in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.model.fast_cpu import AttentionInFloat32


def rows() -> list[Tensor]:
    """Queries, keys and values: 2 images x 3 heads x tokens x 8 channels."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def test_outputs_and_gradients_are_those_of_torch_in_float32() -> None:
    mine, other = rows(), rows()
    found = AttentionInFloat32.apply(*mine)
    expected = F.scaled_dot_product_attention(*(each.float() for each in other))
    assert torch.equal(found, expected.bfloat16())
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found.backward(gradient)
    expected.backward(gradient.float())
    for each, reference in zip(mine, other, strict=True):
        assert each.grad is not None
        assert reference.grad is not None
        assert each.grad.dtype == torch.bfloat16
        error = (each.grad.float() - reference.grad.float()).abs().max()
        assert error < 0.01 * reference.grad.float().abs().max()  # the stored outputs are rounded


def test_inputs_and_outputs_are_stored_in_bfloat16() -> None:
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: stored.append(each.dtype) or each, lambda each: each
    ):
        AttentionInFloat32.apply(*rows())
    assert stored.count(torch.bfloat16) == 4
    assert len(stored) == 5  # and the normalisers


def test_an_empty_batch() -> None:
    empty = [each[:0] for each in rows()]
    assert AttentionInFloat32.apply(*empty).shape == (0, 3, 5, 8)

"""Products through oneDNN are those of torch, and only frozen weights go that way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from coda_prompt.research.vit import fast_cpu
from coda_prompt.research.vit.linear import Linear

pytestmark = pytest.mark.skipif(fast_cpu._PRODUCT is None, reason="torch without oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What oneDNN was asked for."""
    asked: list[str] = []
    real = fast_cpu._PRODUCT

    def product(inputs: Tensor, weight: Tensor, bias: Tensor, kind: str, *rest: Any) -> Tensor:
        asked.append(kind)
        return real(inputs, weight, bias, kind, *rest)

    monkeypatch.setattr(fast_cpu, "_PRODUCT", product)
    return asked


def frozen(inputs: int = 24, outputs: int = 40) -> Linear:
    return Linear(inputs, outputs).requires_grad_(False)


@pytest.mark.parametrize("shape", [(3, 24), (2, 5, 24), (1, 1, 24)])
def test_products_and_gradients_equal_those_of_torch(
    shape: tuple[int, ...], calls: list[str]
) -> None:
    layer = frozen()
    mine, other = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for _ in "ab")
    found, expected = (
        layer(mine.requires_grad_()),
        F.linear(other.requires_grad_(), layer.weight, layer.bias),
    )
    assert_close(found, expected)
    for product in (found, expected):
        product.square().sum().backward()
    assert_close(mine.grad, other.grad)
    assert calls == ["none", "none"]


def test_slices_of_a_weight(calls: list[str]) -> None:
    layer, inputs = frozen(), torch.randn(2, 5, 24)
    found = layer(inputs, slice(8, None))
    assert_close(found, F.linear(inputs, layer.weight[8:], layer.bias[8:]))
    assert calls == ["none"]


def test_gelu_is_fused_with_the_product_if_nothing_trains(calls: list[str]) -> None:
    layer, inputs = frozen(), torch.randn(2, 5, 24)
    expected = F.gelu(F.linear(inputs, layer.weight, layer.bias))
    with torch.no_grad():
        assert_close(layer(inputs, gelu=True), expected)
    with torch.inference_mode():
        assert_close(layer(inputs, gelu=True), expected)
    assert calls == ["gelu", "gelu"]
    assert_close(layer(inputs.requires_grad_(), gelu=True), expected)
    assert calls[2:] == ["none"]


def test_all_else_is_left_to_torch(calls: list[str]) -> None:
    inputs = torch.randn(2, 5, 24)
    trained = Linear(24, 40)
    trained(inputs).sum().backward()
    assert trained.weight.grad is not None
    double = frozen().double()
    assert double(inputs.double()).dtype == torch.float64
    assert frozen()(inputs[:0]).shape == (0, 5, 40)
    assert frozen().to("meta")(inputs.to("meta")).shape == (2, 5, 40)
    with torch.backends.mkldnn.flags(enabled=False):
        frozen()(inputs)
    assert calls == []


def test_frozen_weights_are_cast_once_for_autocast() -> None:
    layer, inputs = frozen(), torch.randn(2, 5, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, again = layer(inputs), layer(inputs, slice(8, None))
        expected = F.linear(inputs, layer.weight, layer.bias)
        cast = layer._cast
        layer(inputs)
        assert cast is not None
        assert layer._cast is cast, "no second cast"
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_close(found, expected, atol=0.02, rtol=0.02)
    assert_close(again, expected[..., 8:], atol=0.02, rtol=0.02)
    (gradient,) = torch.autograd.grad(found.float().sum(), inputs)
    assert_close(gradient, layer.weight.sum(dim=0).expand_as(inputs), atol=0.05, rtol=0.02)
    layer.weight.mul_(2)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert_close(
            layer(inputs), F.linear(inputs, layer.weight, layer.bias), atol=0.03, rtol=0.02
        )
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_casts_are_freed_when_the_layer_trains() -> None:
    layer, inputs = frozen(), torch.randn(2, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        layer(inputs)
        assert layer._cast is not None
        layer.requires_grad_(True)(inputs)
    assert layer._cast is None


@pytest.mark.parametrize("bfloat16", [False, True])
def test_replaced_weights_are_noticed(bfloat16: bool) -> None:
    layer, inputs = frozen(), torch.randn(2, 5, 24)
    tolerance = 0.05 if bfloat16 else 1e-5

    def check() -> None:
        expected = F.linear(inputs, layer.weight, layer.bias)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            found = layer(inputs).float()
        assert_close(found, expected, atol=tolerance, rtol=tolerance)

    check()
    for _ in range(8):  # a new parameter may get the address of the old one
        layer.weight = None  # type: ignore[assignment]
        layer.weight = torch.nn.Parameter(torch.randn(40, 24), requires_grad=False)
        check()
    layer.bias.data = torch.randn(40)
    check()
    layer.load_state_dict(frozen().state_dict())
    check()
    layer.load_state_dict(frozen().state_dict(), assign=True)
    layer.requires_grad_(False)
    check()


def test_layers_made_in_inference_mode() -> None:
    with torch.inference_mode():
        layer, inputs = frozen(), torch.randn(2, 5, 24)
        assert_close(layer(inputs), F.linear(inputs, layer.weight, layer.bias))


def test_a_layer_in_bfloat16_is_exported() -> None:
    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = frozen()

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(inputs)

    module, inputs = Cast(), torch.randn(2, 24)
    exported = torch.export.export(module, (inputs,)).module()
    assert_close(exported(inputs), module(inputs), atol=0.02, rtol=0.02)


def test_trained_weights_are_not_cast_in_advance() -> None:
    layer, inputs = Linear(24, 40), torch.randn(3, 24)
    with torch.autocast("cpu", torch.bfloat16):
        layer(inputs).sum().backward()
    assert layer._cast is None
    assert layer.weight.grad is not None


def test_trainable_bias_and_functional_gradients_use_torch(calls: list[str]) -> None:
    inputs = torch.randn(3, 24)
    layer = frozen()
    layer.bias.requires_grad_(True)
    layer(inputs).sum().backward()
    assert layer.bias.grad is not None, "a bias that trains"
    other = frozen()
    gradient = torch.func.grad(lambda x: other(x).square().sum())(inputs)
    assert_close(gradient, 2 * F.linear(inputs, other.weight, other.bias) @ other.weight)
    assert calls == []
    with pytest.raises(RuntimeError, match="shapes"):
        other(torch.randn(3, 7))


def test_invalid_inputs_raise_the_errors_of_torch(calls: list[str]) -> None:
    layer, inputs = frozen(), torch.randn(3, 24, requires_grad=True)
    product = layer(inputs)
    layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    first = torch.autograd.grad(frozen()(inputs).square().sum(), inputs, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert set(calls) == {"none"}

"""Half blocks with frozen weights: the results and gradients of autograd, with less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import TINY
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research.vit import fast_cpu
from coda_prompt.research.vit.half_blocks import FrozenAttention, FrozenMLP
from coda_prompt.research.vit.vit import ViT, ViTConfig

pytestmark = pytest.mark.skipif(fast_cpu._PRODUCT is None, reason="torch without oneDNN")
SCALED = replace(TINY, layer_scale=True)
IMAGES = 3


def random_vit(config: ViTConfig) -> ViT:
    """Return a frozen ViT in which every layer matters."""
    vit = ViT(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in vit.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return vit.requires_grad_(False)


def inputs(rows: int = 2, batch: int = IMAGES) -> tuple[Tensor, ...]:
    """Return tokens and the keys and values of a prefix, all with gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((IMAGES, TINY.tokens, TINY.width), *[(batch, rows, TINY.width)] * 2)
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def recorded_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coda_prompt.research.vit.vit.frozen_layers", lambda *_: None)


def gradients(vit: ViT, tokens: Tensor, *prefix: Tensor) -> list[Tensor]:
    """Return the outputs of all blocks but the last, and the gradients of all inputs."""
    edits = {0: prefix, 2: prefix} if prefix else {}
    outputs = vit.run(tokens, range(5), edits)  # type: ignore[arg-type]
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    return [outputs, *torch.autograd.grad((outputs * weights).sum(), (tokens, *prefix))]


@pytest.mark.parametrize("batch", [IMAGES, 1])
@pytest.mark.parametrize("config", [TINY, SCALED], ids=["plain", "LayerScale"])
def test_results_and_gradients_are_those_of_autograd(
    config: ViTConfig, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit, prompted = random_vit(config), inputs(batch=batch)
    for given in (prompted, prompted[:1]):
        found = gradients(vit, *given)
        with monkeypatch.context() as patch:
            recorded_by_autograd(patch)
            expected = gradients(vit, *given)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_gradients_in_bfloat16_are_as_near_as_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vit, given = random_vit(SCALED), inputs()
    exact = gradients(vit, *given)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(vit, *given)
        with monkeypatch.context() as patch:
            recorded_by_autograd(patch)
            others = gradients(vit, *given)
    for mine, other, reference in zip(found, others, exact, strict=True):
        assert mine.dtype == torch.float32
        error, usual = ((each - reference).norm() for each in (mine, other))
        assert 0 < error < 1.3 * usual


def test_known_projections_are_used_and_tokens_may_need_no_gradient() -> None:
    vit, (tokens, *prefix) = random_vit(SCALED), inputs()
    block, plain = vit.blocks[0], tokens.detach()
    edits = {0: tuple(prefix)}
    expected = vit.run(plain, [0], edits)  # type: ignore[arg-type]
    found = vit.run(plain, [0], edits, projected=block.project(plain, False))  # type: ignore[arg-type,operator]
    assert torch.equal(found, expected)
    for mine, other in zip(
        torch.autograd.grad(found.sum(), prefix),
        torch.autograd.grad(expected.sum(), prefix),
        strict=True,
    ):
        assert torch.equal(mine, other)


def test_gradients_pass_through_known_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, (tokens, *_) = random_vit(SCALED), inputs()
    block = vit.blocks[0]
    found = vit.run(tokens, [0], projected=block.project(tokens, False))  # type: ignore[operator]
    mine = torch.autograd.grad(found.square().sum(), tokens)[0]
    recorded_by_autograd(monkeypatch)
    other = torch.autograd.grad(vit.run(tokens, [0]).square().sum(), tokens)[0]
    assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_pass_started_in_inference_mode_trains_a_prefix_of_any_length() -> None:
    vit = random_vit(SCALED)
    with torch.inference_mode():
        started = vit.start(torch.rand(IMAGES, 1, 16, 16))
    for rows in (0, 2):
        _, *prefix = inputs(rows)
        outputs = vit.features(started, {0: tuple(prefix)})  # type: ignore[dict-item]
        gradients = torch.autograd.grad(outputs.square().sum(), prefix)
        assert [each.shape[1] for each in gradients] == [rows, rows]
        assert bool(gradients[0].abs().sum() > 0) == (rows > 0)


def test_rounding_in_bfloat16_does_not_grow_with_the_mean_of_tokens() -> None:
    vit, (tokens, *_) = random_vit(TINY), inputs()
    errors = []
    for mean in (0.0, 100.0):
        shifted = (tokens + mean).detach().requires_grad_()
        exact = gradients(vit, shifted)[1] - torch.randn(
            tokens.shape, generator=torch.Generator().manual_seed(2)
        )  # without the gradient of the residual stream
        with torch.autocast("cpu", torch.bfloat16):
            rounded = gradients(vit, shifted)[1]
        rounded = rounded - torch.randn(tokens.shape, generator=torch.Generator().manual_seed(2))
        errors.append(float((rounded - exact).norm() / exact.norm()))
    assert errors[1] < 2 * errors[0]


def test_a_frozen_layer_before_one_that_trains_without_gradients() -> None:
    for name in ("attn.proj.weight", "mlp.fc2.weight"):
        vit, (tokens, *_) = random_vit(TINY), inputs()
        expected = vit.run(tokens, range(2)).detach()
        vit.get_parameter(f"blocks.0.{name}").requires_grad_()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_close(vit.run(tokens, range(2)), expected, atol=0.1, rtol=0.1)


def test_passes_with_and_without_gradients_agree() -> None:
    vit, (tokens, *_) = random_vit(SCALED), inputs()
    expected = vit.run(tokens)
    with torch.no_grad():
        assert_close(vit.run(tokens), expected, atol=1e-6, rtol=1e-5)
    with torch.inference_mode():
        assert_close(vit.run(tokens), expected, atol=1e-6, rtol=1e-5)


def test_what_trains_is_left_to_autograd() -> None:
    for name in ("norm1.weight", "attn.qkv.bias", "ls1.gamma", "norm2.bias", "mlp.fc2.weight"):
        vit, (tokens, *_) = random_vit(SCALED), inputs()
        trained = vit.get_parameter(f"blocks.1.{name}").requires_grad_()
        vit.run(tokens, range(3)).sum().backward()
        assert trained.grad is not None, name
        assert trained.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "name", ["norm1.weight", "attn.qkv.weight", "ls1.gamma", "norm2.weight", "mlp.fc1.weight"]
)
def test_changed_weights_raise_an_error(name: str) -> None:
    vit, (tokens, *_) = random_vit(SCALED), inputs()
    outputs = vit.run(tokens, range(2))
    vit.get_parameter(f"blocks.0.{name}").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_second_derivatives_raise_an_error() -> None:
    vit, (tokens, *_) = random_vit(TINY), inputs()
    outputs = vit.run(tokens, range(2))
    first = torch.autograd.grad(outputs.square().sum(), tokens, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_only_the_inputs_of_products_and_norms_are_stored() -> None:
    """In units of the tokens: 6 for the attention, 5 for the MLP, and small statistics."""
    vit, (tokens, *_) = random_vit(replace(SCALED, mlp_width=4 * TINY.width)), inputs()
    weights = {each.data_ptr() for each in vit.parameters()}
    stored: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = vit.run(tokens, [0])
    assert "FrozenMLP" in str(outputs.grad_fn)
    assert 10 <= sum(stored.values()) / (tokens.numel() * 4) < 10.5


def test_one_operation_each() -> None:
    vit, (tokens, *_) = random_vit(TINY), inputs()
    half = vit.run(tokens, [0]).grad_fn
    assert half is not None
    assert half.name() == f"{FrozenMLP.__name__}Backward"
    assert half.next_functions[0][0].name() == f"{FrozenAttention.__name__}Backward"  # type: ignore[union-attr]

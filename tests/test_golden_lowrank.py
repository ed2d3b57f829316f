"""The numbers of the released code of SD-LoRA, InfLoRA and LoRanPAC, reproduced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from small import brief
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from coda_prompt import methods
from coda_prompt.methods.inflora import directions_to_protect
from coda_prompt.model.vit import Attention, ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(GOLDEN / "lowrank.safetensors")


def part(golden: Tensors, prefix: str) -> SimpleNamespace:
    """The tensors below a prefix, as `of("name")`."""
    return SimpleNamespace(of=lambda name: golden[f"{prefix}.{name}"])


def test_sdlora_projections_and_gradients_in_the_third_task(golden: Tensors) -> None:
    released = part(golden, "sdlora")
    down, up = released.of("down"), released.of("up").mT  # tasks x blocks x (q, v) x rank x D
    vit = ViT(ViTConfig(8, 4, 3, width=12, depth=2, heads=2, mlp_width=8))
    method = methods.make("sd-lora", vit, rank=3)
    for task in range(3):
        method.begin_task(brief(method, new=2))
        with torch.no_grad():
            for index, target in enumerate(("q", "v")):
                method.directions.down[target].trainable.copy_(down[task, :, index])
                method.directions.up[target].trainable.copy_(up[task, :, index])
        if task < 2:
            method.end_task()
    method.magnitudes.trainable.data.copy_(released.of("magnitudes"))
    edits, inputs = method.edits(), released.of("inputs")
    for block in range(2):
        plain = F.linear(
            inputs, released.of(f"{block}.qkv.weight"), released.of(f"{block}.qkv.bias")
        )
        query, key, value = plain.chunk(3, dim=-1)
        deltas = edits[block].deltas
        outputs = torch.cat([query + deltas["q"](inputs), key, value + deltas["v"](inputs)], dim=-1)
        assert_close(outputs, released.of(f"{block}.outputs"), **TOLERANCE)
        method.zero_grad()
        (outputs * released.of("probe")).sum().backward(retain_graph=True)
        for target in ("q", "v"):
            down_gradient = method.directions.down[target].trainable.grad[block]
            up_gradient = method.directions.up[target].trainable.grad[block]
            assert_close(down_gradient, released.of(f"{block}.{target}.down.grad"), **TOLERANCE)
            assert_close(up_gradient.T, released.of(f"{block}.{target}.up.grad"), **TOLERANCE)
        assert_close(
            method.magnitudes.trainable.grad, released.of(f"{block}.magnitudes.grad"), **TOLERANCE
        )


def test_inflora_directions_over_nine_tasks(golden: Tensors) -> None:
    """Also after the released code has replaced its basis by the orthogonal complement."""
    width, tasks = 16, 9
    old = torch.zeros(0, width, dtype=torch.float64)
    for task in range(tasks):
        released = part(golden, f"inflora.{task}")
        rows = released.of("inputs").flatten(0, 1).double()
        moment = rows.T @ rows / len(rows)
        assert_close(moment.float(), released.of("moment"), **TOLERANCE)
        free = moment - old.T @ old @ moment
        leading = torch.linalg.svd(free).U[:, :3]
        down = released.of("down").double()
        assert_close(down.T @ down, leading @ leading.T / 3, **TOLERANCE)
        old = torch.cat([old, directions_to_protect(moment, old, 0.6 + 0.4 * task / tasks)])
        assert_close((old.T @ old).float(), released.of("protected"), **TOLERANCE)
    assert len(old) > width / 2


def test_inflora_attention_with_all_components(golden: Tensors) -> None:
    released = part(golden, "inflora")
    vit = ViT(ViTConfig(8, 4, 3, width=16, depth=1, heads=2, mlp_width=8))
    attention: Attention = vit.blocks[0].attn  # type: ignore[assignment]
    for layer in ("qkv", "proj"):
        getattr(attention, layer).weight.data = released.of(f"{layer}.weight")
        getattr(attention, layer).bias.data = released.of(f"{layer}.bias")
    method = methods.make("inflora", vit, rank=3)
    for task in range(9):
        method.begin_task(brief(method, new=2))
        down, up_k, up_v = (released.of(f"{task}.{name}") for name in ("down", "up.k", "up.v"))
        method.delta.down["shared"].frozen[0, -3:] = down
        with torch.no_grad():
            method.delta.up["k"].trainable.copy_(up_k.T[None])
            method.delta.up["v"].trainable.copy_(up_v.T[None])
        inputs, deltas = released.of(f"{task}.inputs"), method.edits()[0].deltas
        query, key, value = attention.qkv(inputs).chunk(3, dim=-1)
        projected = (query, key + deltas["k"](inputs), value + deltas["v"](inputs))
        assert_close(attention(*projected, None), released.of(f"{task}.outputs"), **TOLERANCE)
        method.end_task()


@pytest.mark.parametrize(("form", "features", "tasks"), [("wide", 60, 2), ("tall", 20, 3)])
def test_loranpac_values_and_scores(golden: Tensors, form: str, features: int, tasks: int) -> None:
    """With fewer images than random features, and with more."""
    released = part(golden, f"loranpac.{form}")
    vit = ViT(ViTConfig(8, 4, 3, width=6, depth=1, heads=2, mlp_width=8))
    method = methods.make("loranpac", vit, width=features)
    for task in range(tasks):
        method.begin_task(brief(method, new=3))
        projection = released.of("projection")
        method.statistics._projection = (int(method.statistics.seed), projection)
        method.fit(released.of(f"{task}.features"), None, released.of(f"{task}.labels"))
        method.end_task()
        values = method.statistics.spectrum.frozen.norm(dim=1)
        assert_close(values, released.of(f"{task}.values"), **TOLERANCE)
        scores = method.scores(released.of("test"))
        assert_close(scores, released.of(f"{task}.logits"), **TOLERANCE)

"""The numbers of the released code, reproduced to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import brief
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.bench.metrics import forgetting_paper
from coda_prompt.research.methods import Method, TrainingBatch
from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.methods.dualprompt import DualPrompt
from coda_prompt.research.streams.groups import class_order
from coda_prompt.research.training.schedule import learning_rate
from coda_prompt.research.vit.vit import ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
Tensors = dict[str, Tensor]


@pytest.fixture
def vit(golden_tensors: Tensors) -> ViT:
    vit = ViT(ViTConfig(32, 8, 3, 32, 6, 4, 128))
    prefix = "vit."
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in golden_tensors.items()
        if name.startswith(prefix)
    }
    vit.load_state_dict(weights)
    return vit


def stacked(tensors: Tensors, family: str, kind: str, blocks: tuple[int, ...]) -> Tensor:
    return torch.stack([tensors[f"{family}.{block}.{kind}"] for block in blocks])


def learned(method: Method, tensors: Tensors, family: str, kinds: dict[str, Tensor]) -> Method:
    """Put tensors of the released code where learning would have left them."""
    state = {name: tensors[name] for name in ("head.weight", "head.bias")} | kinds
    state |= {"task_sizes": torch.tensor([3, 3, 3])}
    banks = {f"{name}.frozen": tensor for name, tensor in state.items()}
    method.load_learned_state(method.learned_state() | banks)
    return method


def coda(vit: ViT, tensors: Tensors) -> CodaPrompt:
    method = methods.make("coda-p", vit, components=12, tasks=3, length=4, orthogonality_weight=0.1)
    blocks = (0, 1, 2, 3, 4)
    kinds = {kind: stacked(tensors, "coda", kind, blocks) for kind in method.prompt_banks}
    learned(method, tensors, "coda", {**kinds, "component_sizes": torch.tensor([4, 4, 4])})
    return method


def coda_in_task_3(vit: ViT, tensors: Tensors) -> CodaPrompt:
    """Two tasks learned, the third one begun, at the values the released code had there."""
    method = coda(vit, tensors)
    state = {
        name.removesuffix(".frozen"): tensor for name, tensor in method.learned_state().items()
    }
    begun = methods.make("coda-p", vit, **vars_of(method))
    two_tasks = {
        "components": state["components"][:, :8],
        "keys": state["keys"][:, :8],
        "attention": state["attention"][:, :8],
        "component_sizes": torch.tensor([4, 4]),
        "task_sizes": torch.tensor([3, 3]),
        "head.weight": state["head.weight"][:6],
        "head.bias": state["head.bias"][:6],
    }
    begun.load_learned_state({f"{name}.frozen": tensor for name, tensor in two_tasks.items()})
    begun.begin_task(brief(begun, new=3))
    with torch.no_grad():
        for kind in begun.prompt_banks:
            getattr(begun, kind).trainable.copy_(state[kind][:, 8:])
        begun.head.weight.trainable.copy_(state["head.weight"][6:])
        begun.head.bias.trainable.copy_(state["head.bias"][6:])
    return begun


def vars_of(method: Method) -> dict[str, Any]:
    return dict(vars(method.config))


def test_queries_equal_the_released_code(vit: ViT, golden_tensors: Tensors) -> None:
    assert_close(vit.features(golden_tensors["images"]), golden_tensors["query"], **TOLERANCE)


def test_coda_features_and_logits_at_inference(vit: ViT, golden_tensors: Tensors) -> None:
    method = coda(vit, golden_tensors)
    images, query = golden_tensors["images"], golden_tensors["query"]
    assert_close(method.features(images, query), golden_tensors["coda.features"], **TOLERANCE)
    assert_close(method.logits(images), golden_tensors["coda.logits"], **TOLERANCE)


def test_coda_losses_and_all_gradients_in_task_3(
    vit: ViT, golden_tensors: Tensors, golden_numbers: dict[str, Any]
) -> None:
    method = coda_in_task_3(vit, golden_tensors)
    images, targets = golden_tensors["images"], golden_tensors["targets"]
    loss = method.loss(TrainingBatch(images, targets, method.queries(images)))
    assert float(loss.mean.mean()) == pytest.approx(golden_numbers["coda_task3_ce"], rel=1e-5)
    expected = golden_numbers["coda_task3_ortho_0.1_mean_squares"]
    assert float(loss.penalty) == pytest.approx(expected, rel=1e-5)
    assert float(loss.total.sum()) == 0

    (loss.mean.mean() + loss.penalty).backward()
    for kind in method.prompt_banks:
        expected_gradient = stacked(golden_tensors, "coda", f"{kind}.grad", (0, 1, 2, 3, 4))
        assert not expected_gradient[:, :8].any(), "older components are frozen there too"
        found = getattr(method, kind).trainable.grad
        assert_close(found, expected_gradient[:, 8:], **TOLERANCE)
        assert not getattr(method, kind).frozen.requires_grad
    assert not golden_tensors["head.weight.grad"][:6].any()
    found = method.head.weight.trainable.grad
    assert_close(found, golden_tensors["head.weight.grad"][6:], **TOLERANCE)


def dual(vit: ViT, tensors: Tensors, tasks: int) -> DualPrompt:
    method = methods.make("dualprompt", vit, general_length=6, expert_length=8)
    general = stacked(tensors, "dual", "general", (0, 1))[:, None]
    experts = stacked(tensors, "dual", "expert", (2, 3, 4))[:, :tasks]
    keys = stacked(tensors, "dual", "keys", (2, 3, 4))[:, :tasks]
    kinds = {"general": general, "experts": experts, "keys": keys}
    learned(method, tensors, "dual", kinds)
    return method


def test_dualprompt_features_at_inference(vit: ViT, golden_tensors: Tensors) -> None:
    method = dual(vit, golden_tensors, tasks=3)
    found = method.features(golden_tensors["images"], golden_tensors["query"])
    assert_close(found, golden_tensors["dual.features"], **TOLERANCE)


def test_dualprompt_features_and_key_loss_in_task_3(
    vit: ViT, golden_tensors: Tensors, golden_numbers: dict[str, Any]
) -> None:
    method = dual(vit, golden_tensors, tasks=2)
    method.begin_task(brief(method, new=3))
    with torch.no_grad():
        method.experts.trainable.copy_(stacked(golden_tensors, "dual", "expert", (2, 3, 4))[:, 2:])
        method.keys.trainable.copy_(stacked(golden_tensors, "dual", "keys", (2, 3, 4))[:, 2:])
    images, query = golden_tensors["images"], golden_tensors["query"]
    prefixes, key_loss = method.training_prefixes(query)
    expected = golden_tensors["dual.train_features_task3"]
    assert_close(vit.features(images, prefixes), expected, **TOLERANCE)
    total = golden_numbers["dual_key_loss_task3"]
    assert float(key_loss.sum()) == pytest.approx(total, rel=1e-5)


def test_l2p_features_at_inference(vit: ViT, golden_tensors: Tensors) -> None:
    method = methods.make("l2p++", vit, pool=10, length=4, top=5)
    kinds = {kind: stacked(golden_tensors, "l2p", kind, (0,)) for kind in ("prompts", "keys")}
    learned(method, golden_tensors, "l2p", kinds)
    found = method.features(golden_tensors["images"], golden_tensors["query"])
    assert_close(found, golden_tensors["l2p.features"], **TOLERANCE)


def test_class_orders_equal_the_released_ones(golden_numbers: dict[str, Any]) -> None:
    for seed, order in golden_numbers["class_order"].items():
        assert list(class_order(100, int(seed))) == order


@pytest.mark.parametrize("epochs", [5, 20, 50])
def test_learning_rates_equal_the_released_ones(
    epochs: int, golden_numbers: dict[str, Any]
) -> None:
    found = [learning_rate("lagging-cosine", 1e-3, epoch, epochs) for epoch in range(epochs)]
    assert found == pytest.approx(golden_numbers[f"released_lr_{epochs}"], rel=1e-9)


def test_forgetting_equals_the_released_code(golden_numbers: dict[str, Any]) -> None:
    found = forgetting_paper(golden_numbers["forgetting_matrix"])
    assert found == pytest.approx(golden_numbers["forgetting_released"], rel=1e-9)

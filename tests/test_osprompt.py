"""OS-Prompt and OS-Prompt++: loops written from the equations, and the passes they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from naive import naive_features, random_vit
from small import brief
from test_oracles import TOLERANCE, VIT, cosine, learn_tasks, scatter
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.osprompt import OSPrompt
from coda_prompt.research.vit.vit import Prefix, ViT

Prompts = dict[int, Callable[[Tensor], Prefix]]


@pytest.fixture
def vit() -> ViT:
    return random_vit(VIT)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def made(name: str, vit: ViT, before: int, **options: object) -> OSPrompt:
    options = {"components": 7, "tasks": 3, "length": 4, "blocks": (0, 2, 5), **options}
    method = methods.make(name, vit, **options)
    assert isinstance(method, OSPrompt)
    learn_tasks(method, before)
    return method


def prompts(method: OSPrompt, queries: dict[int, Tensor]) -> Prompts:
    """p_l = sum_m cos(q_l, K_m) P_m; `queries` receives the query of each block."""

    def prefix(position: int, query: Tensor) -> Prefix:
        queries[position] = query
        prompt = torch.zeros(method.config.length, len(query))
        for key, component in zip(
            method.keys.rows[position], method.components.rows[position], strict=True
        ):
            prompt = prompt + cosine(query, key) * component
        half = method.config.length // 2
        return prompt[:half], prompt[half:]

    return {
        block: lambda query, position=position: prefix(position, query)
        for position, block in enumerate(method.config.blocks)
    }


def reference_loss(method: OSPrompt, queries: dict[int, Tensor], reference: Tensor) -> Tensor:
    """sum_l |softmax(cos(q_l, K)) - softmax(cos(r, K))|^2, or sum_l MSE(q_l, r)."""
    total = torch.zeros(())
    for position, query in queries.items():
        if method.config.reference == "token":
            total = total + ((query - reference) ** 2).sum() / len(query)
            continue
        shares = []
        for token in (query, reference):
            weights = torch.stack([cosine(token, key) for key in method.keys.rows[position]])
            shares.append(weights.exp() / weights.exp().sum())
        total = total + ((shares[0] - shares[1]) ** 2).sum()
    return total


@pytest.mark.parametrize("before", [1, 3])
def test_inference_equals_the_equations(vit: ViT, images: Tensor, before: int) -> None:
    method = made("os-prompt", vit, before)
    features = torch.cat(
        [naive_features(vit, image[None], prompts(method, {})) for image in images]
    )
    assert_close(method.logits(images), method.head(features), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("os-prompt", {}),
        ("os-prompt++", {"reference_weight": 0.5}),
        ("os-prompt++", {"reference": "token", "reference_weight": 0.5}),
        ("os-prompt", {"preset": "release-2022", "orthogonality_weight": 0.0}),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_training_equals_the_equations(
    vit: ViT, images: Tensor, before: int, name: str, options: dict[str, object]
) -> None:
    method = made(name, vit, before, **options)
    method.begin_task(brief(method, new=3))
    scatter(method)
    labels = torch.tensor([2, 1, 0]) + 2 * before
    expected = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        queries: dict[int, Tensor] = {}
        features = naive_features(vit, image[None], prompts(method, queries))[0]
        logits = features @ method.head.weight.trainable.T + method.head.bias.trainable
        term = -logits.softmax(0)[int(label) - 2 * before].log()
        if method.config.reference != "none":
            plain = naive_features(vit, image[None])[0]
            weight = method.config.reference_weight
            term = term + weight * reference_loss(method, queries, plain)
        expected = expected + term / len(images)
    loss = method.loss(TrainingBatch(images, labels))
    found = loss.mean.mean() + loss.total.sum() + loss.penalty
    assert_close(found, expected, **TOLERANCE)
    parameters = method.trainable_parameters()
    assert len(parameters) == 4, "components, keys, and the head; no attention vectors"
    for gradient, wanted in zip(
        torch.autograd.grad(found, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        assert_close(gradient, wanted, **TOLERANCE)


def test_one_pass_except_in_training_of_the_second_form(
    vit: ViT, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    run = vit.features

    def counted(*arguments: object) -> Tensor:
        nonlocal passes
        passes += 1
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(vit, "features", counted)
    for name, training in (("os-prompt", 1), ("os-prompt++", 2)):
        method = made(name, vit, 1)
        method.begin_task(brief(method, new=2))
        passes = 0
        method.loss(TrainingBatch(images, torch.tensor([2, 3, 2])))
        assert passes == training
        method.end_task()
        passes = 0
        method.logits(images)
        assert passes == 1
        assert not method.needs_queries


def test_recomputed_activations_give_the_same_gradients(vit: ViT, images: Tensor) -> None:
    method = made("os-prompt++", vit, 1, reference_weight=0.5)
    method.begin_task(brief(method, new=3))
    scatter(method)
    gradients = []
    for recompute in (False, True):
        vit.recompute = recompute
        loss = method.loss(TrainingBatch(images, torch.tensor([2, 3, 4]))).mean.mean()
        gradients.append(torch.autograd.grad(loss, method.trainable_parameters()))
    for plain, recomputed in zip(*gradients, strict=True):
        assert_close(plain, recomputed, **TOLERANCE)


def test_without_components_the_vit_is_plain(vit: ViT, images: Tensor) -> None:
    method = methods.make("os-prompt++", vit)
    assert torch.equal(method.features(images, None), vit.features(images))

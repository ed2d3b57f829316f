"""The methods against slow loops written from the equations, to 1e-5 in values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from naive import naive_features, random_vit
from small import brief
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.methods import PromptMethod, TrainingBatch
from coda_prompt.research.vit.vit import ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
VIT = ViTConfig(image_size=8, patch_size=4, width=16, depth=6, heads=2, mlp_width=24)
LEARNED_BEFORE = [0, 1, 2]
Prompts = dict[int, tuple[Tensor, Tensor]]


@pytest.fixture
def vit() -> ViT:
    return random_vit(VIT)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def learn_tasks(method: PromptMethod, tasks: int) -> None:
    """So many tasks of two classes, each leaving its parameters somewhere random."""
    for _ in range(tasks):
        method.begin_task(brief(method, new=2))
        scatter(method)
        method.end_task()


def scatter(method: PromptMethod) -> None:
    generator = torch.Generator().manual_seed(len(method.task_sizes))
    for parameter in method.trainable_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.5 * noise


def cosine(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum() / (left.square().sum().sqrt() * right.square().sum().sqrt())


def check_inference(
    method: PromptMethod, images: Tensor, prompts: Callable[[Tensor], Prompts]
) -> None:
    """One image at a time, the query from the plain network."""
    for image, logits in zip(images, method.logits(images), strict=True):
        query = naive_features(method.backbone, image[None])[0]
        features = naive_features(method.backbone, image[None], prompts(query))
        expected = features[0] @ method.head.weight.frozen.T + method.head.bias.frozen
        assert_close(logits, expected, **TOLERANCE)


def check_training(
    method: PromptMethod,
    images: Tensor,
    labels: Tensor,
    prompts: Callable[[Tensor], Prompts],
    key_loss: Callable[[Tensor], Tensor],
    penalty: Callable[[], Tensor],
) -> None:
    """Value and gradients of the whole loss: masked cross-entropy, key loss, penalty."""
    parameters = method.trainable_parameters()
    first_new = int(method.head.weight.reopened[0])
    expected = penalty()
    for image, label in zip(images, labels, strict=True):
        query = naive_features(method.backbone, image[None])[0]
        features = naive_features(method.backbone, image[None], prompts(query))[0]
        logits = features @ method.head.weight.trainable.T + method.head.bias.trainable
        shares = logits.exp() / logits.exp().sum()
        expected = expected - shares[int(label) - first_new].log() / len(images)
        expected = expected + key_loss(query)
    expected_gradients = torch.autograd.grad(expected, parameters)

    loss = method.loss(TrainingBatch(images, labels, method.queries(images)))
    found = loss.mean.mean() + loss.total.sum() + loss.penalty
    assert_close(found, expected, **TOLERANCE)
    for gradient, wanted in zip(
        torch.autograd.grad(found, parameters), expected_gradients, strict=True
    ):
        assert_close(gradient, wanted, **TOLERANCE)


# -- CODA-P


def coda_prompts(method: methods.Method, query: Tensor) -> Prompts:
    """Eqs. 3 and 5, one component at a time, over old and new ones."""
    prefixes = {}
    for position, block in enumerate(method.config.blocks):
        rows: dict[str, list[Tensor]] = {}
        for kind in ("components", "keys", "attention"):
            rows[kind] = list(getattr(method, kind).rows[position])
        prompt = torch.zeros(method.config.length, len(query))
        for number, (component, key) in enumerate(
            zip(rows["components"], rows["keys"], strict=True)
        ):
            attended = query * rows["attention"][number] if method.config.attention else query
            prompt = prompt + cosine(attended, key) * component
        half = method.config.length // 2
        prefixes[block] = (prompt[None, :half], prompt[None, half:])
    return prefixes


def coda_penalty(method: methods.Method, norm: str, weight: float) -> Tensor:
    total = torch.zeros(())
    for position in range(len(method.config.blocks)):
        for kind in ("components", "keys", "attention"):
            old, new = (
                getattr(method, kind).frozen[position],
                getattr(method, kind).trainable[position],
            )
            rows = [row.flatten() for row in (*old, *new)]
            squares = torch.zeros(())
            for first, left in enumerate(rows):
                for second, right in enumerate(rows):
                    squares = squares + ((left * right).sum() - float(first == second)) ** 2
            value = squares.sqrt() if norm == "frobenius" else squares / len(rows) ** 2
            total = total + weight * value
    return total


PENALISED = {
    "paper": ("frobenius", 0.1),
    "release-2022": ("mean-square", 1e-7),
    "release-2023": ("mean-square", 0.0),
}


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_coda_inference_equals_the_equations(
    vit: ViT, images: Tensor, before: int, attention: bool
) -> None:
    method = methods.make(
        "coda-p", vit, components=7, tasks=3, length=4, blocks=(0, 2, 5), attention=attention
    )
    learn_tasks(method, before)
    check_inference(method, images, lambda query: coda_prompts(method, query))


@pytest.mark.parametrize("preset", PENALISED)
@pytest.mark.parametrize("before", LEARNED_BEFORE)
def test_coda_training_equals_the_equations(
    vit: ViT, images: Tensor, before: int, preset: str
) -> None:
    method = methods.make("coda-p", vit, components=7, tasks=3, length=4, preset=preset)
    learn_tasks(method, before)
    method.begin_task(brief(method, new=3))
    scatter(method)
    labels = torch.tensor([2, 1, 0, 2]) + 2 * before
    norm, weight = PENALISED[preset]
    check_training(
        method,
        images,
        labels,
        lambda query: coda_prompts(method, query),
        lambda query: torch.zeros(()),
        lambda: coda_penalty(method, norm, weight),
    )


# -- DualPrompt


def dual_prompts(method: methods.Method, query: Tensor, task: int | None) -> Prompts:
    """General prompts, and the expert of `task` or of the nearest key."""
    prefixes = {}
    for position, block in enumerate(method.config.general_blocks):
        prompt = method.general.rows[position, 0]
        prefixes[block] = (prompt[None, :3], prompt[None, 3:])
    for position, block in enumerate(method.config.expert_blocks):
        experts = method.experts.rows[position]
        if task is None:
            similarity = [float(cosine(query, key)) for key in method.keys.rows[position]]
            chosen = experts[similarity.index(max(similarity))]
        else:
            chosen = experts[task]
        half = len(chosen) // 2
        prefixes[block] = (chosen[None, :half], chosen[None, half:])
    return prefixes


@pytest.mark.parametrize("before", [1, 2, 3])
def test_dualprompt_inference_equals_the_equations(vit: ViT, images: Tensor, before: int) -> None:
    method = methods.make("dualprompt", vit, expert_length=8)
    learn_tasks(method, before)
    check_inference(method, images, lambda query: dual_prompts(method, query, None))


@pytest.mark.parametrize("before", LEARNED_BEFORE)
def test_dualprompt_training_equals_the_equations(vit: ViT, images: Tensor, before: int) -> None:
    method = methods.make("dualprompt", vit, expert_length=8)
    learn_tasks(method, before)
    method.begin_task(brief(method, new=2))
    scatter(method)
    labels = torch.tensor([0, 1, 1, 0]) + 2 * before
    check_training(
        method,
        images,
        labels,
        lambda query: dual_prompts(method, query, before),
        lambda query: torch.stack(
            [1 - cosine(query, key[0]) for key in method.keys.trainable]
        ).sum(),
        lambda: torch.zeros(()),
    )


# -- L2P++


def l2p_chosen(method: methods.Method, query: Tensor, position: int) -> list[int]:
    similarity = [float(cosine(query, key).detach()) for key in method.keys.rows[position]]
    return sorted(range(len(similarity)), key=lambda number: -similarity[number])[:3]


def l2p_prompts(method: methods.Method, query: Tensor) -> Prompts:
    prompts = method.prompts.rows
    prefixes = {}
    for position, block in enumerate(method.config.blocks):
        taken = [prompts[position, number] for number in l2p_chosen(method, query, position)]
        keys = torch.cat([prompt[:2] for prompt in taken])
        values = torch.cat([prompt[2:] for prompt in taken])
        prefixes[block] = (keys[None], values[None])
    return prefixes


def l2p_key_loss(method: methods.Method, query: Tensor) -> Tensor:
    total = torch.zeros(())
    for position in range(len(method.config.blocks)):
        for number in l2p_chosen(method, query, position):
            total = total + 1 - cosine(query, method.keys.trainable[position, number])
    return total


@pytest.mark.parametrize("name", ["l2p++", "deep-l2p++"])
@pytest.mark.parametrize("before", [1, 2])
def test_l2p_inference_equals_the_equations(
    vit: ViT, images: Tensor, before: int, name: str
) -> None:
    method = methods.make(name, vit, pool=6, length=4, top=3)
    learn_tasks(method, before)
    check_inference(method, images, lambda query: l2p_prompts(method, query))


@pytest.mark.parametrize("name", ["l2p++", "deep-l2p++"])
@pytest.mark.parametrize("before", LEARNED_BEFORE)
def test_l2p_training_equals_the_equations(
    vit: ViT, images: Tensor, before: int, name: str
) -> None:
    method = methods.make(name, vit, pool=6, length=4, top=3)
    learn_tasks(method, before)
    method.begin_task(brief(method, new=2))
    scatter(method)
    labels = torch.tensor([0, 1, 1, 0]) + 2 * before
    check_training(
        method,
        images,
        labels,
        lambda query: l2p_prompts(method, query),
        lambda query: l2p_key_loss(method, query),
        lambda: torch.zeros(()),
    )

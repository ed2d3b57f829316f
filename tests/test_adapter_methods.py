"""Methods with adapters against loops written from the equations."""

from __future__ import annotations

import math

import pytest
import torch
from naive import naive_features
from small import brief, tiny_vit
from tasks import (
    TOLERANCE,
    UNEVEN,
    VIT,
    check_loss,
    cosine,
    cross_entropy,
    fit_task,
    learn_tasks,
    open_task,
    small_vit,
    some_images,
)
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.adapters import AdapterMethod
from coda_prompt.research.methods.aper import APER
from coda_prompt.research.methods.ease import EASE
from coda_prompt.research.methods.tuna import TUNA

Set = list[Tensor]


def made(name: str, **options: object) -> AdapterMethod:
    method = methods.make(name, small_vit(), rank=3, **options)
    assert isinstance(method, AdapterMethod)
    return method


def sets(method: AdapterMethod) -> list[Set]:
    """The tensors of each set of adapters, each blocks x ..."""
    banks = [bank.rows for bank in method.adapters.banks]
    return [[rows[:, index] for rows in banks] for index in range(len(method.adapters))]


def adapted(method: AdapterMethod, image: Tensor, values: Set) -> Tensor:
    """a(x) = 0.1 (W_u ReLU(W_d x + b_d) + b_u), one hidden unit at a time."""
    down, down_bias, up, up_bias = values

    def adapter(block: int, token: Tensor) -> Tensor:
        output = up_bias[block]
        for unit in range(down.shape[1]):
            hidden = (down[block, unit] * token).sum() + down_bias[block, unit]
            output = output + up[block, :, unit] * torch.clamp(hidden, min=0)
        return 0.1 * output

    return naive_features(method.backbone, image[None], adapter=adapter)[0]


def task_loss(method: AdapterMethod, images: Tensor, labels: list[int], sigma: Tensor) -> Tensor:
    """CE(sigma cos) over the classes of the task, under the newest adapters."""
    total = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        feature = adapted(method, image, sets(method)[-1])
        scores = [sigma * cosine(feature, proxy) for proxy in method.proxies.rows]
        total = total + cross_entropy(scores, label - method.task_rows[0]) / len(images)
    return total


@pytest.mark.parametrize("name", ["ease", "tuna", "aper"])
def test_fresh_adapters_reproduce_plain_features(name: str) -> None:
    method = methods.make(name, tiny_vit())
    method.begin_task(brief(method, new=2))
    images = torch.rand(3, 1, 16, 16)
    assert torch.equal(method.adapted(images), method.backbone.features(images))


@pytest.mark.parametrize("name", ["ease", "aper"])
def test_training_with_a_learned_scale(name: str) -> None:
    method = made(name)
    if name == "ease":
        learn_tasks(method, (2, 3))
    before = method.classes_seen
    open_task(method, 3)
    images, labels = some_images(), [before, before + 2, before + 1]
    expected = task_loss(method, images, labels, method.sigma.rows[0])
    check_loss(method, method.loss(TrainingBatch(images, torch.tensor(labels))), expected)


def ease_prototypes(method: EASE, preset: str) -> dict[tuple[int, int], Tensor]:
    """Real and synthesised prototypes, one class and subspace at a time."""
    tasks = [task for task, size in enumerate(UNEVEN) for _ in range(size)]
    real = {}
    for (row, subspace), total, count in zip(
        method.pairs.rows.tolist(), method.sums.rows, method.counts.rows, strict=True
    ):
        real[row, subspace] = total / count
    assert real.keys() == {(c, j) for c, i in enumerate(tasks) for j in range(i + 1)}
    completed = dict(real)
    for c, i in enumerate(tasks):
        for j in range(i + 1, len(UNEVEN)):
            others = [
                k for k, task in enumerate(tasks) if task == j or (task > j and preset != "paper")
            ]
            shares = [cosine(real[c, i], real[k, i]).exp() for k in others]
            synthesised = torch.zeros(VIT.width)
            for share, k in zip(shares, others, strict=True):
                synthesised = synthesised + share / sum(shares) * real[k, j]
            completed[c, j] = synthesised
    return completed


@pytest.mark.parametrize("preset", ["paper", "release"])
def test_ease_inference_equals_the_equations(preset: str) -> None:
    method = made("ease", preset=preset)
    assert isinstance(method, EASE)
    learn_tasks(method, UNEVEN)
    prototypes = ease_prototypes(method, preset)
    tasks = [task for task, size in enumerate(UNEVEN) for _ in range(size)]
    images = some_images()
    for image, logits in zip(images, method.logits(images), strict=True):
        features = [adapted(method, image, values) for values in sets(method)]
        for c, i in enumerate(tasks):
            score = torch.zeros(())
            for j, feature in enumerate(features):
                weight = 1.0 if i == j else 0.1 / (len(UNEVEN) - 1)
                score = score + weight * cosine(feature, prototypes[c, j])
            assert_close(logits[c], score, **TOLERANCE)


def test_ease_adds_up_images_of_a_class_seen_again() -> None:
    method = made("ease")
    assert isinstance(method, EASE)
    learn_tasks(method, (2,))
    before = method.prototypes()[0][1, 0].clone()
    method.begin_task(brief(method, new=1, known=(1,)))
    features = torch.ones(6, 2 * VIT.width)
    method.fit(features, None, torch.tensor([1, 1, 1, 1, 2, 2]))
    method.end_task()
    prototypes, real = method.prototypes()
    assert_close(prototypes[1, 0], (before + 1) / 2)
    assert real.tolist() == [[True, False], [True, True], [True, True]]


def test_aper_inference_equals_the_equations() -> None:
    method = made("aper")
    assert isinstance(method, APER)
    learn_tasks(method, UNEVEN)
    assert len(method.adapters) == 1, "adapted to the first task only"
    images = some_images()
    for image, logits in zip(images, method.logits(images), strict=True):
        plain = naive_features(method.backbone, image[None])[0]
        both = torch.cat([plain, adapted(method, image, sets(method)[0])])
        for c, score in enumerate(logits):
            prototype = method.sums.rows[c] / method.counts.rows[c]
            assert_close(score, cosine(both, prototype), **TOLERANCE)


def merged(values: list[Set]) -> Set:
    """Scalar by scalar: the sign of the mean, the largest magnitude with that sign."""
    result = []
    for tensors in zip(*values, strict=True):
        flat = [tensor.flatten().tolist() for tensor in tensors]
        scalars = []
        for column in zip(*flat, strict=True):
            sign = 1 if sum(column) > 0 else -1
            scalars.append(sign * max([abs(v) for v in column if v * sign > 0], default=0.0))
        result.append(torch.tensor(scalars).view_as(tensors[0]))
    return result


@pytest.mark.parametrize("universal", ["merged", "newest"])
def test_tuna_inference_equals_the_equations(universal: str) -> None:
    method = made("tuna", universal=universal)
    assert isinstance(method, TUNA)
    learn_tasks(method, UNEVEN)
    values = sets(method)
    second = merged(values) if universal == "merged" else values[-1]
    images = 6 * torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    chosen = set()
    for image, logits in zip(images, method.logits(images), strict=True):

        def shares(weights: Set, image: Tensor = image) -> Tensor:
            feature = adapted(method, image, weights)
            scores = [20 * cosine(feature, row) for row in method.aligned.weight.rows]
            return torch.stack(scores).softmax(0)

        candidates = [shares(each) for each in values]
        entropies = [float(-(share * share.log()).sum()) for share in candidates]
        surest = entropies.index(min(entropies))
        chosen.add(surest)
        assert_close(logits.exp(), (candidates[surest] + shares(second)) / 2, **TOLERANCE)
    assert len(chosen) > 1, "images differ in their surest adapters"


def test_tuna_training_equals_the_equations() -> None:
    method = made("tuna", orthogonality=50.0)
    assert isinstance(method, TUNA)
    learn_tasks(method, (2, 3))
    newest = [values.clone() for values in method.adapters.values(-1)]
    method.begin_task(brief(method, new=2))
    for before, after in zip(newest, method.adapters.values(-1), strict=True):
        assert torch.equal(before, after), "adapters continue from the last ones"
    method.end_task()
    open_task(method, 3)
    images, labels = some_images(), [7, 9, 8]
    expected = task_loss(method, images, labels, torch.tensor(20.0))
    *older, new = [values[2] for values in sets(method)]
    for old in older:
        for block in range(VIT.depth):
            products = [
                (row * other).sum() / (row.norm() * other.norm())
                for row in new[block]
                for other in old[block]
            ]
            similarity = torch.stack(products).mean().abs() / VIT.depth
            expected = expected + 50 * math.exp(-4) * similarity
    check_loss(method, method.loss(TrainingBatch(images, torch.tensor(labels))), expected)


def test_tuna_alignment_equals_the_equations() -> None:
    method = made("tuna")
    assert isinstance(method, TUNA)
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    old = method.aligned.weight.rows[:5].clone()
    fit_task(method, 2)
    assert torch.equal(method.aligned.weight.rows[:5], old), "old rows stay as they are"
    assert torch.equal(method.aligned.weight.rows[5:], method.proxies.rows)
    features = torch.randn(4, VIT.width, generator=torch.Generator().manual_seed(3))
    labels = [0, 6, 3, 5]
    expected = torch.zeros(())
    for feature, label in zip(features, labels, strict=True):
        scores = [20 * cosine(feature, row) for row in method.aligned.weight.rows]
        expected = expected + cross_entropy(scores, label) / 4
    batch = TrainingBatch(None, torch.tensor(labels), features=features, stage="align")
    check_loss(method, method.loss(batch), expected)

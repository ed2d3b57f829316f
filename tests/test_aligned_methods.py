"""Class Gaussians and the methods that align a head on them, against loops from the equations."""

from __future__ import annotations

import math

import pytest
import torch
from naive import naive_features
from small import brief
from tasks import (
    TOLERANCE,
    VIT,
    check_loss,
    cross_entropy,
    fit_task,
    learn_tasks,
    open_task,
    scatter,
    small_vit,
    some_images,
)
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.methods import Method, TrainingBatch
from coda_prompt.research.methods.gaussians import Gaussians
from coda_prompt.research.methods.hide import HiDePrompt
from coda_prompt.research.methods.slca import SLCA
from coda_prompt.research.methods.stages import Stage
from coda_prompt.research.methods.vqprompt import VQPrompt

ALIGNED = ["slca", "tuna", "vq-prompt", "hide-prompt"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(feature: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    return [(feature * row).sum() + shift for row, shift in zip(weight, bias, strict=True)]


def aligned_batch(stage: str, labels: list[int]) -> TrainingBatch:
    features = torch.randn(len(labels), VIT.width, generator=generator(3))
    return TrainingBatch(None, torch.tensor(labels), features=features, stage=stage)


# -- Gaussians


def test_a_full_gaussian_has_the_mean_and_covariance_of_its_class() -> None:
    gaussians = Gaussians(3, "full", jitter=0.25)
    gaussians.grow(3)
    features = torch.randn(9, 3, generator=generator())
    labels = torch.tensor([0, 2, 0, 2, 0, 0, 2, 0, 0])
    gaussians.update(features, labels)
    for row in (0, 2):
        rows = features[labels == row]
        mean = sum(rows, torch.zeros(3)) / len(rows)
        covariance = 0.25 * torch.eye(3)
        for each in rows:
            covariance = covariance + torch.outer(each - mean, each - mean) / (len(rows) - 1)
        factor = gaussians.factors.rows[row, 0]
        assert_close(gaussians.means.rows[row, 0], mean)
        assert_close(factor @ factor.T, covariance)
    samples, drawn = gaussians.sample(4000, generator())
    assert drawn.unique().tolist() == [0, 2], "class 1 has no images"
    assert_close(samples[drawn == 2].mean(0), mean, rtol=0, atol=0.1)
    assert_close(samples[drawn == 2].T.cov(), covariance, rtol=0, atol=0.15)


def test_centroids_are_clusters_with_their_own_variances() -> None:
    gaussians = Gaussians(2, "diagonal", centroids=3, jitter=1e-4)
    gaussians.grow(1)
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    rows = torch.cat([centre + torch.randn(20, 2, generator=generator()) for centre in centres])
    gaussians.update(rows, torch.zeros(60, dtype=torch.int64))
    found = gaussians.means.rows[0]
    for number, centre in enumerate(centres):
        cluster = rows[20 * number : 20 * number + 20]
        nearest = (found - centre).norm(dim=1).argmin()
        assert_close(found[nearest], cluster.mean(0))
        variance = cluster.var(0, correction=0) + 1e-4
        assert_close(gaussians.factors.rows[0, nearest].square(), variance)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_one_image_makes_a_narrow_gaussian(kind: str) -> None:
    gaussians = Gaussians(4, kind, centroids=1 if kind == "full" else 3)  # type: ignore[arg-type]
    gaussians.grow(1)
    gaussians.update(torch.ones(1, 4), torch.zeros(1, dtype=torch.int64))
    samples, labels = gaussians.sample(5, generator())
    assert len(labels) == 5 * gaussians.centroids
    assert_close(samples, torch.ones_like(samples), rtol=0, atol=0.06)


@pytest.mark.parametrize("name", ALIGNED)
def test_an_epoch_of_samples_depends_on_its_generator_alone(name: str) -> None:
    options = {"blocks": (0, 1)} if "prompt" in name else {}
    method = methods.make(name, small_vit(), **options)
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    fit_task(method, 2)
    stages = [stage for stage in method.stages() if stage.data == "generated"]
    assert stages, "an alignment follows"
    for stage in stages:
        samples, labels = method.generate(stage, generator())
        again, _ = method.generate(stage, generator())
        other, _ = method.generate(stage, generator(1))
        assert torch.equal(samples, again)
        assert not torch.equal(samples, other)
        assert torch.bincount(labels).unique().numel() == 1, "balanced"
        assert len(torch.bincount(labels)) == 7
        assert len(labels) >= (stage.batch_size or 0) * 5


# -- SLCA


def slca() -> SLCA:
    method = methods.make("slca", small_vit())
    assert isinstance(method, SLCA)
    learn_tasks(method, (2, 3))
    return method


def test_slca_training_equals_the_equations() -> None:
    method = slca()
    method.network = small_vit()  # a usual one
    method.begin_task(brief(method, new=2))
    images, labels = some_images(2), [6, 5]
    expected = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        feature = naive_features(method.network, image[None])[0]
        weight, bias = method.head.weight.trainable, method.head.bias.trainable
        expected = expected + cross_entropy(linear(feature, weight, bias), label - 5) / 2
    check_loss(method, method.loss(TrainingBatch(images, torch.tensor(labels))), expected)


@pytest.mark.parametrize("temperature", [0.1, None])
def test_slca_alignment_equals_the_equations(temperature: float | None) -> None:
    """CE(z / (tau mean_i |z_i|)) over tasks of 2, 3 and 2 classes."""
    method = methods.make("slca", small_vit(), logit_temperature=temperature)
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    batch = aligned_batch("align", [0, 6, 3, 5])
    expected = torch.zeros(())
    for feature, label in zip(batch.features, batch.labels, strict=True):
        logits = linear(feature, method.aligned.weight.rows, method.aligned.bias.rows)
        if temperature is not None:
            norms = [
                torch.stack([value.square() for value in part]).sum().sqrt()
                for part in (logits[:2], logits[2:5], logits[5:])
            ]
            logits = [value / (temperature * sum(norms) / 3) for value in logits]
        expected = expected + cross_entropy(logits, int(label)) / 4
    check_loss(method, method.loss(batch), expected)


def test_slca_starts_every_alignment_from_unaligned_rows() -> None:
    method = slca()
    unaligned = method.head.weight.rows.clone()
    assert not torch.equal(method.aligned.weight.rows, unaligned)
    open_task(method, 2)
    fit_task(method, 2)
    assert torch.equal(method.aligned.weight.rows[:5], unaligned)
    assert torch.equal(method.aligned.weight.rows, method.head.weight.rows)


def test_slca_scales_means_by_the_age_of_their_task() -> None:
    method = slca()
    open_task(method, 2)
    fit_task(method, 2)
    means = method.aligned.gaussians.means.rows[:, 0]
    method.aligned.gaussians.factors.frozen *= 1e-6
    (stage,) = [stage for stage in method.stages() if stage.data == "generated"]
    samples, labels = method.generate(stage, generator())
    for row, task in enumerate((0, 0, 1, 1, 1, 2, 2)):
        expected = means[row] * (0.9 + 0.1 * (task + 1) / 3)
        assert_close(samples[labels == row].mean(0), expected, **TOLERANCE)


# -- VQ-Prompt


def vq() -> VQPrompt:
    method = methods.make("vq-prompt", small_vit(), pool=4, length=4, blocks=(0, 1))
    assert isinstance(method, VQPrompt)
    return method


def vq_prompts(method: VQPrompt, query: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The mixture and the nearest prompt of each block, one prompt at a time."""
    found = []
    for prompts, keys in zip(method.prompts.rows, method.keys.rows, strict=True):
        weights = [((query * key).sum() / key.square().sum().sqrt()).exp() for key in keys]
        mixture = torch.zeros(prompts.shape[1:])
        for weight, prompt in zip(weights, prompts, strict=True):
            mixture = mixture + weight / sum(weights) * prompt
        distances = [float((mixture - prompt).detach().square().sum()) for prompt in prompts]
        found.append((mixture, prompts[distances.index(min(distances))]))
    return found


def vq_features(method: VQPrompt, image: Tensor, found: list[tuple[Tensor, Tensor]]) -> Tensor:
    prefixes = {}
    for block, (mixture, nearest) in enumerate(found):
        prompt = mixture + (nearest - mixture).detach()  # straight through
        prefixes[block] = (prompt[None, :2], prompt[None, 2:])
    return naive_features(method.backbone, image[None], prefixes)[0]


def test_vq_inference_equals_the_equations() -> None:
    method = vq()
    learn_tasks(method, (2, 3))
    images = some_images()
    for image, logits in zip(images, method.logits(images), strict=True):
        query = naive_features(method.backbone, image[None])[0]
        feature = vq_features(method, image, vq_prompts(method, query))
        expected = linear(feature, method.aligned.weight.rows, method.aligned.bias.rows)
        assert_close(logits, torch.stack(expected), **TOLERANCE)


def test_vq_training_equals_the_equations() -> None:
    method = vq()
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    images, labels = some_images(), [6, 5, 6]
    expected = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        query = naive_features(method.backbone, image[None])[0]
        found = vq_prompts(method, query)
        feature = vq_features(method, image, found)
        weight, bias = method.head.weight.trainable, method.head.bias.trainable
        expected = expected + cross_entropy(linear(feature, weight, bias), label - 5) / 3
        for mixture, nearest in found:
            expected = expected + 0.4 * (mixture - nearest.detach()).square().mean() / 3
            expected = expected + 0.1 * (nearest - mixture.detach()).square().mean() / 3
    batch = TrainingBatch(images, torch.tensor(labels), method.queries(images))
    check_loss(method, method.loss(batch), expected)


# -- HiDe-Prompt


def hide() -> HiDePrompt:
    method = methods.make("hide-prompt", small_vit(), length=4, blocks=(0, 1), centroids=2)
    assert isinstance(method, HiDePrompt)
    return method


def mapped(method: HiDePrompt, feature: Tensor) -> Tensor:
    """LayerNorm(f + W_2 gelu(W_1 f + b_1) + b_2)."""
    up, up_bias, down, down_bias, scale, shift = (bank.rows for bank in method.tasks.mlp)
    hidden = [
        value * 0.5 * (1 + torch.erf(value / math.sqrt(2)))
        for value in linear(feature, up, up_bias)
    ]
    output = feature + torch.stack(linear(torch.stack(hidden), down, down_bias))
    variance = (output - output.mean()).square().mean()
    return (output - output.mean()) / (variance + 1e-5).sqrt() * scale + shift


def hide_features(method: HiDePrompt, image: Tensor, prompt: Tensor) -> Tensor:
    """`prompt`: blocks x length x D."""
    prefixes = {block: (rows[None, :2], rows[None, 2:]) for block, rows in enumerate(prompt)}
    return naive_features(method.backbone, image[None], prefixes)[0]


def test_hide_inference_equals_the_equations() -> None:
    method = hide()
    learn_tasks(method, (2, 3, 2))
    tasks = [0, 0, 1, 1, 1, 2, 2]
    images = 6 * torch.randn(6, 3, 8, 8, generator=generator())
    chosen = set()
    for image, logits in zip(images, method.logits(images), strict=True):
        query = naive_features(method.backbone, image[None])[0]
        aligned = method.tasks.aligned
        scores = linear(mapped(method, query), aligned.weight.rows, aligned.bias.rows)
        task = tasks[int(torch.stack(scores).argmax())]
        chosen.add(task)
        feature = hide_features(method, image, method.prompts.rows[:, task])
        expected = linear(feature, method.aligned.weight.rows, method.aligned.bias.rows)
        assert_close(logits, torch.stack(expected), **TOLERANCE)
    assert len(chosen) > 1, "images have different prompts"


def test_hide_training_of_the_task_classifier() -> None:
    method = hide()
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    images, labels = some_images(), [6, 5, 6]
    expected = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        feature = mapped(method, naive_features(method.backbone, image[None])[0])
        head = method.tasks.head
        logits = linear(feature, head.weight.trainable, head.bias.trainable)
        expected = expected + cross_entropy(logits, label - 5) / 3
    queries = method.queries(images)
    batch = TrainingBatch(images, torch.tensor(labels), queries, stage="infer")
    check_loss(method, method.loss(batch), expected)


def test_hide_training_of_a_prompt() -> None:
    method = hide()
    learn_tasks(method, (2, 3))
    method.begin_task(brief(method, new=2))
    assert torch.equal(method.prompts.trainable[:, 0], method.prompts.frozen[:, -1]), "warm start"
    scatter(method)
    older = method.prompts.frozen
    prompt = 0.99 * method.prompts.trainable[:, 0] + 0.01 * (older[:, 0] + older[:, 1]) / 2
    images, labels = some_images(), [6, 5, 6]
    features, expected = [], torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        features.append(hide_features(method, image, prompt))
        weight, bias = method.head.weight.trainable, method.head.bias.trainable
        logits = linear(features[-1], weight, bias)
        expected = expected + cross_entropy(logits, label - 5) / 3
    centroids = [mean for row in method.aligned.gaussians.means.rows[:5] for mean in row]
    rows = [*centroids, *features]
    for number, row in enumerate(rows):
        similarities = torch.stack([(row * other).sum() / 0.8 for other in rows])
        own = similarities.logsumexp(0) - similarities[number]
        expected = expected + 0.1 * own / len(rows)
    batch = TrainingBatch(images, torch.tensor(labels), method.queries(images))
    check_loss(method, method.loss(batch), expected)
    method.end_stage(Stage())
    assert_close(method.prompts.trainable[:, 0], prompt, **TOLERANCE)
    expected_features = torch.stack([hide_features(method, image, prompt) for image in images])
    found = method.features(images, method.queries(images))
    assert_close(found, expected_features, **TOLERANCE)


@pytest.mark.parametrize("stage", ["align-tasks", "align"])
def test_hide_alignments_equal_the_equations(stage: str) -> None:
    method = hide()
    learn_tasks(method, (2, 3))
    open_task(method, 2)
    batch = aligned_batch(stage, [0, 6, 3, 5])
    expected = torch.zeros(())
    for feature, label in zip(batch.features, batch.labels, strict=True):
        aligned = method.aligned if stage == "align" else method.tasks.aligned
        feature = feature if stage == "align" else mapped(method, feature)
        logits = linear(feature, aligned.weight.rows, aligned.bias.rows)
        expected = expected + cross_entropy(logits, int(label)) / 4
    check_loss(method, method.loss(batch), expected)


@pytest.mark.parametrize("name", ["vq-prompt", "hide-prompt"])
def test_old_rows_stay_aligned(name: str) -> None:
    method: Method = methods.make(name, small_vit(), blocks=(0, 1))
    learn_tasks(method, (2, 3))
    old = method.aligned.weight.rows.clone()
    method.begin_task(brief(method, new=2))
    fit_task(method, 2)
    assert torch.equal(method.aligned.weight.rows[:5], old)
    assert torch.equal(method.aligned.weight.rows[5:], method.head.weight.rows[5:])

"""Deep and Token RanPAC, compared with loops over images and blocks and an explicit regression."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import PLAIN_VIEWS, TINY, brief, patterns, tiny_vit
from torch import Tensor

from coda_prompt import methods
from coda_prompt.data.stream import make_stream
from coda_prompt.errors import BadOption
from coda_prompt.model.vit import Prefixes, ViT
from coda_prompt.training.engine import Engine
from coda_prompt.training.settings import Training


def tokens_of_blocks(vit: ViT, image: Tensor, last: int, prefixes: Prefixes) -> Tensor:
    """The features of one image, one block after the other."""
    tokens, features = vit.embed(image[None]), []
    for index, block in enumerate(vit.blocks):
        keys_and_values = block.project(tokens, class_only=False)
        attended = block.attn(*keys_and_values, prefixes.get(index))
        tokens = tokens + attended
        tokens = tokens + block.mlp(block.norm2(tokens))
        if index >= len(vit.blocks) - last:
            normed = vit.norm(tokens)[0]
            patches = normed[1 + vit.config.registers :]
            features += [normed[0], sum(patches[1:], patches[0]) / len(patches)]
    return torch.cat(features)


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("last", [1, 3, 6])
@torch.no_grad()
def test_features_are_class_token_and_patch_mean_of_the_last_blocks(
    last: int, registers: int
) -> None:
    vit = tiny_vit(config=replace(TINY, registers=registers))
    method = methods.make("deep-ranpac", vit, last_blocks=last, width=16)
    images = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([tokens_of_blocks(vit, image, last, {}) for image in images])
    assert expected.shape == (3, 2 * last * 32)
    torch.testing.assert_close(method.features(images, None), expected, rtol=1e-5, atol=1e-5)
    opened = vit.pooled_features(vit.start(images), last)
    torch.testing.assert_close(opened, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_classifier_is_ridge_regression_on_random_features_of_them() -> None:
    vit, generator = tiny_vit(), torch.Generator().manual_seed(0)
    method = methods.make("deep-ranpac", vit, width=24, ridge=2.0)
    images = torch.randn(20, 1, 16, 16, generator=generator)
    labels = torch.arange(20) % 4
    features = torch.stack([tokens_of_blocks(vit, image, 3, {}) for image in images])
    for rows in (labels < 2, labels >= 2):
        method.begin_task(brief(method, new=2))
        method.fit(method.features(images[rows], None), None, labels[rows])
        method.end_task()
    hidden = torch.relu(features @ method.statistics.projection(features)).double()
    damped = hidden.T @ hidden + 2.0 * torch.eye(24, dtype=torch.float64)
    targets = torch.nn.functional.one_hot(labels).double()
    expected = hidden @ torch.linalg.solve(damped, hidden.T @ targets)
    torch.testing.assert_close(method.logits(images).double(), expected, rtol=1e-4, atol=1e-5)


def hidden_of_tokens(features: Tensor, projection: Tensor) -> Tensor:
    """What Token RanPAC's regression sees of one image, one token after the other."""
    tokens = [token / token.norm() for token in features.split(32)]
    random = torch.tensor([max(0.0, float(tokens[-2] @ column)) for column in projection.T])
    parts = [random * (2 / len(random)) ** 0.5, *(token / len(tokens) ** 0.5 for token in tokens)]
    return torch.cat(parts) / 2**0.5


@torch.no_grad()
def test_token_ranpac_also_sees_the_tokens_themselves() -> None:
    vit, generator = tiny_vit(), torch.Generator().manual_seed(0)
    method = methods.make("token-ranpac", vit, width=24, ridge=0.2, last_blocks=2)
    images = torch.randn(20, 1, 16, 16, generator=generator)
    labels = torch.arange(20) % 4
    for rows in (labels < 2, labels >= 2):
        method.begin_task(brief(method, new=2))
        method.fit(method.features(images[rows], None), None, labels[rows])
        method.end_task()
    projection = method.statistics.projection(images)
    assert projection.shape == (32, 24)
    rows = [tokens_of_blocks(vit, image, 2, {}) for image in images]
    hidden = torch.stack([hidden_of_tokens(row, projection) for row in rows]).double()
    assert hidden.shape == (20, 24 + 4 * 32)
    damped = hidden.T @ hidden + 0.2 * torch.eye(hidden.shape[1], dtype=torch.float64)
    targets = torch.nn.functional.one_hot(labels).double()
    expected = hidden @ torch.linalg.solve(damped, hidden.T @ targets)
    torch.testing.assert_close(method.logits(images).double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_random_features_and_tokens_have_the_same_weight() -> None:
    method = methods.make("token-ranpac", tiny_vit(), width=4096)
    method.begin_task(brief(method, new=1))
    features = torch.randn(64, 6 * 32, generator=torch.Generator().manual_seed(0))
    random, tokens = method.statistics.hidden(features).split([4096, 6 * 32], dim=1)
    torch.testing.assert_close(tokens.square().sum(dim=1), torch.full((64,), 0.5))
    assert float(random.square().sum(dim=1).mean()) == pytest.approx(0.5, rel=0.05)


@torch.no_grad()
def test_blended_sums_of_tokens_contain_no_single_image() -> None:
    """One image alone dominates every feature, whatever its sign."""
    method = methods.make("token-ranpac", tiny_vit(), width=24, blend=True)
    method.begin_task(brief(method, new=2))
    features = torch.randn(41, 6 * 32, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(41, dtype=torch.int64)
    sums = method.task_sums(labels)
    sums.add_all(features[:1], labels[:1])
    active = method.statistics.hidden(features[:1])[0] != 0
    assert active[24:].all()
    assert not sums.is_shared()[active].any()
    sums = method.task_sums(labels)
    sums.add_all(features, labels)
    assert sums.is_shared()[24:].all()


@pytest.mark.parametrize("name", ["coda-p-deep-ranpac", "coda-p-token-ranpac"])
def test_prompted_features_have_the_prefixes_of_the_first_task(name: str) -> None:
    vit = tiny_vit()
    stream = make_stream(patterns(4, train=8), tasks=2, seed=0)
    method = methods.make(name, vit, components=4, width=32, ridge=1.0)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8))
    for task in stream.tasks:
        engine.learn(method, task)
    images = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        queries = method.queries(images)
        features = method.features(images, None)
        for number, image in enumerate(images):
            prefixes = method.prompts.prefixes(queries[number : number + 1])
            expected = tokens_of_blocks(vit, image, 3, prefixes)
            torch.testing.assert_close(features[number], expected, rtol=1e-4, atol=1e-4)
        scores = method.statistics(features)
        torch.testing.assert_close(method.logits(images), scores)
        assert not torch.allclose(features, vit.pooled_features(images, 3), atol=1e-3)


@pytest.mark.parametrize("name", ["deep-ranpac", "coda-p-deep-ranpac", "token-ranpac"])
def test_more_blocks_than_the_backbone_has_are_refused(name: str) -> None:
    with pytest.raises(BadOption, match="has 6 blocks, not 7"):
        methods.make(name, tiny_vit(), last_blocks=7)

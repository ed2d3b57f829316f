"""Deep RanPAC, compared with loops over images and blocks and an explicit ridge regression."""

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
        tokens = tokens + block.ls1(attended)
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
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


def test_prompted_features_have_the_prefixes_of_the_first_task() -> None:
    vit = tiny_vit()
    stream = make_stream(patterns(4, train=8), tasks=2, seed=0)
    method = methods.make("coda-p-deep-ranpac", vit, components=4, width=32, ridge=1.0)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8))
    for task in stream.tasks:
        engine.learn(method, task)
    images = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        queries = method.queries(images)
        features = method.features(images, None)
        for number, image in enumerate(images):
            prefixes = method.prefixes(queries[number : number + 1])
            expected = tokens_of_blocks(vit, image, 3, prefixes)
            torch.testing.assert_close(features[number], expected, rtol=1e-4, atol=1e-4)
        scores = method.statistics(features)
        torch.testing.assert_close(method.logits(images), scores)
        assert not torch.allclose(features, vit.pooled_features(images, 3), atol=1e-3)


@pytest.mark.parametrize("name", ["deep-ranpac", "coda-p-deep-ranpac"])
def test_more_blocks_than_the_backbone_has_are_refused(name: str) -> None:
    with pytest.raises(BadOption, match="has 6 blocks, not 7"):
        methods.make(name, tiny_vit(), last_blocks=7)

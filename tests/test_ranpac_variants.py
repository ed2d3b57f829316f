"""Deep, Token and LoRanPAC, compared with loops over images and blocks and with regressions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from naive import random_vit
from small import PLAIN_VIEWS, TINY, brief, patterns, tiny_vit
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.errors import BadOption
from coda_prompt.research import methods
from coda_prompt.research.methods import loranpac
from coda_prompt.research.methods.loranpac import LoRanPAC
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.vit import Prefixes, ViT, ViTConfig


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


# -- LoRanPAC


TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
VIT = ViTConfig(image_size=8, patch_size=4, width=6, depth=1, heads=2, mlp_width=8)


@pytest.fixture
def vit() -> ViT:
    return random_vit(VIT)


def made(vit: ViT, **options: object) -> LoRanPAC:
    method = methods.make("loranpac", vit, **options)
    assert isinstance(method, LoRanPAC)
    return method


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, VIT.width, generator=torch.Generator().manual_seed(seed))


def learn(method: LoRanPAC, features: Tensor, labels: Tensor, new: int) -> None:
    method.begin_task(brief(method, new=new))
    method.fit(features, None, labels)
    method.end_task()


class Naive:
    """U and S by a QR decomposition of what is new and an SVD of the small core, as published."""

    def __init__(self, projection: np.ndarray, kept: float, ridge: float) -> None:
        self.projection, self.kept, self.ridge = projection, kept, ridge
        self.basis = np.zeros((projection.shape[1], 0))
        self.values = np.zeros(0)
        self.sums: dict[int, np.ndarray] = {}
        self.images = 0

    def learn(self, features: np.ndarray, labels: list[int]) -> None:
        columns = np.maximum(features @ self.projection, 0).T  # E x n
        for column, label in zip(columns.T, labels, strict=True):
            self.sums[label] = self.sums.get(label, 0) + column
        self.images += len(labels)
        inside = self.basis.T @ columns
        new, triangle = np.linalg.qr(columns - self.basis @ inside)
        top = np.hstack([np.diag(self.values), inside])
        bottom = np.hstack([np.zeros((len(triangle), len(self.values))), triangle])
        vectors, values, _ = np.linalg.svd(np.vstack([top, bottom]), full_matrices=False)
        rank = min(round(self.kept * self.images), round(self.kept * len(columns)))
        self.basis = np.hstack([self.basis, new]) @ vectors[:, :rank]
        self.values = values[:rank]

    def scores(self, features: np.ndarray) -> np.ndarray:
        hidden = np.maximum(features @ self.projection, 0)
        sums = np.stack([self.sums[label] for label in sorted(self.sums)], axis=1)
        inverse = np.diag(1 / (self.values**2 + self.ridge))
        return hidden @ self.basis @ inverse @ self.basis.T @ sums


@pytest.mark.parametrize("ridge", [0.0, 3.0])
@pytest.mark.parametrize("features", [60, 20])
def test_scores_task_by_task(vit: ViT, features: int, ridge: float) -> None:
    """With fewer images than random features, and with more; tasks of unequal size."""
    method = made(vit, width=features, kept=0.6, ridge=ridge)
    naive, seen = None, 0
    for task, (images, new) in enumerate([(17, 3), (12, 2), (21, 4)]):
        labels = torch.arange(images) % new + seen
        learn(method, drawn(images, task), labels, new)
        if naive is None:
            projection = method.statistics.projection(torch.zeros(1)).double().numpy()
            naive = Naive(projection, 0.6, ridge)
        naive.learn(drawn(images, task).double().numpy(), labels.tolist())
        seen += new
        found, expected = method.scores(drawn(5, 9)), naive.scores(drawn(5, 9).double().numpy())
        assert_close(found.double(), torch.from_numpy(expected), **TOLERANCE)
        values = method.statistics.spectrum.frozen.norm(dim=1).double()
        assert_close(values, torch.from_numpy(naive.values), rtol=1e-5, atol=1e-4)


def test_without_truncation_it_is_least_squares_on_all_images(vit: ViT) -> None:
    method = made(vit, width=20, kept=1.0)
    parts = [(drawn(15, task), torch.arange(15) % 3 + 3 * task) for task in range(3)]
    for features, labels in parts:
        learn(method, features, labels, 3)
    features, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    hidden = method.statistics.hidden(features).double()
    targets = torch.nn.functional.one_hot(labels).double()
    expected = torch.linalg.lstsq(hidden, targets).solution
    assert_close(method.statistics.weight.frozen.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_large_task_is_learned_in_parts(vit: ViT, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = drawn(30, 0), torch.arange(30) % 3
    parts = made(vit, width=20)
    monkeypatch.setattr(loranpac, "UPDATE_SIZE", 10)
    learn(parts, features, labels, 3)
    assert parts.statistics.spectrum.frozen.shape == (15, 20)
    naive = Naive(parts.statistics.projection(torch.zeros(1)).double().numpy(), 0.75, 0.0)
    for first in range(0, 30, 10):
        chosen = slice(first, first + 10)
        naive.learn(features[chosen].double().numpy(), labels[chosen].tolist())
    expected = torch.from_numpy(naive.scores(drawn(5, 9).double().numpy()))
    assert_close(parts.scores(drawn(5, 9)).double(), expected, **TOLERANCE)


def test_one_image_per_class_is_learned_exactly(vit: ViT) -> None:
    """0.75 n directions would leave out some of the classes."""
    method = made(vit, width=60)
    for label in range(8):
        learn(method, drawn(1, label), torch.tensor([label]), 1)
    scores = method.scores(torch.cat([drawn(1, label) for label in range(8)]))
    assert_close(scores, torch.eye(8), rtol=1e-4, atol=1e-4)


def test_repeated_images_leave_no_rounding_to_invert(vit: ViT) -> None:
    method = made(vit, width=60)
    features = drawn(4, 0).repeat(10, 1)
    learn(method, features, torch.arange(40) % 4, 4)
    assert len(method.statistics.spectrum) == 4
    assert_close(method.scores(features[:4]), torch.eye(4), rtol=1e-4, atol=1e-4)


def test_the_default_has_at_most_ten_thousand_random_features(vit: ViT) -> None:
    assert made(vit).statistics.projected == 16 * 6
    with torch.device("meta"):
        assert made(ViT(ViTConfig())).statistics.projected == 10_000


def test_the_rank_is_limited(vit: ViT) -> None:
    method = made(vit, width=60, max_rank=5)
    learn(method, drawn(30, 0), torch.arange(30) % 3, 3)
    assert method.statistics.spectrum.frozen.shape == (5, 60)

"""LoRanPAC: loops written from the equations, the truncated spectrum, and few images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from naive import random_vit
from small import brief
from torch import Tensor
from torch.testing import assert_close

from coda_prompt import methods
from coda_prompt.methods import loranpac
from coda_prompt.methods.loranpac import LoRanPAC
from coda_prompt.model.vit import ViT, ViTConfig

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

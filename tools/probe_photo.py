"""Probe the photo backbone beside EfficientNet-lite0 on CIFAR-100 and Tiny-ImageNet.

    PYTHONPATH=src python tools/probe_photo.py --data DIR FILE.safetensors --lite0
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.model.vit import ViTConfig

VIT = ViTConfig(
    image_size=112,
    patch_size=14,
    width=384,
    depth=12,
    heads=6,
    mlp_width=1536,
    layer_scale=True,
)
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Of ridge regression, relative to the mean squared singular value of the features."""


def ridge(train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Predicted labels of `test`; the penalty is chosen by leave-one-out on `train`."""
    train, test = train.double(), test.double()
    mean = train.mean(0)
    targets = F.one_hot(labels).double()
    offset = targets.mean(0)
    left, values, right = torch.linalg.svd(train - mean, full_matrices=False)
    squares = values.square()
    projected = left.T @ (targets - offset)
    best, weights = -1.0, projected
    for penalty in PENALTIES:
        shrunk = squares / (squares + penalty * squares.mean())
        fitted = left @ (shrunk[:, None] * projected) + offset
        leverage = (left.square() @ shrunk)[:, None] + 1 / len(train)
        left_out = (fitted - leverage * targets) / (1 - leverage)
        accuracy = (left_out.argmax(1) == labels).double().mean().item()
        if accuracy > best:
            best, weights = accuracy, right.T @ ((shrunk / values)[:, None] * projected)
    return ((test - mean) @ weights + offset).argmax(1)


def draw(labels: Tensor, images: int, seed: int) -> Tensor:
    """Indices of random images, so many of each class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    classes = labels.unique()
    return torch.cat([order[labels[order] == label][:images] for label in classes])


def ridge_accuracy(
    features: Tensor, labels: Tensor, images: int, seeds: Iterable[int]
) -> list[float]:
    """Accuracy on the rest of one set after fitting so many images of each class."""
    labels = labels.unique(return_inverse=True)[1]
    accuracies = []
    for seed in seeds:
        rows = draw(labels, images, seed)
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill_(0, rows, False)
        predicted = ridge(features[rows], labels[rows], features[rest])
        accuracies.append((predicted == labels[rest]).double().mean().item())
    return accuracies

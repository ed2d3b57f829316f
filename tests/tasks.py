"""Tasks without training, for oracles: parameters and statistics end up somewhere random."""

from __future__ import annotations

import torch
from naive import random_vit
from small import brief
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.research.methods import Loss, Method
from coda_prompt.research.vit.vit import ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
VIT = ViTConfig(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp_width=24)
UNEVEN = (2, 3, 2)


def small_vit() -> ViT:
    return random_vit(VIT)


def some_images(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def scatter(method: Method) -> None:
    """Move all trainable parameters."""
    generator = torch.Generator().manual_seed(len(method.task_sizes))
    for parameter in method.trainable_parameters():
        parameter.data = parameter.data + 0.5 * torch.randn(parameter.shape, generator=generator)


def open_task(method: Method, new: int) -> None:
    method.begin_task(brief(method, new=new))
    scatter(method)


def fit_task(method: Method, new: int, images: int = 4) -> tuple[Tensor, Tensor]:
    """Give the open task the features of some images per class; return features and labels."""
    generator = torch.Generator().manual_seed(10 + len(method.task_sizes))
    labels = torch.arange(method.classes_seen - new, method.classes_seen).repeat(images)
    width = method.features(some_images(1), torch.zeros(1, VIT.width)).shape[1]
    features = torch.randn(len(labels), width, generator=generator)
    queries = torch.randn(len(labels), VIT.width, generator=generator)
    method.fit(features, queries if method.needs_queries else None, labels)
    return features, labels


def learn_tasks(method: Method, sizes: tuple[int, ...]) -> None:
    for new in sizes:
        open_task(method, new)
        fit_task(method, new)
        scatter(method)
        method.end_task()


def cosine(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum() / (left.square().sum().sqrt() * right.square().sum().sqrt())


def cross_entropy(logits: list[Tensor], label: int) -> Tensor:
    exponentials = [value.exp() for value in logits]
    return -(exponentials[label] / sum(exponentials, torch.zeros(()))).log()


def check_loss(method: Method, loss: Loss, expected: Tensor) -> None:
    """Value and gradients of a loss."""
    found = loss.mean.mean() + loss.total.sum() + loss.penalty
    assert_close(found, expected, **TOLERANCE)
    parameters = method.trainable_parameters()
    gradients = torch.autograd.grad(found, parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    moved = 0
    for gradient, value in zip(gradients, wanted, strict=True):
        moved += value is not None and bool(value.any())
        zero = torch.zeros(())
        found, value = (zero if each is None else each for each in (gradient, value))
        assert_close(*torch.broadcast_tensors(found, value), **TOLERANCE)
    assert moved, "something has a gradient"

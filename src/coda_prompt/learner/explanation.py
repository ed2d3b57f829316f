"""How the answer for one image comes about: nearest classes and the weights of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coda_prompt import errors
from coda_prompt.learner.network import Network

MAX_NEAREST = 10
"""Classes that an explanation names."""


@dataclass(frozen=True)
class Neighbour:
    """A class and how near the image is to it."""

    label: str
    """Class name."""
    distance: float | None
    """Cosine distance, from 0 (same direction) to 2; None if the method has no such measure."""
    probability: float
    """Probability of the class."""


@dataclass(frozen=True)
class PromptWeights:
    """How much each prompt contributes in one block of the ViT."""

    block: int
    """Block of the ViT, counted from 0."""
    weights: tuple[float, ...]
    """Of each prompt."""


@dataclass(frozen=True)
class Explanation:
    """How the answer for one image comes about."""

    nearest: tuple[Neighbour, ...]
    """The nearest classes first; without distances, the most likely."""
    prompts: tuple[PromptWeights, ...]
    """Weights of the prompts for this image; empty if the method has none that depend on it."""


def explain(network: Network, view: Tensor) -> Explanation:
    """Explain the answer for one image.

    Args:
        network: The trained network.
        view: The image, as `Predictor.view` returns it.

    Raises:
        NotLearned: No class has been learned yet.
    """
    if not network.tasks:
        raise errors.NotLearned([], [])
    predictor, method = network.predictor, network.method
    (probabilities,) = predictor.probabilities([view])
    parameter = next(method.backbone.parameters())
    with torch.inference_mode(), network.fabric.autocast():
        batch = view[None].to(parameter)
        queries = method.queries(batch)
        distances = method.distances(method.features(batch, queries))
        weights = method.prompt_weights(queries)
    prompts = tuple(
        PromptWeights(block, tuple(rows[0].float().tolist())) for block, rows in weights.items()
    )
    return Explanation(_nearest(network.classes, probabilities, distances), prompts)


def _nearest(
    classes: list[str], probabilities: Tensor, distances: Tensor | None
) -> tuple[Neighbour, ...]:
    order = (-probabilities if distances is None else distances[0]).argsort()[:MAX_NEAREST]
    return tuple(
        Neighbour(
            classes[row],
            None if distances is None else float(distances[0, row]),
            float(probabilities[row]),
        )
        for row in order.tolist()
    )

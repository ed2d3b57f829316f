"""How the answer for one image comes about: nearest classes and the weights of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.encoder.encoder import Prompts
from coda_prompt.errors import NotLearned
from coda_prompt.learner.model import LearnedModel

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


def explain(model: LearnedModel, image: Image.Image) -> Explanation:
    """Explain the answer for one image.

    Args:
        model: What has been learned.
        image: The image.

    Raises:
        NotLearned: No class has been learned yet.
    """
    if not model.tasks:
        raise NotLearned([], [])
    features = model.encoder.encode(image, model.prompts).features[None]
    probabilities = model.probabilities(model.scores(features))[0]
    distances = model.classifier.distances(features)
    prompts: tuple[PromptWeights, ...] = ()
    if model.prompts is not None:
        query = model.encoder.encode(image).features
        prompts = tuple(
            PromptWeights(block, tuple(weights.tolist()))
            for block, weights in enumerate(component_weights(query, model.prompts))
        )
    return Explanation(_nearest(model.classes, probabilities, distances), prompts)


def component_weights(query: NDArray[np.float32], prompts: Prompts) -> NDArray[np.float32]:
    """Compute alpha = cos(q * A, K), equation 5 of CODA-Prompt, blocks x M, for a query of D."""
    attended, keys = query * prompts.attention, prompts.keys
    lengths = np.linalg.norm(attended, axis=2) * np.linalg.norm(keys, axis=2)
    weights: NDArray[np.float32] = (attended * keys).sum(axis=2) / np.maximum(lengths, 1e-12)
    return weights


def _nearest(
    classes: list[str],
    probabilities: NDArray[np.float64],
    distances: NDArray[np.float64] | None,
) -> tuple[Neighbour, ...]:
    order = np.argsort(-probabilities if distances is None else distances[0], kind="stable")
    return tuple(
        Neighbour(
            classes[row],
            None if distances is None else float(distances[0, row]),
            float(probabilities[row]),
        )
        for row in order[:MAX_NEAREST].tolist()
    )

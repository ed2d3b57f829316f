"""Estimate how long a lesson takes, from a few of its images."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coda_prompt.data.resolve import Labelled
    from coda_prompt.learner.network import Network

SAMPLES = 8
"""Images that are decoded and passed through the backbone to measure the time of one."""
LONG_LESSON = 30.0
"""Minimum estimate in seconds for a message."""
TRAINING_PASSES = 2.5
"""Forward passes that a training step costs, with its query and backward pass: measured for
CODA-P on `pocket`, where both passes share their first blocks."""


def estimate_seconds(network: Network, images: Labelled, epochs: int | None) -> float:
    """Estimate the duration of a lesson; evaluation of its held-out images is part of it.

    Args:
        network: What will learn; nothing in it is changed.
        images: The images of the lesson.
        epochs: Passes over the images. Default: as in the training of the network.
    """
    predictor, split, count = network.predictor, images.split, len(images.split.labels)
    if count < 2 * SAMPLES:
        return 0.0
    indices = torch.linspace(0, count - 1, SAMPLES).long().tolist()
    started = time.perf_counter()
    views = [predictor.view(partial(split.image, index)) for index in indices]
    decoded = time.perf_counter()
    with torch.inference_mode():
        network.backbone.vit(torch.stack(views).to(network.fabric.device))
    reading = (decoded - started) / SAMPLES
    forward = (time.perf_counter() - decoded) / SAMPLES
    passes = 1 if network.method.closed_form else epochs or network.training.epochs
    costs = forward if network.method.closed_form else TRAINING_PASSES * forward
    return count * passes * (reading + costs) / network.fabric.world_size

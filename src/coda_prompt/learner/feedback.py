"""Progress, log messages, warnings and time estimates of a classifier."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from coda_prompt import console
from coda_prompt.errors import CodaWarning

if TYPE_CHECKING:
    from coda_prompt.images.labelled import Labelled
    from coda_prompt.learner.network import Network
    from coda_prompt.research.training.settings import Event

LOGGER = logging.getLogger("coda_prompt")
LINE_INTERVAL = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""
SAMPLES = 8
"""Images that are decoded and passed through the backbone to measure the time of one."""
LONG_LESSON = 30.0
"""Minimum estimate in seconds for a message."""
TRAINING_PASSES = 2.5
"""Forward passes that a training step costs, with its query and backward pass: measured for
CODA-P on `pocket`, where both passes share their first blocks."""


class LearnerProgress(console.ProgressBar):
    """Progress over the steps of a training or the images of a pass.

    A bar on a terminal; elsewhere a line every ten seconds.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.add_task("reading images", total=None)
        (self._task,) = self.tasks
        self._quiet, self._part = quiet, 1
        self.disable = self.disable or quiet
        self._printed = self._began = time.monotonic()

    def on_event(self, event: Event) -> None:
        """Show the progress that an event reports."""
        if event.kind == "pass":
            self._show("reading images", event.step, event.steps)
        elif event.kind in ("step", "epoch"):
            status = f"learning, epoch {event.epoch + 1}/{event.epochs}, loss {event.loss:.2f}"
            done = event.epoch * event.steps + event.step
            self._show(status, done, event.epochs * event.steps)

    def _show(self, status: str, done: int, total: int) -> None:
        if self._task.total is not None and (
            total != self._task.total or done < self._task.completed
        ):  # of another pass, whose share of the whole is not known
            self._began, self._part = time.monotonic(), self._part + 1
        if self._part > 1:
            status = f"part {self._part}: {status}"
        self.update(self._task.id, description=status, completed=done, total=total)
        silent = self._quiet or not self.disable or done >= total
        if not silent and time.monotonic() - self._printed >= LINE_INTERVAL:
            self._printed = time.monotonic()
            left = (self._printed - self._began) * (total - done) / max(1, done)
            remaining = f", about {console.duration(left)} left" if done else ""
            console.print_message(f"{status}: {self._task.percentage:.0f} %{remaining}")


def warn(messages: Iterable[str]) -> None:
    """Warn the caller of `learn`, which calls this."""
    for message in messages:
        warnings.warn(message, CodaWarning, stacklevel=3)


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

"""Progress, log messages and warnings of a classifier."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from coda_prompt import console
from coda_prompt.errors import CodaWarning

if TYPE_CHECKING:
    from coda_prompt.training.settings import Event

LOGGER = logging.getLogger("coda_prompt")
LINE_INTERVAL = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""


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

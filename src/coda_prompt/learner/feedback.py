"""Progress and warnings of a classifier."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable

from coda_prompt import console
from coda_prompt.errors import CodaWarning
from coda_prompt.learner.results import Progress

LINE_INTERVAL = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""


class LearnerProgress(console.ProgressBar):
    """Progress over the images of a pass or the steps of a training.

    A bar on a terminal; elsewhere a line every ten seconds.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.add_task("reading images", total=None)
        (self._task,) = self.tasks
        self._quiet, self._stage = quiet, ""
        self.disable = self.disable or quiet
        self._printed = self._began = time.monotonic()

    def on_progress(self, progress: Progress) -> None:
        """Show how far the work is."""
        done, total = progress.done, progress.total
        if progress.stage != self._stage or done < self._task.completed:
            self._stage, self._began = progress.stage, time.monotonic()
        self.update(self._task.id, description=progress.stage, completed=done, total=total)
        silent = self._quiet or not self.disable or done >= total
        if not silent and time.monotonic() - self._printed >= LINE_INTERVAL:
            self._printed = time.monotonic()
            left = (self._printed - self._began) * (total - done) / max(1, done)
            remaining = f", about {console.duration(left)} left" if done else ""
            share = 100 * done / max(1, total)
            console.print_message(f"{progress.stage}: {share:.0f} %{remaining}")


def warn(messages: Iterable[str]) -> None:
    """Warn the caller of `learn`, which calls this."""
    for message in messages:
        warnings.warn(message, CodaWarning, stacklevel=3)

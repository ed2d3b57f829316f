"""Progress of running benchmarks: a bar with ETA on a terminal, else one line per task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from coda_prompt.console import ProgressBar, table
from coda_prompt.research.bench.runs import Run
from coda_prompt.research.training.settings import Event

MAX_ROWS = 24
"""Running runs that the table lists."""


class BenchProgress(ProgressBar):
    """Progress bar over runs, weighted by epochs, with a table of the running ones."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        self._runs, self._finished = list(runs), 0
        self._status: dict[Path, str] = {}
        """Status of each running run, by folder."""
        self._weights = {run.folder: _work(run) for run in runs}
        self._shares: dict[Path, float] = {}
        self._accuracies: dict[Path, str] = {}
        self._started = time.monotonic()
        eta = TextColumn("{task.fields[eta]}")
        super().__init__(console, eta, self._table if len(runs) > 1 else None)
        self._bar_task = self.add_task("", total=sum(self._weights.values()) or 1, eta="")

    def on_event(self, run: Run, event: Event) -> None:
        """Update the display with an event of a run."""
        tasks = max(1, event.tasks)
        share = event.task / tasks
        if event.kind in ("step", "epoch"):
            within = (event.epoch + event.step / max(1, event.steps)) / event.epochs
            share += min(1.0, within) / tasks
        if event.kind == "evaluation":
            share = (event.task + 1) / tasks
            mean = 100 * sum(event.accuracies) / len(event.accuracies)
            self._accuracies[run.folder] = f"{mean:.1f} %"
        self._shares[run.folder] = share
        done = self._completed()
        status = f"task {event.task + 1}/{tasks}"
        row = f"{run.method}, trial {run.seed + 1}, "
        if event.kind == "evaluation" and not self.console.is_terminal:
            self.console.print(
                f"{row}{status}: {mean:.1f} % over all classes so far, {self._eta(done)}"
            )
        if event.epochs:
            status += f", epoch {event.epoch + 1}/{event.epochs}"
        if accuracy := self._accuracies.get(run.folder):
            status += f", {accuracy} so far"
        self._status[run.folder] = status
        description = "" if len(self._runs) > 1 else row + self._status[run.folder]
        self.update(self._bar_task, completed=done, description=description, eta=self._eta(done))

    def finish(self, run: Run) -> None:
        """Mark a run as finished and print its accuracy above the bar."""
        self._shares[run.folder] = 1.0
        if self.console.is_terminal and run.folder in self._accuracies:
            name = ", ".join(_name(run))
            line = f"{name}: {self._accuracies[run.folder]} over all classes"
            self.console.print(line, highlight=False)
        self._status.pop(run.folder, None)
        self._finished += 1
        self.update(self._bar_task, completed=self._completed())

    def _table(self) -> Table:
        """List the running runs; the caption counts finished and waiting ones."""
        running = [run for run in self._runs if run.folder in self._status]
        rows = [[*_name(run), self._status[run.folder]] for run in running[:MAX_ROWS]]
        waiting = len(self._runs) - self._finished - len(running)
        is_sweep = any(run.point is not None for run in self._runs)
        listing = table(["method", "trial", *["at"] * is_sweep, "status"], rows)
        listing.caption = f"{self._finished} finished, {len(running)} running, {waiting} waiting"
        return listing

    def _completed(self) -> float:
        return sum(self._weights[folder] * share for folder, share in self._shares.items())

    def _eta(self, done: float) -> str:
        total = sum(self._weights.values())
        elapsed = time.monotonic() - self._started
        if done <= 0:
            return ""
        remaining = int(elapsed * (total - done) / done)
        return f"{remaining // 60}:{remaining % 60:02d} left"


def _name(run: Run) -> list[str]:
    """Return the cells that identify a run; runs of a sweep also have the swept value."""
    point = [] if run.point is None else [f"{run.point.field} = {run.point.value}"]
    return [run.method, str(run.seed + 1), *point]


def _work(run: Run) -> float:
    """Estimate the work of a run in epochs."""
    if run.benchmark.entry_of(run.method).type.closed_form:
        return 0.3
    return float(run.benchmark.method_training(run.method, run.seed).epochs)

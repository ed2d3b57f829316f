"""What a person sees while runs go on: on a terminal a bar with ETA, else a line a task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from coda_prompt.bench.runner import Run
from coda_prompt.console import ProgressBar, table
from coda_prompt.training.settings import Event

MOST_SHOWN = 24
"""Runs at work that a table lists."""


class BenchProgress(ProgressBar):
    """Counts work in epochs of a task; a method without gradients counts as one."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        last = TextColumn("{task.fields[eta]}")
        super().__init__(console, last, self._table if len(runs) > 1 else None)
        self._console = console
        self._runs, self._done = list(runs), 0
        self._going: dict[Path, str] = {}
        """What is going on, by folder."""
        self._weights = {run.folder: self._work(run) for run in runs}
        self._shares: dict[Path, float] = {}
        self._accuracies: dict[Path, str] = {}
        self._started = time.monotonic()
        self._line = self.bar.add_task("", total=sum(self._weights.values()) or 1, eta="")

    def on_event(self, run: Run, event: Event) -> None:
        tasks = max(1, event.tasks)
        share = event.task / tasks
        if event.kind in ("step", "epoch"):
            within = (event.epoch + event.step / max(1, event.steps)) / event.epochs
            share += min(1.0, within) / tasks
        if event.kind == "evaluation":
            share = (event.task + 1) / tasks
            mean = 100 * sum(event.accuracies) / len(event.accuracies)
            self._accuracies[run.folder] = f", {mean:.1f} % so far"
        self._shares[run.folder] = share
        done = self._completed()
        where = f"task {event.task + 1}/{tasks}"
        row = f"{run.method}, trial {run.seed + 1}, "
        if event.kind == "evaluation" and not self._console.is_terminal:
            self._console.print(
                f"{row}{where}: {mean:.1f} % over all classes so far, {self._eta(done)}"
            )
        if event.epochs:
            where += f", epoch {event.epoch + 1}/{event.epochs}"
        self._going[run.folder] = where + self._accuracies.get(run.folder, "")
        shown = "" if len(self._runs) > 1 else row + self._going[run.folder]
        self.bar.update(self._line, completed=done, description=shown, eta=self._eta(done))

    def finished(self, run: Run) -> None:
        self._shares[run.folder] = 1.0
        self._going.pop(run.folder, None)
        self._done += 1
        self.bar.update(self._line, completed=self._completed())

    def _table(self) -> Table:
        """The runs at work, and how many are done and waiting."""
        going = [run for run in self._runs if run.folder in self._going]
        rows = [[*self._name(run), self._going[run.folder]] for run in going[:MOST_SHOWN]]
        waiting = len(self._runs) - self._done - len(going)
        swept = any(run.point is not None for run in self._runs)
        shown = table(["method", "trial", *["at"] * swept, "going on"], rows)
        shown.caption = f"{self._done} done, {len(going)} going on, {waiting} waiting"
        return shown

    @staticmethod
    def _name(run: Run) -> list[str]:
        """All runs of a sweep have a point, and no others."""
        at = [] if run.point is None else [f"{run.point.field} = {run.point.value}"]
        return [run.method, str(run.seed + 1), *at]

    def _completed(self) -> float:
        return sum(self._weights[folder] * share for folder, share in self._shares.items())

    def _eta(self, done: float) -> str:
        total = sum(self._weights.values())
        elapsed = time.monotonic() - self._started
        if done <= 0:
            return ""
        left = elapsed * (total - done) / done
        return f"{int(left) // 60}:{int(left) % 60:02d} left"

    @staticmethod
    def _work(run: Run) -> float:
        if run.benchmark.entry_of(run.method).type.closed_form:
            return 0.3
        return float(run.benchmark.method_training(run.method, run.seed).epochs)

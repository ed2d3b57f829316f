"""Pictures from finished runs: accuracy over tasks, and what each task kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coda_prompt import metrics
from coda_prompt.bench.report import FinishedRun, by_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by readers of any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hp"


def accuracy_over_tasks(runs: Sequence[FinishedRun], path: Path) -> Path:
    """Mean accuracy of all tasks so far after each task, with a band of one deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, (method, own) in enumerate(by_method(runs).items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        curves = np.array([100 * metrics.accuracy_after_each_task(run.matrix) for run in own])
        steps = np.arange(1, curves.shape[1] + 1)
        mean, deviation = curves.mean(axis=0), curves.std(axis=0)
        axes.plot(steps, mean, color=colour, marker=marker, label=method, linewidth=1.8)
        if len(own) > 1:
            axes.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.15)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy over all classes so far, %")
    axes.set_xticks(steps)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _saved(figure, path)


def matrices(runs: Sequence[FinishedRun], path: Path) -> Path:
    """For each method the accuracy on task j after task t, averaged over trials."""
    from matplotlib.figure import Figure

    groups = by_method(runs)
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(3.4 * columns + 0.6, 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    mesh = None
    for axes, (method, own) in zip(grid.flat, groups.items(), strict=False):
        mean = 100 * np.mean([run.matrix for run in own], axis=0)
        mesh = axes.imshow(mean, cmap="cividis", vmin=0, vmax=100)
        for (row, column), value in np.ndenumerate(mean):
            if not np.isnan(value) and len(mean) <= 10:
                shade = "white" if value < 55 else "black"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=shade)
        axes.set_title(method)
        axes.set_xlabel("task tested")
        axes.set_ylabel("after task")
        axes.set_xticks(range(len(mean)), range(1, len(mean) + 1))
        axes.set_yticks(range(len(mean)), range(1, len(mean) + 1))
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    if mesh is not None:
        figure.colorbar(mesh, ax=grid, label="accuracy, %", shrink=0.8)
    return _saved(figure, path)


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path

"""Pictures from finished runs. Each is written as PNG and as SVG, the same bytes every time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coda_prompt import metrics
from coda_prompt.bench.report import (
    REFERENCE,
    FinishedRun,
    by_method,
    is_number,
    summary,
)
from coda_prompt.methods import METHODS
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by readers of any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", ":")
SHOWN_NUMBERS = 10
"""Tasks up to which a heat map says its numbers."""


def all_pictures(runs: Sequence[FinishedRun], folder: Path) -> list[Path]:
    """Every picture of a benchmark, as PNG files; each has an SVG beside it."""
    pictures = {
        "accuracy": accuracy_over_tasks,
        "matrices": matrices,
        "forgetting": forgetting_per_task,
        "parameters": parameters_against_accuracy,
    }
    return [save(draw(runs), folder / name) for name, draw in pictures.items()]


def accuracy_over_tasks(runs: Sequence[FinishedRun]) -> Figure:
    """Mean accuracy of all tasks so far after each task, with a band of one deviation."""
    figure, axes = _one_plot()
    tasks = len(runs[0].matrix)
    steps = np.arange(1, tasks + 1)
    for method, own in _best_first(runs):
        curves = np.array([100 * metrics.accuracy_after_each_task(run.matrix) for run in own])
        mean, deviation = curves.mean(axis=0), curves.std(axis=0)
        if np.isnan(mean[:-1]).all() and tasks > 1:  # learned all at once: a level, no curve
            style = {**_style(method), "linestyle": "-.", "marker": ""}
            mean, deviation = (np.full(tasks, held[-1]) for held in (mean, deviation))
        else:
            style = _style(method)
        known = ~np.isnan(mean)
        axes.plot(steps[known], mean[known], label=method, **style)
        if len(own) > 1:
            low, high = (mean - deviation)[known], (mean + deviation)[known]
            axes.fill_between(steps[known], low, high, color=style["color"], alpha=0.15)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy over all classes so far, %")
    places, numbers = _numbered(tasks)
    axes.set_xticks([place + 1 for place in places], numbers)
    return _finished(figure, axes)


def forgetting_per_task(runs: Sequence[FinishedRun]) -> Figure:
    """What each task lost between its best moment and the end; who forgot least on top."""
    lost = {
        method: np.mean([100 * metrics.forgetting_per_task(run.matrix) for run in own], axis=0)
        for method, own in by_method(runs).items()
    }
    known = {name: drops for name, drops in lost.items() if drops.size and np.isfinite(drops).all()}
    names = sorted(known, key=lambda name: known[name].mean())
    figure, axes = _one_plot(height=1.2 + 0.32 * max(len(names), 4))
    if not names:
        words = "not known: one task, or rows not measured"
        axes.text(0.5, 0.5, words, ha="center", va="center")
        axes.set_axis_off()
        return figure
    table = np.array([known[name] for name in names])
    mesh = axes.imshow(table, cmap="cividis", vmin=0, vmax=max(table.max(), 1), aspect="auto")
    _write_numbers(axes, table, bright=0.55 * table.max())
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(*_numbered(table.shape[1]))
    axes.set_xlabel("task")
    figure.colorbar(mesh, ax=axes, label="best accuracy minus final one, points")
    return figure


def parameters_against_accuracy(runs: Sequence[FinishedRun]) -> Figure:
    """What is trained, in % of the backbone, against what it brings."""
    from matplotlib.ticker import LogLocator

    figure, axes = _one_plot()
    for method, own in _best_first(runs):
        found = summary(own)
        accuracy, share = found["A_N"], found["trained_parameters"]["mean"]
        if accuracy["mean"] is None:
            continue  # a task without test images has no accuracy
        deviation = accuracy["std"] if len(own) > 1 else None
        style = {**_style(method), "linestyle": "none", "markersize": 8}
        axes.errorbar(share, accuracy["mean"], deviation, capsize=3, label=method, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.margins(x=0.15, y=0.1)
    axes.set_xlabel("trained parameters, % of the backbone")
    axes.set_ylabel("A_N, %")
    return _finished(figure, axes)


def matrices(runs: Sequence[FinishedRun]) -> Figure:
    """For each method the accuracy on task j after task t, averaged over trials."""
    from matplotlib.figure import Figure

    groups = by_method(runs)
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.8, 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (method, own) in zip(grid.flat, groups.items(), strict=False):
        mean = 100 * np.mean([run.matrix for run in own], axis=0)
        mesh = axes.imshow(mean, cmap="cividis", vmin=0, vmax=100)
        _write_numbers(axes, mean, bright=55)
        axes.set_title(method)
        axes.set_xlabel("task tested")
        axes.set_ylabel("after task")
        axes.set_xticks(*_numbered(len(mean)))
        axes.set_yticks(*_numbered(len(mean)))
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    figure.colorbar(mesh, ax=grid, label="accuracy, %", shrink=0.8)
    return figure


def sweep_pictures(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """A picture for each axis of a sweep's rows: A_N against the values of its fields."""
    pictures = []
    for number, axis in enumerate(dict.fromkeys(row["axis"] for row in rows)):
        own = [row for row in rows if row["axis"] == axis]
        name = "sweep" if not number else f"sweep-{number + 1}"
        pictures.append(save(_swept(own, axis), folder / name))
    return pictures


def _swept(rows: Sequence[dict[str, Any]], axis: str) -> Figure:
    figure, axes = _one_plot()
    values = list(dict.fromkeys(str(row["value"]) for row in rows))
    numbers = all(is_number(row["value"]) for row in rows)
    used = sorted({float(row["value"]) for row in rows}) if numbers else [0.0]
    wide = used[0] > 0 and used[-1] >= 20 * used[0]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for number, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method and row["A_N"]["mean"] is not None]
        if not own:
            continue
        places = [row["value"] if numbers else values.index(str(row["value"])) for row in own]
        aside = number - (len(methods) - 1) / 2  # error bars side by side, not on each other
        if wide:
            places = [place * 1.04**aside for place in places]
        else:
            step = 0.01 * (used[-1] - used[0]) if numbers else 0.05
            places = [place + step * aside for place in places]
        mean = np.array([row["A_N"]["mean"] for row in own])
        deviation = np.array([row["A_N"]["std"] for row in own])
        several = max(row["trials"] for row in own) > 1
        axes.errorbar(places, mean, deviation if several else None, capsize=3, label=method,
                      **_style(method))  # fmt: skip
    if numbers:
        if wide:
            axes.set_xscale("log")
        axes.set_xticks(used, [f"{value:g}" for value in used])
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(values)), values)
    axes.set_xlabel(axis)
    axes.set_ylabel("A_N, %")
    return _finished(figure, axes, from_zero=False)


def save(figure: Figure, path: Path) -> Path:
    """`path` with .png and .svg; the PNG's path is returned."""
    import io

    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "coda-prompt"}):
        for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
            content = io.BytesIO()
            figure.savefig(content, dpi=150, format=suffix[1:], metadata=metadata)
            write_atomically(path.with_suffix(suffix), content.getvalue())
    return path.with_suffix(".png")


def _best_first(runs: Sequence[FinishedRun]) -> list[tuple[str, list[FinishedRun]]]:
    """The rows in the order their lines end in, as a legend is read."""
    groups = by_method(runs).items()
    return sorted(groups, key=lambda group: -(summary(group[1])["A_N"]["mean"] or 0.0))


def _one_plot(height: float = 4.4) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _write_numbers(axes: Axes, table: np.ndarray, *, bright: float) -> None:
    """Its values into a heat map, dark ones where the ground is bright; not where too many."""
    columns = table.shape[1]
    if columns > SHOWN_NUMBERS:
        return
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            shade = "white" if value < bright else "black"
            size = 9 if columns <= 6 else 7
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=shade,
                      fontsize=size)  # fmt: skip


def _numbered(tasks: int) -> tuple[list[int], list[str]]:
    """Places and names of an axis's ticks for tasks, counted from 1."""
    steps = (first * 10**power for power in itertools.count() for first in (1, 2, 5))
    every = next(step for step in steps if tasks <= SHOWN_NUMBERS * step)
    places = list(range(every - 1, tasks, every))
    return places, [str(place + 1) for place in places]


def _finished(figure: Figure, axes: Axes, *, from_zero: bool = True) -> Figure:
    if from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _style(method: str) -> dict[str, Any]:
    """Every method looks the same in all pictures; the reference stands out."""
    known = sorted(METHODS, key=lambda name: name != REFERENCE)
    number = known.index(method) if method in known else len(known) + sum(method.encode())
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
        "linewidth": 2.6 if method == REFERENCE else 1.6,
    }

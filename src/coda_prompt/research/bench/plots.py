"""Plots of finished runs, written as PNG and SVG; the same runs give the same bytes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coda_prompt.research.bench import metrics
from coda_prompt.research.bench.report import REFERENCE, FinishedRun, by_method, is_number, summary
from coda_prompt.research.methods import METHODS
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", ":")
MAX_LABELS = 10
"""Most columns of a heat map with numbers in its cells, and most ticks of a task axis."""


def benchmark_plots(runs: Sequence[FinishedRun], folder: Path) -> list[Path]:
    """Write all plots of a benchmark and return the PNG files; each has an SVG next to it."""
    plots = {
        "accuracy": accuracy_over_tasks,
        "matrices": matrices,
        "forgetting": forgetting_per_task,
        "parameters": parameters_against_accuracy,
        "cost": accuracy_against_cost,
    }
    if "chunk" in runs[0].config["stream"]:
        plots["anytime"] = anytime_accuracy
    return [save(draw(runs), folder / name) for name, draw in plots.items()]


def accuracy_over_tasks(runs: Sequence[FinishedRun]) -> Figure:
    """Plot mean accuracy over the tasks so far after each task, with one standard deviation."""
    figure, axes = _one_plot()
    tasks = len(runs[0].matrix)
    steps = np.arange(1, tasks + 1)
    for method, trials in _best_first(runs):
        curves = np.array([100 * run.accuracy_curve() for run in trials])
        mean, deviation = curves.mean(axis=0), curves.std(axis=0)
        style = _style(method)
        if np.isnan(mean[:-1]).all() and tasks > 1:  # trained on all tasks at once
            style |= {"linestyle": "-.", "marker": ""}
            mean, deviation = (np.full(tasks, curve[-1]) for curve in (mean, deviation))
        measured = ~np.isnan(mean)
        axes.plot(steps[measured], mean[measured], label=method, **style)
        if len(trials) > 1:
            low, high = (mean - deviation)[measured], (mean + deviation)[measured]
            axes.fill_between(steps[measured], low, high, color=style["color"], alpha=0.15)
    axes.set(xlabel="tasks learned", ylabel="accuracy over all classes so far, %")
    positions, labels = _task_ticks(tasks)
    axes.set_xticks([position + 1 for position in positions], labels)
    return _finish(figure, axes)


def anytime_accuracy(runs: Sequence[FinishedRun]) -> Figure:
    """Plot the accuracy on all classes seen so far against the images learned from."""
    figure, axes = _one_plot()
    for method, trials in _best_first(runs):
        style = {**_style(method), "markersize": 3, "linewidth": 1.2}
        for number, run in enumerate(trials):
            images, accuracies = run.anytime_curve()
            axes.plot(images, 100 * accuracies, label=None if number else method, **style)
    axes.set(xlabel="training images so far", ylabel="accuracy over all classes so far, %")
    return _finish(figure, axes)


def accuracy_against_cost(runs: Sequence[FinishedRun]) -> Figure:
    """Plot final accuracy against the multiply-adds of the whole training."""
    return _accuracy_against(runs, "total_gmac", "10^9 multiply-adds of the training")


def parameters_against_accuracy(runs: Sequence[FinishedRun]) -> Figure:
    """Plot final accuracy against trained parameters in % of the backbone."""
    return _accuracy_against(runs, "trained_parameters", "trained parameters, % of the backbone")


def _accuracy_against(runs: Sequence[FinishedRun], column: str, label: str) -> Figure:
    from matplotlib.ticker import LogLocator

    figure, axes = _one_plot()
    for method, trials in _best_first(runs):
        row = summary(trials)
        accuracy, value = row["A_N"], row[column]["mean"]
        if accuracy["mean"] is None or value is None:
            continue  # a task without test images has no accuracy
        deviation = accuracy["std"] if len(trials) > 1 else None
        style = {**_style(method), "linestyle": "none", "markersize": 8}
        axes.errorbar(value, accuracy["mean"], deviation, capsize=3, label=method, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.margins(x=0.15, y=0.1)
    axes.set(xlabel=label, ylabel="A_N, %")
    return _finish(figure, axes)


def forgetting_per_task(runs: Sequence[FinishedRun]) -> Figure:
    """Plot what each task lost between its best accuracy and the end, least forgetting first."""
    lost = {
        method: np.mean(
            [100 * metrics.forgetting_per_task(run.matrix, run.learned) for run in trials], axis=0
        )
        for method, trials in by_method(runs).items()
    }
    known = {name: drops for name, drops in lost.items() if drops.size and np.isfinite(drops).all()}
    names = sorted(known, key=lambda name: known[name].mean())
    figure, axes = _one_plot(height=1.2 + 0.32 * max(len(names), 4))
    if not names:
        message = "not available: only one task, or not measured after every task"
        axes.text(0.5, 0.5, message, ha="center", va="center")
        axes.set_axis_off()
        return figure
    table = np.array([known[name] for name in names])
    mesh = axes.imshow(table, cmap="cividis", vmin=0, vmax=max(table.max(), 1), aspect="auto")
    _write_numbers(axes, table, bright=0.55 * table.max())
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(*_task_ticks(table.shape[1]))
    axes.set_xlabel("task")
    figure.colorbar(mesh, ax=axes, label="accuracy lost, points")
    return figure


def matrices(runs: Sequence[FinishedRun]) -> Figure:
    """Plot each method's accuracy on task j after task t as a heat map, averaged over trials."""
    from matplotlib.figure import Figure

    groups = _best_first(runs)
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    # "compressed" also accounts for the square axes: titles and labels of two lines do not overlap.
    figure = Figure(figsize=(3.2 * columns + 0.8, 3.6 * lines), layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (method, trials) in zip(grid.flat, groups, strict=False):
        mean = 100 * np.mean([run.matrix for run in trials], axis=0)
        mesh = axes.imshow(mean, cmap="cividis", vmin=0, vmax=100)
        _write_numbers(axes, mean, bright=55)
        axes.set(title=method, xlabel="task tested", ylabel="after task")
        axes.set_xticks(*_task_ticks(len(mean)))
        axes.set_yticks(*_task_ticks(len(mean)))
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    figure.colorbar(mesh, ax=grid, label="accuracy, %", shrink=0.8)
    return figure


def sweep_plots(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write a plot for each axis of a sweep and return the PNG files."""
    plots = []
    for number, axis in enumerate(dict.fromkeys(row["axis"] for row in rows)):
        axis_rows = [row for row in rows if row["axis"] == axis]
        name = "sweep" if not number else f"sweep-{number + 1}"
        plots.append(save(_sweep_plot(axis_rows, axis), folder / name))
    return plots


def _sweep_plot(rows: Sequence[dict[str, Any]], axis: str) -> Figure:
    """Plot A_N against the values of a field: numbers on a (log) scale, others side by side."""
    figure, axes = _one_plot()
    values = list(dict.fromkeys(str(row["value"]) for row in rows))
    numeric = all(is_number(row["value"]) for row in rows)
    ticks = sorted({float(row["value"]) for row in rows}) if numeric else [0.0]
    log_scale = ticks[0] > 0 and ticks[-1] >= 20 * ticks[0]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for number, method in enumerate(methods):
        points = [row for row in rows if row["method"] == method and row["A_N"]["mean"] is not None]
        if not points:
            continue
        xs = [row["value"] if numeric else values.index(str(row["value"])) for row in points]
        shift = number - (len(methods) - 1) / 2  # so that error bars do not overlap
        if log_scale:
            xs = [x * 1.04**shift for x in xs]
        else:
            step = 0.01 * (ticks[-1] - ticks[0]) if numeric else 0.05
            xs = [x + step * shift for x in xs]
        mean = np.array([row["A_N"]["mean"] for row in points])
        deviation = np.array([row["A_N"]["std"] for row in points])
        several = max(row["trials"] for row in points) > 1
        axes.errorbar(xs, mean, deviation if several else None, capsize=3, label=method,
                      **_style(method))  # fmt: skip
    if numeric:
        if log_scale:
            axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(values)), values)
    axes.set(xlabel=axis, ylabel="A_N, %")
    return _finish(figure, axes, from_zero=False)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to `path` with .png and .svg, nothing cut off; return the PNG's path."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "coda-prompt"}):
        for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
            content = io.BytesIO()
            figure.savefig(
                content, dpi=150, format=suffix[1:], metadata=metadata, bbox_inches="tight"
            )
            write_atomically(path.with_suffix(suffix), content.getvalue())
    return path.with_suffix(".png")


def _best_first(runs: Sequence[FinishedRun]) -> list[tuple[str, list[FinishedRun]]]:
    """Order methods by final accuracy, so that the legend has the order of the lines."""
    groups = by_method(runs).items()
    return sorted(groups, key=lambda group: -(summary(group[1])["A_N"]["mean"] or 0.0))


def _one_plot(height: float = 4.4) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _write_numbers(axes: Axes, table: np.ndarray, *, bright: float) -> None:
    """Write values into the cells of a heat map: black from `bright` on, white below."""
    columns = table.shape[1]
    if columns > MAX_LABELS:
        return
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            shade = "white" if value < bright else "black"
            size = 9 if columns <= 6 else 7
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=shade,
                      fontsize=size)  # fmt: skip


def _task_ticks(tasks: int) -> tuple[list[int], list[str]]:
    """Return positions and labels of the ticks of a task axis; labels count from 1."""
    steps = (first * 10**power for power in itertools.count() for first in (1, 2, 5))
    every = next(step for step in steps if tasks <= MAX_LABELS * step)
    positions = list(range(every - 1, tasks, every))
    return positions, [str(position + 1) for position in positions]


def _finish(figure: Figure, axes: Axes, *, from_zero: bool = True) -> Figure:
    if from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _style(method: str) -> dict[str, Any]:
    """Return a method's line style, the same in all plots; the reference stands out."""
    known = sorted(METHODS, key=lambda name: name != REFERENCE)
    number = known.index(method) if method in known else len(known) + sum(method.encode())
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
        "linewidth": 2.6 if method == REFERENCE else 1.6,
    }

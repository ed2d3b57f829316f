"""Draw the plots of docs/lab/performance.md from the results of speed.py and tasks.py.

python benchmarks/pictures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "lab"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#007a5a", "#999999"
VARIANTS = (
    ("exact", "exact queries", BLUE),
    ("cached", "cached queries", ORANGE),
    ("fast, 20 epochs", "--fast", GREEN),
)


def steps(rows: list[dict[str, Any]]) -> None:
    """Plot speedups over the textbook implementation, with those expected from operations."""
    for row in rows:
        batch = f"\nbatch {row['batch']}" if row["batch"] != 16 else ""
        row["label"] = row["backbone"].replace(", ", "\n") + batch
    backbones = list(dict.fromkeys(row["label"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for offset, (variant, label, colour) in enumerate(VARIANTS):
        bar_rows = [row for row in rows if row["step"] == variant]
        xs = [backbones.index(row["label"]) + 0.28 * (offset - 1) for row in bar_rows]
        bars = axes.bar(
            xs, [row["times faster"] for row in bar_rows], 0.25, color=colour, label=label
        )
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
        counted = [row["counted"] for row in bar_rows]
        axes.hlines(
            counted, [x - 0.12 for x in xs], [x + 0.12 for x in xs],
            color="black", label="" if offset else "by counted operations",
        )  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(range(len(backbones)), backbones)
    axes.set_ylabel("times faster than the textbook step")
    axes.set_ylim(0, 1.2 * max(max(row["times faster"], row["counted"]) for row in rows))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", ncols=4, frameon=False)
    figure.savefig(DOCS / "performance-steps.png", dpi=150)


def growth(components: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> None:
    """Plot the cost of a step and of `coda learn` against what was learned before."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for backbone, colour in (("pocket", BLUE), ("ViT-B/16", ORANGE)):
        steps = [row for row in components if row["backbone"] == backbone]
        counts = [row["components"] for row in steps]
        left.plot(counts, [row["to 100"] for row in steps], "o-", color=colour, label=backbone)
    left.set(xscale="log", xlabel="components learned", ylabel="step, relative to 100 components")
    for method, colour in (("ncm", GREY), ("coda-p", BLUE), ("ranpac", ORANGE)):
        learned = [row for row in tasks if row["method"] == method]
        numbers = [row["task"] for row in learned]
        right.plot(
            numbers, [row["to task 10"] for row in learned], "o-", color=colour, label=method
        )
    right.set(xscale="log", xlabel="task of one class", ylabel="`coda learn`, relative to task 10")
    for axes in (left, right):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(DOCS / "performance-growth.png", dpi=150)


def main() -> None:
    speed = json.loads((HERE / "speed.json").read_text("utf-8"))
    tasks = json.loads((HERE / "tasks.json").read_text("utf-8"))
    steps(speed["training"])
    growth(speed["growth"], tasks)


if __name__ == "__main__":
    main()

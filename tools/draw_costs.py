"""Draw accuracy against the cost of a query from tables of the lab notebook.

    python tools/draw_costs.py

Reads the tables with a column "passes per query" in docs/lab/pocket.md and
docs/lab/cifar-100-laptop.md, and writes a picture beside each page.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

LAB = Path(__file__).parents[1] / "docs" / "lab"
PICTURES = {
    "pocket.md": ("pocket-cost.png", 0.0),
    "cifar-100-laptop.md": ("cifar-100-laptop-cost.png", 50.0),
}
"""Page -> its picture, and the accuracy below which methods are left out."""
COST = "passes per query"
BLUE, GREY = "#0072b2", "#666666"


def main() -> None:
    for page, (picture, lowest) in PICTURES.items():
        rows = read_table((LAB / page).read_text("utf-8"))
        shown = {name: point for name, point in rows.items() if point[1] >= lowest}
        draw(shown).savefig(LAB / picture, dpi=150)
        print(LAB / picture)


def read_table(text: str) -> dict[str, tuple[float, float]]:
    """Return the cost and the accuracy of each method in the first table with costs."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|") and COST in line)
    heads = _cells(lines[first])
    cost, accuracy = heads.index(COST), heads.index("A_N %")
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        rows[cells[0].split("`")[1]] = (_number(cells[cost]), _number(cells[accuracy]))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]


def _number(cell: str) -> float:
    return float(cell.split()[0])


def draw(rows: dict[str, tuple[float, float]]) -> Figure:
    """Plot each method as a point with its name; methods without kept images are blue."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots()
    whole = {"ft", "ft++", "lwf-mc", "er-5000", "upper-bound"}
    span = max(y for _, y in rows.values()) - min(y for _, y in rows.values())
    written: list[tuple[float, float]] = []
    for name, (x, y) in sorted(rows.items(), key=lambda row: -row[1][1]):
        colour = GREY if name in whole else BLUE
        axes.plot(x, y, "o", color=colour, markersize=5)
        # Below the last name at nearly the same cost, so that names do not overlap.
        near = [height for other, height in written if 0.6 < other / x < 1.7]
        height = min([y, *(each - 0.032 * span for each in near)])
        written.append((x, height))
        axes.annotate(
            name,
            (x, y),
            xytext=(x * 1.06, height),
            textcoords="data",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4},
        )
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_xlim(0.9, 1.6 * max(x for x, _ in rows.values()))
    axes.set(xlabel="passes of the backbone per query", ylabel="accuracy after the last task, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()

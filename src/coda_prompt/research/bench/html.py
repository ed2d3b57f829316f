"""Write a report: tables as Markdown, LaTeX and CSV, plots, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_prompt.research.bench import plots, tables
from coda_prompt.research.bench.report import FinishedRun, grouped, rows, sweep_rows
from coda_prompt.research.bench.tables import Table
from coda_prompt.storage.files import write_atomically

CAPTIONS = {
    "accuracy": "Accuracy over all classes learned so far; bands, with several trials, are one "
    "standard deviation.",
    "matrices": "Accuracy on each task after each task, mean of the trials.",
    "forgetting": "Accuracy each task lost between its best value and the end.",
    "anytime": "Accuracy over all classes seen so far, measured while images arrive.",
    "cost": "Multiply-adds of the whole training against final accuracy.",
    "parameters": "Trained parameters against final accuracy.",
}


@dataclass(frozen=True)
class Part:
    """Tables and plots of one benchmark, or of one sweep in it."""

    title: str
    tables: list[Table]
    plots: list[Path]
    rows: list[dict[str, Any]]


def write_report(runs: Sequence[FinishedRun], root: Path, out: Path) -> tuple[list[Part], Path]:
    """Write the report of runs to the folder `out`.

    Args:
        root: The folder the runs were read from; their paths below it name the parts.

    Returns:
        The parts of the report and the path of the HTML page.
    """
    parts = []
    for title, part_runs in sorted(grouped(runs, lambda run: _part_title(run, root)).items()):
        folder = out / "pictures" / title.replace("/", "-")
        parts.append(_part(title, part_runs, folder))
    page = out / "index.html"
    files = {
        "report.md": _markdown(parts, out),
        "report.tex": "\n".join(table.latex() for part in parts for table in part.tables),
        page.name: _html(parts),
    }
    for part in parts:
        files[f"{part.title.replace('/', '-')}.csv"] = tables.csv_text(part.rows)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(out / name, text.encode())
    return parts, page


def _part_title(run: FinishedRun, root: Path) -> str:
    """Return the path below `root` that contains the rows of a run's table.

    Runs are in root / title / row / trial, those of a sweep in root / title / row / value / trial.
    """
    table = run.folder.resolve().parents[1 if run.sweep is None else 2]
    root = root.resolve()
    if table != root and table.is_relative_to(root):
        return table.relative_to(root).as_posix()
    return str(run.config["name"]) if run.sweep is None else table.name


def _part(title: str, runs: Sequence[FinishedRun], folder: Path) -> Part:
    if runs[0].sweep is not None:
        table = sweep_rows(runs)
        return Part(title, tables.sweep(table), plots.sweep_plots(table, folder), table)
    table = rows(runs)
    return Part(title, tables.full(table, runs), plots.benchmark_plots(runs, folder), table)


def _markdown(parts: Sequence[Part], out: Path) -> str:
    lines = []
    for part in parts:
        lines.append(f"# {part.title}\n")
        lines += [f"## {table.title}\n\n{table.markdown()}" for table in part.tables]
        lines += [f"![{plot.stem}]({plot.relative_to(out).as_posix()})\n" for plot in part.plots]
    return "\n".join(lines)


def _html(parts: Sequence[Part]) -> str:
    style = Path(__file__).with_name("report.css").read_text("utf-8")
    links, sections = [], []
    for number, part in enumerate(parts):
        title = html.escape(part.title)
        links.append(f'<a href="#part-{number}">{title}</a>')
        html_tables = "".join(table.html() for table in part.tables)
        figures = "".join(_figure(plot) for plot in part.plots)
        sections.append(f'<h2 id="part-{number}">{title}</h2>\n{html_tables}{figures}')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>coda-prompt report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<h1>coda-prompt report</h1>\n<nav>{''.join(links)}</nav>\n"
        f"{''.join(sections)}\n{_legend(parts)}</body>\n</html>\n"
    )


def _legend(parts: Sequence[Part]) -> str:
    """List the meaning of every column that the page has, for print and touch screens."""
    heads = dict.fromkeys(head for part in parts for table in part.tables for head in table.heads)
    terms = "".join(
        f"<dt>{html.escape(head)}</dt><dd>{html.escape(tables.MEANINGS[head])}</dd>\n"
        for head in heads
        if head in tables.MEANINGS
    )
    return (
        "<h2>What the columns mean</h2>\n<p>Rows are sorted by final accuracy. In the tables of "
        "accuracy, forgetting and transfer the best value of a column is bold (except of methods "
        f"that train on all tasks).</p>\n<dl>\n{terms}</dl>\n"
    )


def _figure(plot: Path) -> str:
    """Embed an SVG as an image, so that its element ids cannot clash with those of another."""
    data = base64.b64encode(plot.with_suffix(".svg").read_bytes()).decode()
    caption = html.escape(CAPTIONS.get(plot.stem, "Final accuracy against the swept values."))
    return (
        f'<figure tabindex="0"><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )

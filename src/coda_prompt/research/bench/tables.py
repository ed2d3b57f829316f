"""Tables of a report, for the terminal and as Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.table import Table as RichTable

from coda_prompt.console import table
from coda_prompt.errors import join_names
from coda_prompt.research.bench.report import REFERENCE, FinishedRun, by_method, is_number
from coda_prompt.research.methods import METHODS, describe
from coda_prompt.storage.files import as_json

Row = Mapping[str, Any]
DASH = "-"
PAIRS = {"A": ("mean", "std"), "F": ("mean", "std"), "average": ("mean", "std"),
         "params": ("trained", "final"), "interval": ("low", "high")}  # fmt: skip
"""Column suffixes of pairs in a CSV file."""

ACCURACY = {
    "A_N": "A_N %",
    "average_incremental": "mean of A_t %",
    "learning": "when learned %",
    "own_classes": "own classes %",
    "F_paper": "F %",
    "F_max": "F max %",
}
STREAM = {
    "BWT": "BWT %",
    "FWT": "FWT %",
    "A_AUC": "A_AUC %",
    "base": "base %",
    "new": "new %",
    "harmonic": "harmonic %",
}
STREAM_FIELDS = {
    "domains_per_task": ("FWT", "BWT"),
    "domain_lists": ("FWT", "BWT"),
    "shots": ("base", "new", "harmonic"),
    "base_classes": ("base", "new", "harmonic"),
    "chunk": ("A_AUC",),
    "blur": ("A_AUC",),
    "repeat": ("A_AUC",),
    "budget": ("total_gmac",),
}
"""Measures that `coda bench` prints in addition, by the field of a stream that they belong to."""
COST = {
    "trained_parameters": "trained %",
    "final_parameters": "final %",
    "training_gmac": "G mult-adds, training",
    "inference_gmac": "G mult-adds, inference",
    "total_gmac": "G mult-adds in all",
    "learned_mib": "stored MiB",
    "seconds": "seconds",
    "memory_mib": "peak MiB",
}
INTERVAL = "A_N_interval"
HEADS = {"method": "method", "trials": "trials", INTERVAL: "A_N 95 %", **ACCURACY, **STREAM, **COST}
MEANINGS = {
    "trials": "Runs with different seeds: another order of classes, other random numbers.",
    "A_N %": "Accuracy after the last task over all classes, mean of the tasks; ± one standard "
    "deviation over the trials.",
    "A_N 95 %": "95 % confidence interval of the mean of A_N (Student's t).",
    "mean of A_t %": "Accuracy over the classes so far, mean over all tasks.",
    "when learned %": "Accuracy on each task right after it was learned, mean of the tasks.",
    "own classes %": "Accuracy in the end if only the classes of the image's own task compete.",
    "F %": "Forgetting as the CODA-Prompt paper computes it; lower is better.",
    "F max %": "Mean drop of each task from its best accuracy to the last; lower is better.",
    "trained %": "Parameters that are trained, in % of the backbone with its head.",
    "final %": "Parameters of the final model, in % of the backbone with its head.",
    "G mult-adds, training": "Billion multiply-adds to train on one image once.",
    "G mult-adds, inference": "Billion multiply-adds to classify one image.",
    "G mult-adds in all": "Billion multiply-adds of the whole training.",
    "stored MiB": "Size of everything that was learned, without the frozen backbone.",
    "BWT %": "Backward transfer: change of earlier tasks since they were learned.",
    "FWT %": "Forward transfer: accuracy on tasks before they are learned, above chance.",
    "A_AUC %": "Area under the curve of accuracy over the images seen so far.",
    "base %": "Accuracy on the classes of the first task.",
    "new %": "Accuracy on the classes of later tasks.",
    "harmonic %": "Harmonic mean of the accuracies on base and new classes.",
    "seconds": "Time of a run, with evaluation.",
    "peak MiB": "Most memory of the process during the run.",
    "paper": "The published number.",
    "queries": "Where prompt queries come from: each view (exact) or the plain image (cached).",
    f"A_N - {REFERENCE} [95 %]": f"Difference from {REFERENCE} over the same seeds, with its 95 % "
    "confidence interval: without 0 in it, the difference is not chance.",
}
"""What a column means, shown in the HTML page."""
LOWER_IS_BETTER = ("F_paper", "F_max")
SHORT = ("A_N", "F_paper", "learning", "own_classes", "trained_parameters", "seconds")
"""Measures in the table that `coda bench` prints."""
CONSTANT = {
    "trained_parameters",
    "final_parameters",
    "training_gmac",
    "inference_gmac",
    "learned_mib",
}
"""Measures that are the same in every trial."""
SETTINGS = ("epochs", "batch_size", "learning_rate", "schedule", "queries")
DIGITS = {
    "training_gmac": 3,
    "inference_gmac": 3,
    "total_gmac": 0,
    "learned_mib": 2,
    "seconds": 0,
    "memory_mib": 0,
}
LATEX = {
    **{letter: f"\\{letter}" for letter in "%_&#{}$"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; the first column names the row."""

    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    """Rows and columns of the best cells, which are bold."""

    def _marked(self, mark: Callable[[str], str]) -> list[list[str]]:
        """Return the cells, the best ones marked."""
        return [
            [mark(text) if (row, column) in self.best else text for column, text in enumerate(line)]
            for row, line in enumerate(self.cells)
        ]

    def markdown(self) -> str:
        """Format as a Markdown table."""
        cells = self._marked(lambda text: f"**{text}**")
        lines = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)], *cells]
        escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"

    def latex(self) -> str:
        """Format as a LaTeX `tabular` with rules of the booktabs package."""
        columns = "l" + "r" * (len(self.heads) - 1)
        escaped = [[_latex(text) for text in line] for line in self.cells]
        cells = Table("", (), escaped, self.best)._marked(lambda text: rf"\textbf{{{text}}}")
        lines = ["{}" + " & ".join(line) + r" \\" for line in cells]
        heads = " & ".join(_latex(head) for head in self.heads) + r" \\"
        inner = "\n".join([r"\toprule", heads, r"\midrule", *lines, r"\bottomrule"])
        title = f"% {' '.join(self.title.split())}"
        return f"{title}\n\\begin{{tabular}}{{{columns}}}\n{inner}\n\\end{{tabular}}\n"

    def html(self) -> str:
        """Format as an HTML table below its title, in a box that scrolls if it is too wide."""
        heads = "".join(_html_head(head) for head in self.heads)
        escaped = [[html.escape(text) for text in line] for line in self.cells]
        cells = Table("", (), escaped, self.best)._marked(lambda text: f"<b>{text}</b>")
        lines = "\n".join(
            "<tr>" + "".join(f"<td>{text}</td>" for text in line) + "</tr>" for line in cells
        )
        title = html.escape(self.title, quote=True)
        return (
            f'<h3>{title}</h3>\n<div class="wide" tabindex="0" role="region" aria-label="{title}">'
            f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>\n"
        )

    def without_empty_columns(self) -> Table:
        """Leave out columns that no row has a value in, and the table if it has no other."""
        columns = [
            column
            for column in range(len(self.heads))
            if any(line[column] != DASH for line in self.cells)
        ]
        cells = [[line[column] for column in columns] for line in self.cells]
        best = frozenset(
            (line, columns.index(column)) for line, column in self.best if column in columns
        )
        heads = [self.heads[column] for column in columns]
        return Table(self.title, heads, cells if len(columns) > 1 else [], best)

    def rich(self) -> RichTable:
        """Format for the terminal."""
        return table(self.heads, self.cells, self.title)


def _html_head(head: str) -> str:
    """Return the head of a column; where it needs one, with an explanation to hover over."""
    text = html.escape(head)
    if head not in MEANINGS:
        return f"<th>{text}</th>"
    meaning = html.escape(MEANINGS[head], quote=True)
    return f'<th><abbr tabindex="0" title="{meaning}">{text}</abbr></th>'


def short(
    rows: Sequence[Row], title: str, stream: Mapping[str, Any] = MappingProxyType({})
) -> Table:
    """Build the table that `coda bench` prints; a stream's fields add measures to it."""
    added = dict.fromkeys(name for field in stream for name in STREAM_FIELDS.get(field, ()))
    heads = ["method", *SHORT, *added]
    return _measures(title, best_first(rows), heads, f"A_N - {REFERENCE}")


def full(rows: Sequence[Row], runs: Sequence[FinishedRun]) -> list[Table]:
    """Build all tables of a benchmark's report."""
    rows = best_first(rows)
    order = [row["method"] for row in rows]
    runs = sorted(runs, key=lambda run: order.index(run.method))
    intervals = [INTERVAL] if any("interval" in row["A_N"] for row in rows) else []
    accuracy = ["method", "trials", *ACCURACY]
    accuracy[3:3] = intervals
    tables = [
        _measures("Accuracy and forgetting", rows, accuracy, f"A_N - {REFERENCE} [95 %]"),
        _measures("Transfer, anytime accuracy, base and new classes", rows, ["method", *STREAM]),
        _accuracy_by_domain(runs),
        _measures("Cost per run and per image", rows, ["method", *COST]),
    ]
    if any(row["published"] for row in rows):
        tables.append(_comparison_with_paper(rows))
    tables += [_settings(runs), _remarks(runs)]
    shown = [table.without_empty_columns() for table in tables]
    return [table for table in shown if table.cells]


def _accuracy_by_domain(runs: Sequence[FinishedRun]) -> Table:
    """Build the final accuracy on the test images of each domain, mean of the trials."""
    names = list(dict.fromkeys(name for run in runs for name in run.result.get("domains", ())))
    lines: dict[str, list[float | None]] = {}
    for method, trials in by_method(runs).items():
        values = [
            [run.result["domains"][name] for run in trials if name in run.result.get("domains", ())]
            for name in names
        ]
        lines[method] = [100 * sum(v) / len(v) if v else None for v in values]
    cells = [
        [method, *(DASH if value is None else f"{value:.1f}" for value in line)]
        for method, line in lines.items()
    ]
    best = frozenset(
        (row, 1 + column)
        for column in range(len(names))
        for row in _best_rows([(method, line[column]) for method, line in lines.items()])
    )
    heads = ["method", *names]
    return Table("Final accuracy by domain, %", heads, cells if names else [], best)


def _remarks(runs: Sequence[FinishedRun]) -> Table:
    """List notes on the data and classes without training images, with the runs they apply to."""
    runs_by_remark: dict[str, list[str]] = {}
    for run in runs:
        untrained = run.result["untrained"]
        missing = [f"no training images: {', '.join(untrained)}"] if untrained else []
        for remark in [*run.result["notes"], *missing]:
            runs_by_remark.setdefault(str(remark), []).append(f"{run.method} {run.seed}")
    cells = [
        [remark, "all runs" if len(names) == len(runs) else join_names(names, 6)]
        for remark, names in runs_by_remark.items()
    ]
    return Table("Remarks", ["remark", "runs (method, seed)"], cells)


def sweep(rows: Sequence[Row]) -> list[Table]:
    """Build a table for each axis of a sweep: methods by values, with the best value of each."""
    tables = []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        axis_rows = [row for row in rows if row["axis"] == axis]
        values = list(dict.fromkeys(json.dumps(row["value"]) for row in axis_rows))
        if all(is_number(json.loads(value)) for value in values):
            values.sort(key=lambda value: float(json.loads(value)))
        lines = []
        for method, field in dict.fromkeys((row["method"], row["field"]) for row in axis_rows):
            line = {
                json.dumps(row["value"]): row
                for row in axis_rows
                if (row["method"], row["field"]) == (method, field)
            }
            best = max(line, key=lambda value: line[value]["A_N"]["mean"] or 0.0)
            cells = [cell(line[value], "A_N") if value in line else DASH for value in values]
            lines.append([method, field, *cells, best if len(line) > 1 else DASH])
        heads = ["method", "field", *(value.strip('"') for value in values), "best"]
        tables.append(Table(f"A_N % by {axis}", heads, lines))
    return tables


def _measures(title: str, rows: Sequence[Row], names: list[str], difference: str = "") -> Table:
    """Build a table of measures; `difference` is the head of a last column that compares A_N."""
    heads = [HEADS[name] for name in names]
    cells = [[cell(row, name) for name in names] for row in rows]
    best = frozenset(
        (line, column)
        for column, name in enumerate(names)
        if name in ACCURACY or name in STREAM
        for line in _best_rows(
            [(row["method"], row[name]["mean"]) for row in rows], name in LOWER_IS_BETTER
        )
    )
    if difference:
        heads.append(difference)
        cells = [[*line, difference_cell(row)] for line, row in zip(cells, rows, strict=True)]
    return Table(title, heads, cells, best)


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by final accuracy; those without one are last."""
    return sorted(rows, key=lambda row: row["A_N"]["mean"] or 0.0, reverse=True)


def _best_rows(
    column: Sequence[tuple[str, float | None]], lower_is_better: bool = False
) -> list[int]:
    """Return the rows with the best percentage, as shown; none if there is one row only.

    Methods that train on all tasks at once do not take part.

    Args:
        column: Method and percentage of each row.
        lower_is_better: Whether the lowest percentage is the best.
    """
    shown = {
        number: round(value, 1)
        for number, (method, value) in enumerate(column)
        if value is not None and not _trains_on_all(method)
    }
    if len(shown) < 2:
        return []
    best = (min if lower_is_better else max)(shown.values())
    return [number for number, value in shown.items() if value == best]


def _trains_on_all(method: str) -> bool:
    entry = METHODS.get(method)
    return entry is not None and entry.type.trains_on == "all"


def _comparison_with_paper(rows: Sequence[Row]) -> Table:
    heads = [
        "method", "A_N %", "paper", "A_N - paper", "F %", "paper", "F - paper",
        "trained / final %", "paper",
    ]  # fmt: skip
    lines = []
    for row in rows:
        published = row["published"] or {}
        line = [row["method"]]
        for measured, key in (("A_N", "A"), ("F_paper", "F")):
            paper_mean, paper_std = published.get(key, (None, None))
            mean = row[measured]["mean"]
            line.append(cell(row, measured))
            line.append(DASH if paper_mean is None else _with_deviation(paper_mean, paper_std, 2))
            if paper_mean is not None and "backbone" in published:
                line[-1] += f" ({published['backbone']})"
            line.append(DASH if None in (paper_mean, mean) else f"{mean - paper_mean:+.1f}")
        shares = [row[name]["mean"] for name in ("trained_parameters", "final_parameters")]
        line.append(" / ".join(f"{share:.1f}" for share in shares))
        line.append(" / ".join(str(share) for share in published.get("params", ())) or DASH)
        lines.append(line)
    return Table("Comparison with the paper", heads, lines)


def _settings(runs: Sequence[FinishedRun]) -> Table:
    """List the training settings of each method, and options that differ from its defaults.

    Closed-form methods are not trained: the training settings do not apply to them. Queries are
    of prompt methods only.
    """
    lines = []
    for method, trials in by_method(runs).items():
        config = trials[0].config
        training = config["training"]
        entry = METHODS.get(config["implementation"])  # a report does not load methods from files
        rate = training["learning_rate"] or (entry and entry.type.learning_rate)
        settings = {**training, "learning_rate": f"{rate:g}" if rate else "the method's"}
        if entry is not None and entry.type.closed_form:
            settings = dict.fromkeys(SETTINGS, DASH)
        elif entry is not None and not entry.type.needs_queries:
            settings["queries"] = DASH
        changed = _changed_options(config)
        options = ", ".join(f"{name}={value}" for name, value in changed.items()) or DASH
        lines.append([method, *(str(settings[name]) for name in SETTINGS), options])
    heads = ["method", "epochs", "batch", "learning rate", "schedule", "queries", "other options"]
    return Table("Settings", heads, lines)


def _changed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["implementation"] not in METHODS:
        return dict(config["options"])  # a report does not load methods from files
    known = describe(config["implementation"])["options"]
    defaults = {option["name"]: as_json(option["default"]) for option in known}
    return {name: value for name, value in config["options"].items() if value != defaults.get(name)}


def cell(row: Row, name: str) -> str:
    """Format a measure as `mean ± std`, or a dash if it was not measured; other fields as text."""
    if name == INTERVAL:
        interval = row["A_N"].get("interval")
        return f"{interval[0]:.1f} to {interval[1]:.1f}" if interval else DASH
    if not isinstance(row[name], Mapping):
        return str(row[name])
    mean, std = row[name]["mean"], row[name]["std"]
    if mean is None:
        return DASH
    varies = row["trials"] > 1 and name not in CONSTANT
    return _with_deviation(mean, std if varies else None, DIGITS.get(name, 1))


def difference_cell(row: Row) -> str:
    """Format the difference from the reference with its confidence interval."""
    difference = row["difference"]
    if difference is None:
        return DASH
    interval = difference["interval"]
    suffix = f" [{interval[0]:+.1f}, {interval[1]:+.1f}]" if interval else ""
    return f"{difference['mean']:+.1f}{suffix}"


def csv_text(rows: Iterable[Row]) -> str:
    """Format rows as CSV with unrounded numbers in columns `A_N.mean`, `A_N.std`, …"""
    flat = [{**dict(_flatten(row)), **_minus_published(row)} for row in rows]
    names = list(dict.fromkeys(name for line in flat for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flatten(row: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            parts = PAIRS.get(name, range(len(value)))
            for part, number in zip(parts, value, strict=False):
                yield f"{prefix}{name}.{part}", number
        elif value is not None or prefix:
            yield f"{prefix}{name}", value


def _minus_published(row: Row) -> dict[str, float]:
    published = row.get("published") or {}
    return {
        f"{measured}.minus_published": row[measured]["mean"] - published[key][0]
        for measured, key in (("A_N", "A"), ("F_paper", "F"))
        if key in published and published[key][0] is not None and row[measured]["mean"] is not None
    }


def _with_deviation(mean: float, std: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def _latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)

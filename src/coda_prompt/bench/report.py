"""Tables from run folders, and from nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coda_prompt import metrics
from coda_prompt.bench.runner import CONFIG, RESULT
from coda_prompt.errors import CorruptFile, MissingData

REFERENCE = "coda-p"
"""The method that others are compared with, seed by seed."""


@dataclass(frozen=True)
class FinishedRun:
    """What a run folder says."""

    method: str
    seed: int
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def matrix(self) -> metrics.Matrix:
        return _matrix(self.result["matrix"])

    @property
    def own_classes(self) -> metrics.Matrix:
        return _matrix(self.result["own_classes"])

    def measures(self) -> dict[str, float]:
        """All metrics of SPEC 6, accuracies in %."""
        matrix, parameters = self.matrix, self.result["parameters"]
        trained = parameters["body"] + parameters["head"]
        percent = {
            "A_N": metrics.average_accuracy(matrix),
            "weighted": metrics.weighted_accuracy(matrix, self.result["test_images"]),
            "average_incremental": metrics.average_incremental_accuracy(matrix),
            "learning": metrics.learning_accuracy(matrix),
            "F_paper": metrics.forgetting_paper(matrix),
            "F_max": metrics.forgetting_max(matrix),
            "own_classes": metrics.average_accuracy(self.own_classes),
            "trained_parameters": trained / (parameters["backbone"] + parameters["head"]),
        }
        measured = {name: 100 * value for name, value in percent.items()}
        return {**measured, "seconds": self.result["seconds"]}


def read_run(folder: Path) -> FinishedRun:
    config, result = _read(folder / CONFIG), _read(folder / RESULT)
    try:
        return FinishedRun(config["method"], config["training"]["seed"], config, result)
    except (KeyError, TypeError) as error:
        raise CorruptFile(folder, f"is not a run folder ({error})") from error


def read_runs(folder: Path) -> list[FinishedRun]:
    """All finished runs below a folder."""
    found = [read_run(path.parent) for path in sorted(folder.rglob(RESULT))]
    if not found:
        raise MissingData(folder, "holds no finished run", "Point at the folder of a 'coda bench'.")
    return found


def by_method(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """The trials of each method, in the order of the runs."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


def rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """One row a method, in the order of the runs: mean and deviation of every measure."""
    groups = by_method(runs)
    reference = {run.seed: run.measures()["A_N"] for run in groups.get(REFERENCE, [])}
    table = []
    for method, own in groups.items():
        measured = [run.measures() for run in own]
        row: dict[str, Any] = {"method": method, "trials": len(own)}
        for name in measured[0]:
            summary = metrics.summarise([each[name] for each in measured])
            row[name] = {"mean": _number(summary.mean), "std": _number(summary.std)}
        row["difference"] = _difference(own, measured, reference) if method != REFERENCE else None
        table.append(row)
    return table


def _difference(
    own: Sequence[FinishedRun], measured: Sequence[dict[str, float]], reference: dict[int, float]
) -> dict[str, Any] | None:
    """A_N minus the reference's over the seeds both have."""
    values = {run.seed: each["A_N"] for run, each in zip(own, measured, strict=True)}
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    found = metrics.paired_difference(
        [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
    )
    return {"mean": found.mean, "interval": found.interval}


def cell(row: dict[str, Any], name: str, digits: int = 1) -> str:
    """`mean ± std`, or a dash where it was not measured."""
    mean, std = row[name]["mean"], row[name]["std"]
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if row["trials"] > 1 else "")


def difference_cell(row: dict[str, Any]) -> str:
    found = row["difference"]
    if found is None:
        return "-"
    interval = found["interval"]
    reach = f" [{interval[0]:+.1f}, {interval[1]:+.1f}]" if interval else ""
    return f"{found['mean']:+.1f}{reach}"


COLUMNS = {
    "A_N": "A_N %",
    "F_paper": "F %",
    "learning": "when learned %",
    "own_classes": "own classes %",
    "trained_parameters": "trained %",
    "seconds": "seconds",
}


def table_cells(table: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table a person reads."""
    heads = ["method", *COLUMNS.values(), f"A_N - {REFERENCE}"]
    cells = [
        [row["method"], *(cell(row, name) for name in COLUMNS), difference_cell(row)]
        for row in table
    ]
    return heads, cells


def markdown(table: Sequence[dict[str, Any]]) -> str:
    heads, cells = table_cells(table)
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise MissingData(path, "cannot be read", "Run the benchmark again.") from error
    except ValueError as error:
        raise CorruptFile(path, "is not JSON") from error
    if not isinstance(content, dict):
        raise CorruptFile(path, "is not a JSON object")
    return content


def _matrix(rows: Sequence[Sequence[float | None]]) -> metrics.Matrix:
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value

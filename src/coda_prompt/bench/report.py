"""Numbers from run folders, and from nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from coda_prompt import metrics
from coda_prompt.bench.config import load_benchmark
from coda_prompt.bench.environment import hashes
from coda_prompt.bench.runner import (
    CONFIG,
    ENVIRONMENT,
    RESULT,
    difference,
    read_json,
    shared_config,
)
from coda_prompt.errors import CorruptRun, MissingData, RunConfigChanged
from coda_prompt.methods import METHODS

REFERENCE = "coda-p"
"""The method that others are compared with, seed by seed."""
GIGA, MEBI = 1e9, 2**20
DECIDING = ("source", "backbone", "preprocess", "resize", "augmentation", "stream")
"""What makes a run one of the paper's, besides its epochs."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class FinishedRun:
    """What a run folder says."""

    method: str
    """The row of the table."""
    seed: int
    config: dict[str, Any]
    result: dict[str, Any]
    inputs: dict[str, str]
    """Hashes of its data and backbone."""
    folder: Path

    @property
    def sweep(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.config["sweep"]
        return found

    @property
    def matrix(self) -> metrics.Matrix:
        return _matrix(self.result["matrix"])

    @property
    def own_classes(self) -> metrics.Matrix:
        return _matrix(self.result["own_classes"])

    def measures(self) -> dict[str, float]:
        """All metrics of SPEC 6, accuracies in %, and what the run cost."""
        matrix, parameters = self.matrix, self.result["parameters"]
        trained = parameters["body"] + parameters["head"]
        trained /= parameters["backbone"] + parameters["head"]
        percent = {
            "A_N": metrics.average_accuracy(matrix),
            "weighted": metrics.weighted_accuracy(matrix, self.result["test_images"]),
            "average_incremental": metrics.average_incremental_accuracy(matrix),
            "learning": metrics.learning_accuracy(matrix),
            "own_classes": metrics.average_accuracy(self.own_classes),
            "F_paper": metrics.forgetting_paper(matrix),
            "F_max": metrics.forgetting_max(matrix),
            "trained_parameters": trained,
            "final_parameters": trained + bool(parameters["frozen"]),
        }
        counted = self.result["multiply_adds"] or {"training": math.nan, "inference": math.nan}
        return {
            **{name: 100 * value for name, value in percent.items()},
            "training_gmac": counted["training"] / GIGA,
            "inference_gmac": counted["inference"] / GIGA,
            "seconds": self.result["seconds"],
            "memory_mib": self.result["peak_memory_bytes"] / MEBI,
        }


def read_run(folder: Path) -> FinishedRun:
    config, result = read_json(folder / CONFIG), read_json(folder / RESULT)
    surroundings = read_json(folder / ENVIRONMENT)
    try:
        inputs = hashes(surroundings)
        method, seed = config["method"], config["training"]["seed"]
        run = FinishedRun(method, seed, config, result, inputs, folder)
        _check_matrices(run)
        if not all(isinstance(value, float | int) for value in run.measures().values()):
            raise TypeError("a measure that is no number")
        config["options"]
        for name in ("name", "method", "implementation"):
            if not isinstance(config[name], str):
                raise TypeError(f"a {name} that is no text")
        if not isinstance(seed, int):
            raise TypeError("a seed that is no number")
        if run.sweep is not None:
            run.sweep["sweep"], run.sweep["axis"], run.sweep["field"], run.sweep["value"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptRun(folder, f"is not a run folder ({error!r})") from error
    return run


def _check_matrices(run: FinishedRun) -> None:
    """Accuracies of as many tasks as the run has, none above 1."""
    tasks = len(run.result["test_images"])
    for matrix in (run.matrix, run.own_classes):
        if matrix.shape != (tasks, tasks):
            raise ValueError(f"a matrix of {matrix.shape} for {tasks} tasks")
        known = matrix[~np.isnan(matrix)]
        if len(known) and not (known.min() >= 0 and known.max() <= 1):
            raise ValueError("an accuracy that is none")


def read_runs(folder: Path) -> list[FinishedRun]:
    """All finished runs below a folder, those of a row together, known methods first."""
    if not folder.is_dir():
        raise MissingData(folder, "there is no such folder", "Point at that of a 'coda bench'.")
    found = [read_run(path.parent) for path in sorted(folder.rglob(RESULT))]
    if not found:
        raise MissingData(folder, "holds no finished run", "Point at the folder of a 'coda bench'.")
    known = {name: number for number, name in enumerate(METHODS)}
    return sorted(found, key=lambda run: (known.get(run.method, len(known)), run.method, run.seed))


def grouped(
    runs: Sequence[FinishedRun], key: Callable[[FinishedRun], Key]
) -> dict[Key, list[FinishedRun]]:
    """Runs with the same key together, in the order of their first."""
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def by_method(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """The trials of each row."""
    return grouped(runs, lambda run: run.method)


def check_comparable(runs: Sequence[FinishedRun]) -> None:
    """Refuse to put runs of different benchmarks, or trials of different settings, in a table."""
    for run in runs[1:]:
        changed = difference(shared_config(runs[0].config), shared_config(run.config))
        changed += difference(runs[0].inputs, run.inputs)
        if changed:
            raise RunConfigChanged(run.folder, changed)
        if len(run.matrix) != len(runs[0].matrix):
            changed = [f"tasks: {len(runs[0].matrix)} -> {len(run.matrix)}"]
            raise RunConfigChanged(run.folder, changed)
    for own in by_method(runs).values():
        seeds = [run.seed for run in own]
        for run in own:
            if seeds.count(run.seed) > 1:
                raise RunConfigChanged(run.folder, [f"seed {run.seed} is there twice"])
        first, *others = [_without_seed(run.config) for run in own]
        for run, config in zip(own[1:], others, strict=True):
            if changed := difference(first, config):
                raise RunConfigChanged(run.folder, changed)


def _without_seed(config: dict[str, Any]) -> dict[str, Any]:
    training = {key: value for key, value in config["training"].items() if key != "seed"}
    return {**config, "training": training}


def rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """One row a method, in the order of the runs: mean and deviation of every measure."""
    check_comparable(runs)
    groups = by_method(runs)
    reference = {run.seed: run.measures()["A_N"] for run in groups.get(REFERENCE, [])}
    table = []
    for method, own in groups.items():
        row = {"method": method, **summary(own), "difference": None}
        if method != REFERENCE:
            row["difference"] = _difference(own, reference)
        row["published"] = published_row(own[0].config)
        table.append(row)
    return table


def summary(trials: Sequence[FinishedRun]) -> dict[str, Any]:
    """Mean and deviation of every measure over trials."""
    measured = [run.measures() for run in trials]
    summed: dict[str, Any] = {"trials": len(trials)}
    for name in measured[0]:
        found = metrics.summarise([each[name] for each in measured])
        summed[name] = {"mean": _number(found.mean), "std": _number(found.std)}
    return summed


def sweep_rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """One row for each method, field and value of a sweep, in that order."""

    def line(run: FinishedRun) -> tuple[str, str, str]:
        point = run.sweep or {}
        return run.method, point["axis"], point["field"]

    def value(run: FinishedRun) -> str:
        return json.dumps((run.sweep or {})["value"])

    table = []
    for (method, axis, field), own in grouped(runs, line).items():
        points = [(json.loads(text), held) for text, held in grouped(own, value).items()]
        if all(is_number(place) for place, _ in points):
            points.sort(key=lambda point: float(point[0]))
        table += [
            {"method": method, "axis": axis, "field": field, "value": place, **summary(trials)}
            for place, trials in points
        ]
    return table


@cache
def published(benchmark: str) -> dict[str, Any]:
    """The paper's numbers: A and F as [mean, std], params as [trained, final] in %."""
    text = Path(__file__).with_name("published.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text).get(benchmark, {})
    return found


def published_row(config: dict[str, Any]) -> dict[str, Any] | None:
    """The paper's numbers of a run's row, where it is the paper's benchmark and not one like it."""
    found: dict[str, Any] | None = published(config["name"]).get(config["method"])
    if found is None:
        return None
    meant = load_benchmark(config["name"])
    asked = meant.model_dump(mode="json", include=set(DECIDING))
    held = {name: config.get(name) for name in asked}
    epochs = meant.method_training(config["method"], 0).epochs
    same = held == asked and config["training"].get("epochs") == epochs
    return found if same else None


def _difference(own: Sequence[FinishedRun], reference: dict[int, float]) -> dict[str, Any] | None:
    """A_N minus the reference's over the seeds both have."""
    values = {run.seed: run.measures()["A_N"] for run in own}
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    found = metrics.paired_difference(
        [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
    )
    return {"mean": found.mean, "interval": found.interval}


def _matrix(rows: Sequence[Sequence[float | None]]) -> metrics.Matrix:
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Read run folders and compute every number of a report from them."""

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

from coda_prompt.errors import CorruptRun, MissingData, RunConfigChanged
from coda_prompt.research.bench import metrics
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.bench.environment import input_hashes
from coda_prompt.research.bench.runs import (
    CONFIG,
    ENVIRONMENT,
    RESULT,
    difference,
    read_json,
    shared_config,
)
from coda_prompt.research.methods import METHODS

REFERENCE = "coda-p"
"""The method that others are compared with, trial by trial."""
GIGA, MEBI = 1e9, 2**20
PAPER_FIELDS = ("source", "backbone", "preprocess", "resize", "augmentation", "stream")
"""Fields, besides the epochs, in which a run must equal a preset to be compared with the paper."""
DOMAIN_RULES = {"domains_per_task", "domain_lists"}
"""Fields of a stream whose tasks differ in their domains."""
REMEDY = "Give the folder that 'coda bench' wrote to (--out, by default runs)."
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class FinishedRun:
    """Content of a finished run folder."""

    method: str
    """Row of the table."""
    seed: int
    config: dict[str, Any]
    result: dict[str, Any]
    inputs: dict[str, str]
    """Hashes of data and backbone."""
    folder: Path

    @property
    def sweep(self) -> dict[str, Any] | None:
        """Return the swept field and its value, or None if the run is not part of a sweep."""
        return self.config["sweep"]

    @property
    def matrix(self) -> metrics.Matrix:
        """Accuracy on group j after task t over all classes seen by then; NaN if not measured.

        Tasks in chunks have one row: that after their last chunk.
        """
        return _matrix(self.result["matrix"])[self._rows]

    @property
    def own_classes(self) -> metrics.Matrix:
        """The same among the classes of group j only."""
        return _matrix(self.result["own_classes"])[self._rows]

    @property
    def learned(self) -> list[int]:
        """The row of `matrix` after which each group is learned."""
        rows = self._rows
        return [rows.index(group["last"]) for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Name, first and last task of each group of test images."""
        groups: list[dict[str, Any]] = self.result["groups"]
        return groups

    @property
    def _rows(self) -> list[int]:
        tasks = range(len(self.result["matrix"]))
        if all(group["first"] == group["last"] for group in self.groups):
            return list(tasks)
        return sorted({tasks[-1], *(group["last"] for group in self.groups)})

    @property
    def tested(self) -> list[int]:
        """Groups that count: with domains, a task may have no test image."""
        counts = self.result["test_images"]
        by_domain = DOMAIN_RULES & self.config["stream"].keys()
        return [j for j, count in enumerate(counts) if count or not by_domain]

    def accuracy_curve(self) -> metrics.Matrix:
        """Mean accuracy over the groups learned so far, after each row of `matrix`."""
        learned = [self.learned[j] for j in self.tested]
        return metrics.accuracy_after_each_task(self.matrix[:, self.tested], learned)

    def anytime_curve(self) -> tuple[metrics.Matrix, metrics.Matrix]:
        """Images learned from, and accuracy on all classes seen then, after each measured task."""
        accuracies = np.array(self.result["anytime"], float)
        images = np.cumsum(self.result["train_images"])
        measured = ~np.isnan(accuracies)
        return images[measured], accuracies[measured]

    def measures(self) -> dict[str, float]:
        """Compute all metrics (accuracy and forgetting in %) and costs of the run."""
        matrix, learned = self.matrix[:, self.tested], [self.learned[j] for j in self.tested]
        parameters = self.result["parameters"]
        counts = [self.result["test_images"][j] for j in self.tested]
        trained = (parameters["body"] + parameters["head"]) / (
            parameters["backbone"] + parameters["head"]
        )
        images, anytime = self.anytime_curve()
        classes = len(self.result["class_names"])
        base, new = (
            _weighted(matrix[-1], counts, [(row == 0) == first for row in learned])
            for first in (True, False)
        )
        shares = {
            "A_N": metrics.average_accuracy(matrix, learned),
            "weighted": metrics.weighted_accuracy(matrix, counts, learned),
            "average_incremental": metrics.average_incremental_accuracy(matrix, learned),
            "learning": metrics.learning_accuracy(matrix, learned),
            "own_classes": metrics.average_accuracy(self.own_classes[:, self.tested], learned),
            "F_paper": metrics.forgetting_paper(matrix, learned),
            "F_max": metrics.forgetting_max(matrix, learned),
            "BWT": metrics.backward_transfer(matrix, learned),
            "FWT": metrics.forward_transfer(matrix, classes, learned),
            "A_AUC": metrics.area_under_curve(anytime, images),
            "base": base,
            "new": new,
            "harmonic": metrics.harmonic_mean(base, new),
            "trained_parameters": trained,
            "final_parameters": trained + bool(parameters["frozen"]),
        }
        operations = self.result["multiply_adds"] or {"training": math.nan, "inference": math.nan}
        return {
            **{name: 100 * value for name, value in shares.items()},
            "training_gmac": operations["training"] / GIGA,
            "inference_gmac": operations["inference"] / GIGA,
            "total_gmac": self._training_cost(operations["training"]) / GIGA,
            "learned_mib": self.result["learned_bytes"] / MEBI,
            "seconds": self.result["seconds"],
            "memory_mib": self.result["peak_memory_bytes"] / MEBI,
        }

    def _training_cost(self, per_image: float) -> float:
        """Estimate the multiply-adds of the whole training."""
        entry, training = METHODS.get(self.config["implementation"]), self.config["training"]
        counts = self.result["train_images"]
        if entry and entry.type.closed_form:
            return per_image * sum(counts)
        budget = self.config["stream"].get("budget", math.inf) * training["batch_size"]
        return per_image * sum(min(training["epochs"] * count, budget) for count in counts)


def read_run(folder: Path) -> FinishedRun:
    """Read and check a run folder; raise `CorruptRun` if it is incomplete or inconsistent."""
    config, result = read_json(folder / CONFIG), read_json(folder / RESULT)
    environment = read_json(folder / ENVIRONMENT)
    try:
        inputs = input_hashes(environment)
        method, seed = config["method"], config["training"]["seed"]
        run = FinishedRun(method, seed, config, result, inputs, folder)
        _check_matrices(run)
        if not all(isinstance(value, float | int) for value in run.measures().values()):
            raise TypeError("a measure is not a number")
        config["options"]
        for name in ("name", "method", "implementation"):
            if not isinstance(config[name], str):
                raise TypeError(f"{name} is not text")
        if not isinstance(seed, int):
            raise TypeError("the seed is not an integer")
        if run.sweep is not None:
            run.sweep["sweep"], run.sweep["axis"], run.sweep["field"], run.sweep["value"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptRun(folder, f"is not a run folder ({error!r})") from error
    return run


def _check_matrices(run: FinishedRun) -> None:
    """Check that matrices have the run's number of groups and contain accuracies."""
    tasks, groups = len(run.result["train_images"]), len(run.result["test_images"])
    for name in ("matrix", "own_classes"):
        matrix = _matrix(run.result[name])
        if matrix.shape != (tasks, groups):
            raise ValueError(f"a matrix has shape {matrix.shape}, but there are {tasks} tasks")
        measured = matrix[~np.isnan(matrix)]
        if len(measured) and not (measured.min() >= 0 and measured.max() <= 1):
            raise ValueError("an accuracy is not between 0 and 1")


def read_runs(folder: Path) -> list[FinishedRun]:
    """Read all finished runs below a folder, ordered by method and seed."""
    if not folder.is_dir():
        raise MissingData(folder, "there is no such folder", REMEDY)
    runs = [read_run(path.parent) for path in sorted(folder.rglob(RESULT))]
    if not runs:
        raise MissingData(folder, "contains no finished run", REMEDY)
    order = {name: number for number, name in enumerate(METHODS)}
    return sorted(runs, key=lambda run: (order.get(run.method, len(order)), run.method, run.seed))


def grouped(
    runs: Sequence[FinishedRun], key: Callable[[FinishedRun], Key]
) -> dict[Key, list[FinishedRun]]:
    """Group runs by a key, in order of first appearance."""
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def by_method(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Group runs by row of the table."""
    return grouped(runs, lambda run: run.method)


def check_comparable(runs: Sequence[FinishedRun]) -> None:
    """Raise `RunConfigChanged` unless the runs can share a table.

    They must have the same benchmark, inputs and tasks; trials of a row differ in their seed only.
    """
    first = runs[0]
    for run in runs[1:]:
        changed = differences(first, run.config, run.inputs)
        if not changed and len(run.matrix) != len(first.matrix):
            changed = [f"tasks: {len(first.matrix)} -> {len(run.matrix)}"]
        if changed:
            raise RunConfigChanged(run.folder, changed)
    for trials in by_method(runs).values():
        seeds = [run.seed for run in trials]
        for run in trials:
            if seeds.count(run.seed) > 1:
                raise RunConfigChanged(run.folder, [f"seed {run.seed} appears twice"])
        for run in trials[1:]:
            if changed := difference(_without_seed(trials[0].config), _without_seed(run.config)):
                raise RunConfigChanged(run.folder, changed)


def differences(run: FinishedRun, config: dict[str, Any], inputs: dict[str, str]) -> list[str]:
    """List where another run of the same table differs in its benchmark, data or backbone."""
    changed = difference(shared_config(run.config), shared_config(config))
    theirs, ours = (
        {f"{name} sha256": value for name, value in each.items()} for each in (run.inputs, inputs)
    )
    return changed + difference(theirs, ours)


def _without_seed(config: dict[str, Any]) -> dict[str, Any]:
    training = {key: value for key, value in config["training"].items() if key != "seed"}
    return {**config, "training": training}


def rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Compute the rows of a table: mean and deviation of every measure of each method."""
    check_comparable(runs)
    groups = by_method(runs)
    reference = {run.seed: run.measures()["A_N"] for run in groups.get(REFERENCE, [])}
    return [
        {
            "method": method,
            **summary(trials),
            "difference": _difference(trials, reference) if method != REFERENCE else None,
            "published": published_row(trials[0].config),
        }
        for method, trials in groups.items()
    ]


def summary(trials: Sequence[FinishedRun]) -> dict[str, Any]:
    """Compute mean and standard deviation of every measure over trials."""
    measured = [run.measures() for run in trials]
    row: dict[str, Any] = {"trials": len(trials)}
    for name in measured[0]:
        values = metrics.summarise([measures[name] for measures in measured])
        row[name] = {"mean": _number(values.mean), "std": _number(values.std)}
    finals = [measures["A_N"] for measures in measured]
    interval = metrics.paired_difference(finals, [0.0] * len(finals)).interval
    if interval is not None and not math.isnan(interval[0]):
        row["A_N"]["interval"] = interval
    return row


def sweep_rows(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Compute the rows of a sweep: one for each method, field and value, in that order."""

    def line(run: FinishedRun) -> tuple[str, str, str]:
        point = run.sweep or {}
        return run.method, point["axis"], point["field"]

    def value(run: FinishedRun) -> str:
        return json.dumps((run.sweep or {})["value"])

    table = []
    for (method, axis, field), line_runs in grouped(runs, line).items():
        points = [(json.loads(text), trials) for text, trials in grouped(line_runs, value).items()]
        if all(is_number(point) for point, _ in points):
            points.sort(key=lambda point: float(point[0]))
        table += [
            {"method": method, "axis": axis, "field": field, "value": point, **summary(trials)}
            for point, trials in points
        ]
    return table


@cache
def published(benchmark: str) -> dict[str, Any]:
    """Read published numbers: A, F and average as [mean, std], params as [trained, final], in %.

    A row may have a `source` other than the CODA-Prompt paper and a `backbone` of its own.
    """
    text = Path(__file__).with_name("published.yaml").read_text("utf-8")
    return yaml.safe_load(text).get(benchmark, {})


def published_row(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the published numbers of a run's row, if the run follows that benchmark."""
    row: dict[str, Any] | None = published(config["name"]).get(config["method"])
    if row is None:
        return None
    preset = load_benchmark(config["name"])
    expected = preset.model_dump(mode="json", include=set(PAPER_FIELDS))
    same_fields = {name: config.get(name) for name in expected} == expected
    epochs = preset.method_training(config["method"], 0).epochs
    return row if same_fields and config["training"].get("epochs") == epochs else None


def _difference(
    trials: Sequence[FinishedRun], reference: dict[int, float]
) -> dict[str, Any] | None:
    """Compute A_N minus the reference's A_N over the seeds that both have."""
    values = {run.seed: run.measures()["A_N"] for run in trials}
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    result = metrics.paired_difference(
        [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
    )
    return {"mean": result.mean, "interval": result.interval}


def _matrix(rows: Sequence[Sequence[float | None]]) -> metrics.Matrix:
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


def _weighted(accuracies: metrics.Matrix, images: Sequence[int], chosen: Sequence[bool]) -> float:
    """Return the accuracy over the images of the chosen groups; NaN without any."""
    weights = np.array(images, float) * np.array(chosen)
    if not weights.sum():
        return math.nan
    return float(np.average(accuracies[weights > 0], weights=weights[weights > 0]))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

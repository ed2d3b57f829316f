"""What a run is: one method in one trial of a benchmark, with its configuration and folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_prompt.errors import CorruptRun, RunConfigChanged
from coda_prompt.research.bench.config import Benchmark
from coda_prompt.research.streams.pocket import STRENGTH
from coda_prompt.storage.files import as_json, write_atomically

CONFIG, ENVIRONMENT, RESULT = "config.json", "environment.json", "result.json"
CHECKPOINTS = "checkpoints"
EXCLUDED_FIELDS = {
    "methods", "training", "trials", "first_seed", "demo", "data", "lists", "classes", "protocol",
    "one_stage", "fast", "minutes",
}  # fmt: skip
"""Benchmark fields a run's configuration leaves out: it contains what they resolve to, or they do
not affect its numbers."""
ROW_FIELDS = {
    "method",
    "method_file",
    "implementation",
    "options",
    "training",
    "sweep",
    "description",
}
"""Configuration fields in which the rows of one table may differ."""


@dataclass(frozen=True)
class Point:
    """The value of the swept field in one run of a sweep."""

    sweep: str
    """Name of the sweep."""
    axis: str
    """Axis label in the plot."""
    field: str
    value: Any


@dataclass(frozen=True)
class Run:
    """One method in one trial."""

    benchmark: Benchmark
    method: str
    """Row of the table: a name in the benchmark's `methods`, or `file.py:Class`."""
    seed: int
    folder: Path
    point: Point | None = None
    """Set for runs of a sweep."""
    tensorboard: bool = False
    """Also write losses and accuracies as TensorBoard files."""
    save_learned: bool = False
    """Save the learned state in the run folder."""
    device: str = "auto"
    """Accelerator to use if the run gets no Fabric: auto, cpu, cuda or mps."""

    @property
    def config(self) -> dict[str, Any]:
        """Everything that determines the run's numbers, resolved, as JSON values.

        It identifies the run: a folder with another configuration is not resumed.
        """
        shared = self.benchmark.model_dump(mode="json", exclude=EXCLUDED_FIELDS)
        options = self.benchmark.method_config(self.method)
        training = self.benchmark.method_training(self.method, self.seed)
        sha256 = self.benchmark.entry_of(self.method).sha256
        return {
            **shared,
            **({} if sha256 is None else {"method_file": sha256}),
            "strength": STRENGTH if shared["strength"] is None else shared["strength"],
            "method": self.method,
            "implementation": self.benchmark.method_of(self.method),
            "sweep": None if self.point is None else dataclasses.asdict(self.point),
            "options": as_json(dataclasses.asdict(options)),
            "training": as_json(dataclasses.asdict(training)),
        }

    def is_finished(self) -> bool:
        """Return whether the run folder contains a result.

        Raises:
            RunConfigChanged: The folder has a result or checkpoints of another configuration.
        """
        path, finished = self.folder / CONFIG, (self.folder / RESULT).exists()
        if not path.exists() or not (finished or (self.folder / CHECKPOINTS).exists()):
            return False
        stored, current = read_json(path), as_json(self.config)
        if stored != current:
            raise RunConfigChanged(self.folder, difference(stored, current))
        if finished:  # a kill between writing the result and cleaning up leaves checkpoints behind
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        return finished


def runs_of(benchmark: Benchmark, methods: Sequence[str], out: Path) -> list[Run]:
    """List the runs of a benchmark, trial by trial, so that the table fills evenly."""
    seeds = range(benchmark.first_seed, benchmark.first_seed + benchmark.trials)
    return [
        Run(benchmark, method, seed, out / benchmark.name / row_folder(method) / f"trial-{seed}")
        for seed in seeds
        for method in methods
    ]


def row_folder(method: str) -> str:
    """Return the folder name of a row: the method's name, or the class of `file.py:Class`."""
    return method.rpartition(":")[2] if ".py:" in method else method


def shared_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that all rows of a table must have in common."""
    return {key: value for key, value in config.items() if key not in ROW_FIELDS}


def difference(before: dict[str, Any], after: dict[str, Any], path: str = "") -> list[str]:
    """List the fields in which two configurations differ, as `field: before -> after`."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += difference(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: {old} -> {new}")
    return lines


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a run folder; raise `CorruptRun` if it is not one."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CorruptRun(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CorruptRun(path, "is not JSON") from error
    if not isinstance(content, dict):
        raise CorruptRun(path, "is not a JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object atomically."""
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")

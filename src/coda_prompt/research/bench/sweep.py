"""Sweeps: a benchmark at several values of one field (the paper's figures 3 and 4, tuning)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from coda_prompt.errors import BadOption, UnknownName, bad_field
from coda_prompt.research.bench import config
from coda_prompt.research.bench.runs import Point, Run, row_folder, runs_of

METHOD_SECTIONS = ("options", "training")
"""Fields in these sections are set for each method of a line; all others for the benchmark."""


class Line(config.Section):
    """One line of a plot: methods, a field and its values."""

    methods: tuple[str, ...] = Field(min_length=1)
    field: str = Field(min_length=1)
    values: tuple[Any, ...] = ()
    """Default: the single value the benchmark has."""
    axis: str = ""
    """Axis label; lines with the same label share a plot. Default: the field."""

    def path(self, method: str) -> tuple[str, ...]:
        """Return the path of the field in the benchmark."""
        parts = tuple(self.field.split("."))
        return ("methods", method, *parts) if parts[0] in METHOD_SECTIONS else parts


class Sweep(config.Section):
    """A benchmark and the lines of its plots."""

    name: str
    description: str = ""
    benchmark: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of the benchmark that are set at every point."""
    lines: tuple[Line, ...] = Field(min_length=1)


def load_sweep(name: str, benchmark: str | None, chosen: Sequence[str], values: str) -> Sweep:
    """Load a sweep of the package, a YAML file, or sweep a field of a benchmark.

    Args:
        name: Name of a sweep, path of a file, or a field (`options.length`) with `values`.
        benchmark: Preset or file to use instead of the sweep's own.
        chosen: Methods; `["all"]` means all of the sweep or benchmark, empty its own.
        values: Comma-separated values, or empty.
    """
    is_file = Path(name).suffix in (".yaml", ".yml", ".json")
    all_methods = list(chosen) == ["all"]
    if not is_file and name not in config.shipped("sweeps") and values:
        benchmark = benchmark or "pocket"
        known = tuple(config.load_benchmark(benchmark).methods)
        line = {"methods": known if all_methods else chosen or ("coda-p",), "field": name}
        fields: dict[str, Any] = {"name": name, "benchmark": benchmark, "lines": [line]}
    elif not is_file and "." in name:
        raise BadOption("coda sweep", "values", f"give the values of '{name}'")
    else:
        fields = config.read_fields(name, "sweep", "sweeps")
        elsewhere = fields.pop("elsewhere", {})
        fields["benchmark"] = benchmark or fields.get("benchmark")
        fields |= elsewhere.get(benchmark, {}) if isinstance(elsewhere, dict) else {}
    try:
        sweep = Sweep(**(_with_values(fields, values) if values else fields))
    except ValidationError as error:
        fields_of = {"": Sweep.model_fields, "lines": Line.model_fields}
        raise bad_field(f"sweep {name}", error, fields_of) from error
    return _select_methods(sweep, chosen) if chosen and not all_methods else sweep


def sweep_runs(sweep: Sweep, overrides: Iterable[config.Override], out: Path) -> list[Run]:
    """List the runs of a sweep: every point of every line, trial by trial."""
    settings = [(tuple(path.split(".")), value) for path, value in sweep.settings.items()]
    common = [*settings, *overrides]
    runs = []
    for line in sweep.lines:
        for number, value in enumerate(line.values):
            if value in line.values[:number]:  # 4 and 4.0 are one point
                raise BadOption("coda sweep", "values", f"{value} is given twice")
        for method in line.methods:
            for value in line.values or (_benchmark_value(sweep, common, line),):
                setting = (line.path(method), value)
                benchmark = config.load_benchmark(sweep.benchmark, [*common, setting])
                config.check_rows(benchmark, [method])
                point = Point(sweep.name, line.axis or line.field, line.field, value)
                folder = out / benchmark.name / f"sweep-{_file_name(sweep.name)}"
                point_folder = folder / row_folder(method) / _file_name(f"{line.field}={value}")
                runs += [
                    replace(run, folder=point_folder / run.folder.name, point=point)
                    for run in runs_of(benchmark, [method], out)
                ]
    shared = [folder for folder, count in Counter(run.folder for run in runs).items() if count > 1]
    if shared:
        raise BadOption("coda sweep", "values", f"two points would share {shared[0].parent}")
    return sorted(runs, key=lambda run: run.seed)


def _benchmark_value(sweep: Sweep, common: Sequence[config.Override], line: Line) -> Any:
    """Return the benchmark's own value of a field, for a line without values."""
    value: Any = config.load_benchmark(sweep.benchmark, common).model_dump(mode="json")
    for part in line.field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise BadOption("coda sweep", "values", f"give the values of '{line.field}'")
    return value


def _with_values(fields: dict[str, Any], values: str) -> dict[str, Any]:
    lines = fields.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        return fields
    if len({line.get("field") for line in lines}) > 1:
        problem = "this sweep has several fields; set their values in a YAML file"
        raise BadOption("coda sweep", "values", problem)
    parsed = config.parse_value(f"[{values}]")
    return {**fields, "lines": [{**line, "values": parsed} for line in lines]}


def _select_methods(sweep: Sweep, chosen: Sequence[str]) -> Sweep:
    """Return the sweep with these methods only."""
    known = [method for line in sweep.lines for method in line.methods]
    for method in chosen:
        if method not in known:
            raise UnknownName("method", method, known, f"sweep {sweep.name}")
    lines = [
        line.model_copy(update={"methods": selected})
        for line in sweep.lines
        if (selected := tuple(method for method in line.methods if method in chosen))
    ]
    return sweep.model_copy(update={"lines": tuple(lines)})


def _file_name(text: str) -> str:
    """Replace characters that some file systems do not allow."""
    return re.sub(r"[^\w.=+-]+", "_", text)

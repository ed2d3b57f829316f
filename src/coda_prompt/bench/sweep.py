"""A field of a benchmark against accuracy: figures 3 and 4, tuning, or any field and values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from coda_prompt.bench.config import (
    Override,
    Section,
    bad_field,
    check_rows,
    load_benchmark,
    parse_value,
    read_fields,
    shipped,
)
from coda_prompt.bench.runner import Point, Run, row_folder, runs_of
from coda_prompt.errors import BadOption, UnknownName

OF_A_METHOD = ("options", "training")
"""Fields that start so are set for each method of a line; all others for the benchmark."""


class Line(Section):
    """Methods, and the values one field takes for them."""

    methods: tuple[str, ...] = Field(min_length=1)
    field: str = Field(min_length=1)
    values: tuple[Any, ...] = ()
    """None: the one value the benchmark itself has."""
    axis: str = ""
    """What the values are called; lines with the same share a picture. Empty: the field."""

    def path(self, method: str) -> tuple[str, ...]:
        parts = tuple(self.field.split("."))
        return ("methods", method, *parts) if parts[0] in OF_A_METHOD else parts


class Sweep(Section):
    name: str
    description: str = ""
    benchmark: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of the benchmark that are the same at every point."""
    lines: tuple[Line, ...] = Field(min_length=1)


def load_sweep(name: str, benchmark: str | None, chosen: Sequence[str], values: str) -> Sweep:
    """A sweep that comes with the package, a file, or a field of a benchmark with its values."""
    file = Path(name).suffix in (".yaml", ".yml", ".json")
    everything = list(chosen) == ["all"]
    if not file and name not in shipped("sweeps") and values:
        benchmark = benchmark or "pocket"
        rows = tuple(load_benchmark(benchmark).methods) if everything else chosen or ("coda-p",)
        fields: dict[str, Any] = {
            "name": name,
            "benchmark": benchmark,
            "lines": [{"methods": rows, "field": name, "values": ()}],
        }
    elif not file and "." in name:
        raise BadOption("coda sweep", "values", f"say which values '{name}' shall take")
    else:
        fields = read_fields(name, "sweep", "sweeps")
        elsewhere = fields.pop("elsewhere", {})
        fields["benchmark"] = benchmark or fields.get("benchmark")
        fields |= elsewhere.get(benchmark, {}) if isinstance(elsewhere, dict) else {}
    try:
        sweep = Sweep(**(_with_values(fields, values) if values else fields))
    except ValidationError as error:
        raise bad_field(f"sweep {name}", error, {"lines": Line}, Sweep) from error
    return _only(sweep, chosen) if chosen and not everything else sweep


def sweep_runs(sweep: Sweep, overrides: Iterable[Override], out: Path) -> list[Run]:
    """Every point in every trial; a trial is complete before the next begins."""
    settings = [(tuple(path.split(".")), value) for path, value in sweep.settings.items()]
    common = [*settings, *overrides]
    runs = []
    for line in sweep.lines:
        for number, value in enumerate(line.values):
            if value in line.values[:number]:  # 4 and 4.0 are one point
                raise BadOption("coda sweep", "values", f"{value} is there twice")
        for method in line.methods:
            for value in line.values or (_own_value(sweep, common, line),):
                setting = (line.path(method), value)
                benchmark = load_benchmark(sweep.benchmark, [*common, setting])
                check_rows(benchmark, [method])
                point = Point(sweep.name, line.axis or line.field, line.field, value)
                folder = out / benchmark.name / f"sweep-{_plain(sweep.name)}"
                home = folder / row_folder(method) / _plain(f"{line.field}={value}")
                runs += [
                    replace(run, folder=home / run.folder.name, point=point)
                    for run in runs_of(benchmark, [method], out)
                ]
    seen: set[Path] = set()
    for run in runs:
        if run.folder in seen:
            raise BadOption("coda sweep", "values", f"{run.folder.parent} would be run twice")
        seen.add(run.folder)
    return sorted(runs, key=lambda run: run.seed)


def _own_value(sweep: Sweep, common: Sequence[Override], line: Line) -> Any:
    """What the benchmark says in a field that a line has no values for."""
    found: Any = load_benchmark(sweep.benchmark, common).model_dump(mode="json")
    for part in line.field.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        raise BadOption("coda sweep", "values", f"say which values '{line.field}' shall take")
    return found


def _with_values(fields: dict[str, Any], values: str) -> dict[str, Any]:
    lines = fields.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        return fields
    if len({line.get("field") for line in lines}) > 1:
        raise BadOption("coda sweep", "values", "this sweep has several fields; change its file")
    return {**fields, "lines": [{**line, "values": parse_value(f"[{values}]")} for line in lines]}


def _only(sweep: Sweep, chosen: Sequence[str]) -> Sweep:
    """The lines of these methods."""
    known = [method for line in sweep.lines for method in line.methods]
    for method in chosen:
        if method not in known:
            raise UnknownName(f"method in sweep {sweep.name}", method, known)
    lines = [
        line.model_copy(update={"methods": kept})
        for line in sweep.lines
        if (kept := tuple(method for method in line.methods if method in chosen))
    ]
    return sweep.model_copy(update={"lines": tuple(lines)})


def _plain(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.=+-]+", "_", text)

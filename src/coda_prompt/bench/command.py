"""`coda bench` behind its options: results on standard output, all else on standard error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coda_prompt.bench import plots, report
from coda_prompt.bench.config import Benchmark, load_benchmark
from coda_prompt.bench.parallel import run_in_parallel
from coda_prompt.bench.progress import BenchProgress
from coda_prompt.bench.runner import run_in_turn, runs_of
from coda_prompt.errors import BadOption, UnknownName


def bench(
    name: str,
    chosen: str,
    overrides: Sequence[str],
    out: Path,
    *,
    jobs: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    benchmark = load_benchmark(name, overrides)
    runs = runs_of(benchmark, _methods(benchmark, chosen), out)
    if dry_run:
        print(json.dumps({"runs": [run.config for run in runs]}, indent=2))  # noqa: T201
        return
    messages = Console(stderr=True)
    todo = [run for run in runs if not run.finished()]
    with BenchProgress(todo, messages) as progress:
        if jobs > 1 and len(todo) > 1:
            going = run_in_parallel(todo, jobs, progress.on_event)
        else:
            going = run_in_turn(todo, progress.on_event)
        for run in going:
            progress.finished(run)
    finished = [report.read_run(run.folder) for run in runs]
    table = report.rows(finished)
    if as_json:
        print(json.dumps({"rows": table}, indent=2))  # noqa: T201
        return
    folder = out / benchmark.name
    pictures = [
        plots.accuracy_over_tasks(finished, folder / "accuracy.png"),
        plots.matrices(finished, folder / "matrices.png"),
    ]
    heads, cells = report.table_cells(table)
    shown = Table(title=f"{benchmark.name}: {benchmark.description}")
    for head in heads:
        shown.add_column(head, no_wrap=head == "method")
    for line in cells:
        shown.add_row(*line)
    Console().print(shown)
    messages.print("Pictures: " + ", ".join(str(path) for path in pictures))


def _methods(benchmark: Benchmark, chosen: str) -> list[str]:
    if not chosen:
        return list(benchmark.demo or benchmark.methods)
    if chosen == "all":
        return list(benchmark.methods)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    for name in names:
        if ".py:" not in name and name not in benchmark.methods:
            raise UnknownName(f"method in {benchmark.name}", name, benchmark.methods)
    if len(set(names)) < len(names) or not names:
        raise BadOption("coda bench", "methods", f"'{chosen}' names a method twice or none")
    return names

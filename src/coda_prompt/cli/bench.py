"""Commands that run benchmarks: bench, sweep, report."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_prompt.cli import options
from coda_prompt.console import print_json, stderr_console, stdout_console
from coda_prompt.errors import BadOption

if TYPE_CHECKING:
    from coda_prompt.research.bench import config, launcher
    from coda_prompt.research.bench.tables import Table

app = typer.Typer()

SAVED = "benchmark.json"
"""The resolved benchmark, saved next to its runs; `coda bench` accepts it like a preset."""


@app.command(
    epilog="Examples: `coda bench --list`; `coda bench pocket`; "
    "`coda bench pocket --methods coda-p,ncm --trials 1 --json`; "
    "`coda bench pocket --set training.epochs=2 --set methods.coda-p.options.length=4`; "
    "`coda bench imagenet-r-10 --data DIR --set protocol=release-2023`"
)
@options.with_options(overrides=options.override_options, run=options.run_options)
def bench(
    benchmark: options.Benchmark = None,
    list_presets: options.ListPresets = False,
    methods: options.Methods = None,
    validation: options.UseValidation = False,
    queries: options.Queries = None,
    views: options.Views = None,
    fast: options.Fast = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    *,
    overrides: "list[config.Override]",
    run: "launcher.RunOptions",
) -> None:
    """Run a benchmark (every method, every trial) and print a table of the results.

    Finished runs are not repeated: the same command resumes an interrupted benchmark.
    """
    from coda_prompt.research.bench import plots, report, tables
    from coda_prompt.research.bench.config import load_benchmark
    from coda_prompt.research.bench.launcher import run_all
    from coda_prompt.research.bench.runs import runs_of

    if list_presets:
        _print_presets(as_json)
        return
    if benchmark is None:
        raise BadOption("coda bench", "benchmark", "name a preset (see --list) or a YAML file")
    if validation:
        overrides.append((("stream", "validation"), True))
    if fast:
        if queries is not None:
            raise BadOption("coda bench", "queries", "--fast computes exact ones; leave it out")
        overrides[:0] = _fast_overrides(run, views)
    if views is not None:
        overrides.append((("training", "views"), views))
    if queries == "one-stage":
        overrides.append((("one_stage",), True))
    elif queries is not None:
        overrides.append((("training", "queries"), queries))
    resolved = load_benchmark(benchmark, overrides)
    names = _method_names(resolved, methods)
    runs = runs_of(resolved, names, run.folder)
    if dry_run:
        print_json({"runs": [each.config for each in runs]})
        return
    folder = run.folder / resolved.name
    finished = run_all(runs, run, {folder / SAVED: resolved.resolved(names)})
    rows = report.rows(finished)
    if as_json:
        print_json({"rows": rows})
        return
    title = f"{resolved.name}: {resolved.description}"
    table = tables.short(rows, title, finished[0].config["stream"])
    _print_results([table], plots.benchmark_plots(finished, folder))


@app.command(
    epilog="Examples: `coda sweep components pocket --jobs 2`; `coda sweep length --data DIR`; "
    "`coda sweep tuning --data DIR --methods coda-p`; "
    "`coda sweep training.learning_rate pocket --methods ft,ft++ --values 1e-4,1e-3,1e-2`"
)
@options.with_options(overrides=options.override_options, run=options.run_options)
def sweep(
    what: options.SweepField,
    benchmark: options.SweepBenchmark = None,
    methods: options.Methods = None,
    values: options.SweepValues = "",
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    *,
    overrides: "list[config.Override]",
    run: "launcher.RunOptions",
) -> None:
    """Run a benchmark with one field at several values and plot accuracy against them.

    The sweeps that come with the package evaluate on validation data.
    """
    from coda_prompt.research.bench import plots, report, tables
    from coda_prompt.research.bench.launcher import run_all
    from coda_prompt.research.bench.sweep import load_sweep, sweep_runs

    resolved = load_sweep(what, benchmark, _split(methods or ""), values)
    runs = sweep_runs(resolved, overrides, run.folder)
    if dry_run:
        print_json({"runs": [each.config for each in runs]})
        return
    rows = report.sweep_rows(run_all(runs, run, {}))
    if as_json:
        print_json({"rows": rows})
        return
    paths = plots.sweep_plots(rows, runs[0].folder.parents[2])
    _print_results(tables.sweep(rows), paths)


@app.command(epilog="Example: `coda report runs -o report`")
def report(
    runs: Annotated[Path, typer.Argument(help="Folder that contains run folders at any depth.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("report"),
    as_json: options.AsJson = False,
) -> None:
    """Write tables and plots of finished runs: terminal, Markdown, CSV, LaTeX and one HTML page."""
    from coda_prompt.research.bench import html
    from coda_prompt.research.bench.report import read_runs

    parts, written = html.write_report(read_runs(runs), runs, out)
    if as_json:
        print_json({"parts": {part.title: part.rows for part in parts}})
        return
    console = stdout_console()
    for part in parts:
        console.rule(part.title)
        for table in part.tables:
            console.print(table.rich())
    stderr_console().print(f"Report: {written}")


def _print_presets(as_json: bool) -> None:
    from coda_prompt.console import table
    from coda_prompt.research.bench.config import preset_rows

    rows = preset_rows()
    if as_json:
        print_json({"presets": rows})
        return
    heads = ["preset", "measures", "data", "methods x trials", "minutes on two cores"]
    cells = [
        [
            row["preset"],
            row["description"],
            row["source"],
            f"{len(row['methods'])} x {row['trials']}",
            "not measured" if row["minutes"] is None else f"about {row['minutes']:g}",
        ]
        for row in rows
    ]
    stdout_console().print(table(heads, cells))


def _fast_overrides(run: "launcher.RunOptions", views: int | None) -> "list[config.Override]":
    """Return the fields that `--fast` sets, and say so; other options override them."""
    from coda_prompt.research.training.fast import EPOCHS_PER_VIEW, describe_fast, fast_precision

    precision = fast_precision(run.devices.accelerator)
    count = f"{views} views" if views else f"one view for every {EPOCHS_PER_VIEW} epochs"
    stderr_console().print(describe_fast(count, precision))
    return [(("fast",), True), (("precision",), precision)]


def _print_results(tables: Iterable["Table"], plots: Iterable[Path]) -> None:
    for table in tables:
        stdout_console().print(table.rich())
    stderr_console().print("Plots: " + ", ".join(str(path) for path in plots))


def _method_names(benchmark: "config.Benchmark", chosen: str | None) -> list[str]:
    if chosen is None:
        return list(benchmark.demo or benchmark.methods)
    if chosen == "all":
        return list(benchmark.methods)
    from coda_prompt.research.bench.config import check_rows
    from coda_prompt.research.bench.runs import row_folder

    names = _split(chosen)
    check_rows(benchmark, names)
    if not names:
        raise BadOption("coda bench", "methods", f"'{chosen}' names no method")
    folders: dict[str, str] = {}
    for name in names:
        twin = folders.setdefault(row_folder(name).lower(), name)
        if twin is not name:
            problem = f"'{twin}' and '{name}' would be one row; leave one out or rename its class"
            raise BadOption("coda bench", "methods", problem)
    return names


def _split(chosen: str) -> list[str]:
    return [name.strip() for name in chosen.split(",") if name.strip()]

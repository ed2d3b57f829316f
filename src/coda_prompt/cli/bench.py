"""The bench verbs behind their options: results on standard output, all else on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from coda_prompt.bench import html, plots, report, tables
from coda_prompt.bench.config import Benchmark, Override, check_rows, load_benchmark
from coda_prompt.bench.processes import run_in_parallel
from coda_prompt.bench.progress import BenchProgress
from coda_prompt.bench.ray_cluster import Cluster, run_on_ray
from coda_prompt.bench.runner import OnEvent, Run, row_folder, run_in_turn, runs_of, write_json
from coda_prompt.bench.sweep import load_sweep, sweep_runs
from coda_prompt.console import messages, output, print_json
from coda_prompt.errors import BadOption, RunBusy
from coda_prompt.storage.files import exclusive_lock
from coda_prompt.storage.mirror import Mirror, local_copy
from coda_prompt.training.devices import Devices, check_shardable

SAVED = "benchmark.json"
"""The resolved benchmark beside its runs; `coda bench` takes it as it takes a preset."""


@dataclass(frozen=True)
class RunOptions:
    """How runs are done and shown; no number depends on it."""

    out: str
    """A folder, or the address (`s3://...`) of one."""
    jobs: int = 1
    devices: Devices = field(default_factory=Devices)
    """Of each run, where they run in turn."""
    cluster: Cluster | None = None
    tensorboard: bool = False
    keep: bool = False
    dry_run: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.devices.several and (self.jobs > 1 or self.cluster is not None):
            problem = "runs at a time have one device each; leave one of the two out"
            raise BadOption("coda bench", "devices", problem)
        if self.jobs > 1 and self.cluster is not None:
            problem = "a Ray cluster has as many runs at a time as fit; leave it out"
            raise BadOption("coda bench", "jobs", problem)
        if self.devices.several and self.home is not None:
            problem = "processes that share a run need a folder that all of them see"
            raise BadOption("coda bench", "out", problem)
        if self.out.startswith("memory://") and (self.jobs > 1 or self.cluster is not None):
            problem = "memory is not shared with other processes; name a folder or an address"
            raise BadOption("coda bench", "out", problem)

    @property
    def folder(self) -> Path:
        """Here; where `out` is an address, a copy."""
        return local_copy(self.out)[0]

    @property
    def home(self) -> str | None:
        return local_copy(self.out)[1]

    @cached_property
    def mirror(self) -> Mirror | None:
        return None if self.home is None else Mirror(self.folder, self.home)


def bench(name: str, chosen: str | None, overrides: Sequence[Override], manner: RunOptions) -> None:
    benchmark = load_benchmark(name, overrides)
    names = _methods(benchmark, chosen)
    runs = runs_of(benchmark, names, manner.folder)
    if manner.dry_run:
        print_json({"runs": [run.config for run in runs]})
        return
    folder = manner.folder / benchmark.name
    finished = _run_all(runs, manner, {folder / SAVED: benchmark.resolved(names)})
    table = report.rows(finished)
    if manner.as_json:
        print_json({"rows": table})
        return
    pictures = plots.all_pictures(finished, folder)
    if manner.mirror is not None:
        manner.mirror.push()
    title = f"{benchmark.name}: {benchmark.description}"
    output().print(tables.short(table, title).rich())
    messages().print("Pictures: " + ", ".join(str(path) for path in pictures))


def sweep(
    name: str,
    benchmark: str | None,
    chosen: str,
    values: str,
    overrides: Sequence[Override],
    manner: RunOptions,
) -> None:
    found = load_sweep(name, benchmark, _split(chosen), values)
    runs = sweep_runs(found, overrides, manner.folder)
    if manner.dry_run:
        print_json({"runs": [run.config for run in runs]})
        return
    finished = _run_all(runs, manner, {})
    rows = report.sweep_rows(finished)
    if manner.as_json:
        print_json({"rows": rows})
        return
    folder = runs[0].folder.parents[2]
    pictures = plots.sweep_pictures(rows, folder)
    if manner.mirror is not None:
        manner.mirror.push()
    for table in tables.sweep(rows):
        output().print(table.rich())
    messages().print("Pictures: " + ", ".join(str(path) for path in pictures))


def write_report(place: str, out: Path, *, as_json: bool) -> None:
    folder, home = local_copy(place)
    if home is not None:
        with tempfile.TemporaryDirectory() as copy:  # a benchmark may be at work in its own
            Mirror(Path(copy) / "runs", home).pull()
            _write_report(Path(copy) / "runs", out, as_json)
    else:
        _write_report(folder, out, as_json)


def _write_report(folder: Path, out: Path, as_json: bool) -> None:
    runs = report.read_runs(folder)
    parts, written = html.write_report(runs, folder, out)
    if as_json:
        print_json({"parts": {part.title: part.rows for part in parts}})
        return
    console = output()
    for part in parts:
        console.rule(part.title)
        for table in part.tables:
            console.print(table.rich())
    messages().print(f"Report: {written}")


def _run_all(
    runs: Sequence[Run], manner: RunOptions, saved: dict[Path, Benchmark]
) -> list[report.FinishedRun]:
    """Do what is not done yet."""
    if manner.mirror is None:
        return _run_here(runs, manner, saved)
    lock = manner.folder.with_name(f"{manner.folder.name}.lock")
    lock.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(lock, RunBusy):
        return _run_here(runs, manner, saved)


def _run_here(
    runs: Sequence[Run], manner: RunOptions, saved: dict[Path, Benchmark]
) -> list[report.FinishedRun]:
    folder, home, mirror = manner.folder, manner.home, manner.mirror
    if mirror is not None:
        mirror.pull()
    runs = [
        dataclasses.replace(
            run,
            home=home and f"{home}/{run.folder.relative_to(folder).as_posix()}",
            tensorboard=manner.tensorboard,
            keep=manner.keep,
            device=manner.devices.accelerator,
        )
        for run in runs
    ]
    todo = [run for run in runs if not run.finished()]
    if manner.devices.strategy == "fsdp":
        for run in todo:
            check_shardable(run.benchmark.entry_of(run.method).type, run.method)
    for path, benchmark in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, benchmark.model_dump(mode="json"))
    if mirror is not None:
        mirror.push()
    with _executor(todo, manner) as execute, BenchProgress(todo, messages()) as progress:
        for run in execute(progress.on_event):
            progress.finished(run)
    if mirror is not None:
        mirror.pull()
    return [report.read_run(run.folder) for run in runs]


@contextlib.contextmanager
def _executor(
    todo: Sequence[Run], manner: RunOptions
) -> Iterator[Callable[[OnEvent], Iterator[Run]]]:
    """What does these runs and yields each when it is done."""
    if manner.cluster is not None:
        cluster = manner.cluster
        yield lambda on_event: run_on_ray(todo, cluster, on_event)
    elif manner.jobs > 1 and len(todo) > 1:
        yield lambda on_event: run_in_parallel(todo, manner.jobs, on_event)
    elif manner.devices.several:
        precision, *others = {run.benchmark.precision for run in todo} or {"32-true"}
        if others:
            raise BadOption("coda sweep", "devices", "runs of several precisions have one each")
        with dataclasses.replace(manner.devices, precision=precision).launch_processes() as fabric:
            yield lambda on_event: run_in_turn(todo, on_event, fabric)
    else:
        yield lambda on_event: run_in_turn(todo, on_event)


def _methods(benchmark: Benchmark, chosen: str | None) -> list[str]:
    if chosen is None:
        return list(benchmark.demo or benchmark.methods)
    if chosen == "all":
        return list(benchmark.methods)
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

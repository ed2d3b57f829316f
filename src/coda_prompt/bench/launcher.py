"""Run what is not finished yet: in turn, in parallel processes or on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from coda_prompt.bench import report
from coda_prompt.bench.config import Benchmark
from coda_prompt.bench.processes import run_in_parallel
from coda_prompt.bench.progress import BenchProgress
from coda_prompt.bench.ray_cluster import Cluster, run_on_ray
from coda_prompt.bench.runner import OnEvent, Run, run_in_turn, write_json
from coda_prompt.console import stderr_console
from coda_prompt.errors import BadOption, FolderBusy
from coda_prompt.storage.files import exclusive_lock
from coda_prompt.storage.remote import Mirror, local_folder
from coda_prompt.training.devices import Devices, check_shardable


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

    def __post_init__(self) -> None:
        if self.devices.distributed and (self.jobs > 1 or self.cluster is not None):
            problem = "runs at a time have one device each; leave one of the two out"
            raise BadOption("coda bench", "devices", problem)
        if self.jobs > 1 and self.cluster is not None:
            problem = "a Ray cluster has as many runs at a time as fit; leave it out"
            raise BadOption("coda bench", "jobs", problem)
        if self.devices.distributed and self.home is not None:
            problem = "processes that share a run need a folder that all of them see"
            raise BadOption("coda bench", "out", problem)
        if self.out.startswith("memory://") and (self.jobs > 1 or self.cluster is not None):
            problem = "memory is not shared with other processes; name a folder or an address"
            raise BadOption("coda bench", "out", problem)

    @property
    def folder(self) -> Path:
        """Here; where `out` is an address, a copy."""
        return local_folder(self.out)[0]

    @property
    def home(self) -> str | None:
        return local_folder(self.out)[1]

    @cached_property
    def mirror(self) -> Mirror | None:
        return None if self.home is None else Mirror(self.folder, self.home)


def run_all(
    runs: Sequence[Run], options: RunOptions, saved: dict[Path, Benchmark]
) -> list[report.FinishedRun]:
    """Do what is not done yet."""
    if options.mirror is None:
        return _run_here(runs, options, saved)
    lock = options.folder.with_name(f"{options.folder.name}.lock")
    lock.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(lock, FolderBusy):
        return _run_here(runs, options, saved)


def _run_here(
    runs: Sequence[Run], options: RunOptions, saved: dict[Path, Benchmark]
) -> list[report.FinishedRun]:
    folder, home, mirror = options.folder, options.home, options.mirror
    if mirror is not None:
        mirror.pull()
    runs = [
        dataclasses.replace(
            run,
            home=home and f"{home}/{run.folder.relative_to(folder).as_posix()}",
            tensorboard=options.tensorboard,
            keep=options.keep,
            device=options.devices.accelerator,
        )
        for run in runs
    ]
    todo = [run for run in runs if not run.finished()]
    if options.devices.strategy == "fsdp":
        for run in todo:
            check_shardable(run.benchmark.entry_of(run.method).type, run.method)
    for path, benchmark in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, benchmark.model_dump(mode="json"))
    if mirror is not None:
        mirror.push()
    with _executor(todo, options) as execute, BenchProgress(todo, stderr_console()) as progress:
        for run in execute(progress.on_event):
            progress.finished(run)
    if mirror is not None:
        mirror.pull()
    return [report.read_run(run.folder) for run in runs]


@contextlib.contextmanager
def _executor(
    todo: Sequence[Run], options: RunOptions
) -> Iterator[Callable[[OnEvent], Iterator[Run]]]:
    """What does these runs and yields each when it is done."""
    if options.cluster is not None:
        cluster = options.cluster
        yield lambda on_event: run_on_ray(todo, cluster, on_event)
    elif options.jobs > 1 and len(todo) > 1:
        yield lambda on_event: run_in_parallel(todo, options.jobs, on_event)
    elif options.devices.distributed:
        precision, *others = {run.benchmark.precision for run in todo} or {"32-true"}
        if others:
            raise BadOption("coda sweep", "devices", "runs of several precisions have one each")
        with dataclasses.replace(options.devices, precision=precision).launch_processes() as fabric:
            yield lambda on_event: run_in_turn(todo, on_event, fabric)
    else:
        yield lambda on_event: run_in_turn(todo, on_event)

"""Execute unfinished runs: one after another, in parallel processes or on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coda_prompt.console import stderr_console
from coda_prompt.errors import BadOption
from coda_prompt.research.bench import report
from coda_prompt.research.bench.config import Benchmark
from coda_prompt.research.bench.processes import run_in_parallel
from coda_prompt.research.bench.progress import BenchProgress
from coda_prompt.research.bench.ray_cluster import Cluster, run_on_ray
from coda_prompt.research.bench.runner import OnEvent, run_sequentially
from coda_prompt.research.bench.runs import Run, write_json
from coda_prompt.research.training.devices import Devices


@dataclass(frozen=True)
class RunOptions:
    """Where and how runs are executed; none of it affects their numbers."""

    folder: Path
    """Folder for the run folders."""
    jobs: int = 1
    """Runs executed at the same time in parallel processes."""
    devices: Devices = field(default_factory=Devices)
    """Device of each run; the ranks that torchrun or Slurm started train each run together."""
    cluster: Cluster | None = None
    """Ray cluster to execute the runs on."""
    tensorboard: bool = False
    """Also write TensorBoard files to the run folders."""
    keep: bool = False
    """Also save the learned state in the run folders."""

    def __post_init__(self) -> None:
        concurrent = self.jobs > 1 or self.cluster is not None
        if self.devices.distributed and concurrent:
            problem = "concurrent runs have one device each; leave out torchrun and srun"
            raise BadOption("coda bench", "jobs", problem)
        if self.jobs > 1 and self.cluster is not None:
            problem = "a Ray cluster executes as many runs at a time as fit; remove --jobs"
            raise BadOption("coda bench", "jobs", problem)


def run_all(
    runs: Sequence[Run], options: RunOptions, saved: dict[Path, Benchmark]
) -> list[report.FinishedRun]:
    """Execute the runs that are not finished, and read the results of all.

    Args:
        saved: Resolved benchmarks to write next to the runs, by path.
    """
    runs = [
        dataclasses.replace(
            run,
            tensorboard=options.tensorboard,
            save_learned=options.keep,
            device=options.devices.accelerator,
        )
        for run in runs
    ]
    unfinished = [run for run in runs if not run.is_finished()]
    for path, benchmark in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, benchmark.model_dump(mode="json"))
    with (
        _executor(unfinished, options) as execute_all,
        BenchProgress(unfinished, stderr_console()) as progress,
    ):
        for run in execute_all(progress.on_event):
            progress.finish(run)
    return [report.read_run(run.folder) for run in runs]


@contextlib.contextmanager
def _executor(
    runs: Sequence[Run], options: RunOptions
) -> Iterator[Callable[[OnEvent], Iterator[Run]]]:
    """Choose how to execute the runs; the function yields each run when it is finished."""
    if options.cluster is not None:
        cluster = options.cluster
        yield lambda on_event: run_on_ray(runs, cluster, on_event)
    elif options.jobs > 1 and len(runs) > 1:
        yield lambda on_event: run_in_parallel(runs, options.jobs, on_event)
    elif options.devices.distributed:
        precision, *others = {run.benchmark.precision for run in runs} or {"32-true"}
        if others:
            problem = "runs on several ranks have one precision; leave out torchrun and srun"
            raise BadOption("coda sweep", "precision", problem)
        with dataclasses.replace(options.devices, precision=precision).connected() as fabric:
            yield lambda on_event: run_sequentially(runs, on_event, fabric)
    else:
        yield lambda on_event: run_sequentially(runs, on_event)

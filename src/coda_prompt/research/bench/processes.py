"""Execute several runs at once, each in its own process with its share of the CPU threads."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from coda_prompt.errors import CodaError, Interrupted, ProcessDied
from coda_prompt.research.bench.inputs import InputCache
from coda_prompt.research.bench.runner import OnEvent, execute
from coda_prompt.research.bench.runs import Run
from coda_prompt.research.training.settings import Event
from coda_prompt.shutdown import SIGNALS, ShutdownFlag, exit_with_parent, signals_ignored

SHUTDOWN_TIMEOUT = 600
"""Seconds that workers have to finish and checkpoint their current step."""


def run_in_parallel(runs: Sequence[Run], jobs: int, on_event: OnEvent) -> Iterator[Run]:
    """Execute runs, `jobs` at a time, and yield each one when it is finished."""
    context = multiprocessing.get_context("spawn")
    pending: Any = context.Queue()
    reports: Any = context.Queue()
    stopping: Any = context.Event()
    for number in [*range(len(runs)), *[None] * jobs]:
        pending.put(number)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    arguments = (list(runs), pending, reports, threads, stopping)
    workers = [
        context.Process(target=_work, args=arguments, daemon=True)
        for _ in range(min(jobs, len(runs)))
    ]
    with signals_ignored():  # workers inherit this: the parent tells them when to stop
        for worker in workers:
            worker.start()
    should_stop = ShutdownFlag()
    try:
        with should_stop.handling_signals():
            for number, report in _reports(workers, reports, len(runs), should_stop):
                if isinstance(report, Event):
                    on_event(runs[number], report)
                elif report is None:
                    yield runs[number]
                else:
                    raise CodaError(report)
            if should_stop():
                stopping.set()
                for worker in workers:
                    worker.join(SHUTDOWN_TIMEOUT)
                raise Interrupted
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _reports(
    workers: Sequence[BaseProcess], reports: Any, unfinished: int, should_stop: ShutdownFlag
) -> Iterator[tuple[int, Event | str | None]]:
    """Yield what workers report until all runs are finished or a shutdown is requested.

    A report is a run's number and an event, an error message, or None when the run is finished.
    """
    while unfinished and not should_stop():
        try:
            number, report = reports.get(timeout=1)
        except queue.Empty:
            lost = [worker for worker in workers if worker.exitcode not in (None, 0)]
            if lost:
                cause = f"exit code {lost[0].exitcode}"
                raise ProcessDied("runs the benchmark", cause, "with fewer --jobs") from None
            continue
        unfinished -= report is None
        yield number, report


def _work(runs: list[Run], pending: Any, reports: Any, threads: int, stopping: Any) -> None:
    """Execute pending runs in a worker process until there are none left."""
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)  # in case the parent could not: it has no main thread
    parent = multiprocessing.parent_process()
    exit_with_parent(None if parent is None else parent.pid, 1)
    torch.set_num_threads(threads)
    inputs = InputCache()
    while not stopping.is_set() and (number := pending.get()) is not None:

        def on_event(run: Run, event: Event, number: int = number) -> None:
            reports.put((number, event))

        try:
            execute(runs[number], inputs, on_event, stopping.is_set)
        except Interrupted:
            reports.cancel_join_thread()  # the parent does not read any more
            return
        except (CodaError, OSError) as error:
            reports.put((number, str(error)))
            return
        reports.put((number, None))

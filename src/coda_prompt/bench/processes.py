"""Several runs at once, each in a process of its own with its share of the threads."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from coda_prompt.bench.inputs import Inputs
from coda_prompt.bench.runner import OnEvent, Run, execute
from coda_prompt.errors import CodaError, Interrupted, ProcessDied
from coda_prompt.shutdown import SIGNALS, ShutdownFlag, exit_with_parent, signals_ignored
from coda_prompt.training.settings import Event

LAST_STEP = 600
"""Seconds the workers have to finish and keep the step at hand when all is to stop."""


def run_in_parallel(runs: Sequence[Run], jobs: int, on_event: OnEvent) -> Iterator[Run]:
    """Run all, so many at a time; each is yielded when its result is there."""
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    told: Any = context.Queue()
    stopping: Any = context.Event()
    for number in [*range(len(runs)), *[None] * jobs]:
        waiting.put(number)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    given = (list(runs), waiting, told, threads, stopping)
    workers = [
        context.Process(target=_work, args=given, daemon=True) for _ in range(min(jobs, len(runs)))
    ]
    with signals_ignored():  # from birth: the parent tells them to stop
        for worker in workers:
            worker.start()
    stop = ShutdownFlag()
    try:
        with stop.handling_signals():
            for number, news in _news(workers, told, len(runs), stop):
                if isinstance(news, Event):
                    on_event(runs[number], news)
                elif news is None:
                    yield runs[number]
                else:
                    raise CodaError(news)
            if stop():
                stopping.set()
                for worker in workers:
                    worker.join(LAST_STEP)
                raise Interrupted
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _news(
    workers: Sequence[BaseProcess], told: Any, left: int, stop: ShutdownFlag
) -> Iterator[tuple[int, Event | str | None]]:
    """What the workers tell, until all runs are done or all is to stop."""
    while left and not stop():
        try:
            number, news = told.get(timeout=1)
        except queue.Empty:
            lost = [worker for worker in workers if worker.exitcode not in (None, 0)]
            if lost:
                cause = f"exit code {lost[0].exitcode}"
                raise ProcessDied("runs the benchmark", cause, "with fewer --jobs") from None
            continue
        left -= news is None
        yield number, news


def _work(runs: list[Run], waiting: Any, told: Any, threads: int, stopping: Any) -> None:
    """One process: takes runs until there are none left."""
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)  # also where the parent could not see to it
    parent = multiprocessing.parent_process()
    exit_with_parent(None if parent is None else parent.pid, 1)
    torch.set_num_threads(threads)
    inputs = Inputs()
    while not stopping.is_set() and (number := waiting.get()) is not None:

        def tell(run: Run, event: Event, number: int = number) -> None:
            told.put((number, event))

        try:
            execute(runs[number], inputs, tell, stopping.is_set)
        except Interrupted:
            told.cancel_join_thread()  # nobody listens any more
            return
        except (CodaError, OSError) as error:
            told.put((number, str(error)))
            return
        told.put((number, None))

"""Runs as tasks of a Ray cluster: started here for the while, or joined by its address."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coda_prompt.bench.inputs import Inputs
from coda_prompt.bench.processes import LAST_STEP
from coda_prompt.bench.runner import OnEvent, Run, execute
from coda_prompt.errors import BadOption, CodaError, Interrupted, MissingExtra, ProcessDied
from coda_prompt.shutdown import ShutdownFlag
from coda_prompt.training.settings import Event

RETRIES = 5
"""How often a run whose process or machine was lost is gone on with, elsewhere."""
PAUSE = 0.5
"""Seconds between two looks at the news, and between two steps that are told of."""


@dataclass(frozen=True)
class Cluster:
    """Where the runs go and what each of them takes."""

    address: str | None = None
    """Of a running cluster; None: one of this machine alone, for as long as the command runs."""
    cpus: float = 1.0
    gpus: float = 0.0
    """Or a part of one."""


class Board:
    """An actor: what the runs tell the one who waits, and he them."""

    def __init__(self) -> None:
        self._news: list[tuple[int, Event]] = []
        self._stopping = False

    def tell(self, number: int, event: Event) -> None:
        self._news.append((number, event))

    def news(self) -> list[tuple[int, Event]]:
        news, self._news = self._news, []
        return news

    def stop(self) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping


def run_on_ray(runs: Sequence[Run], cluster: Cluster, on_event: OnEvent) -> Iterator[Run]:
    """Run all; each is yielded when its result is there."""
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingExtra("--executor ray", "ray") from error
    _join(ray, cluster)
    try:
        yield from _all(ray, runs, cluster, on_event)
    finally:
        ray.shutdown()


def _join(ray: Any, cluster: Cluster) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would call home
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    told: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = cluster.address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        told["include_dashboard"] = False
    if found := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:([0-9]+)", address):
        try:  # Ray itself would try for minutes
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
        except (OSError, OverflowError) as error:
            problem = f"nothing answers at {address} ({error})"
            raise BadOption("coda bench", "address", problem) from error
    try:
        ray.init(cluster.address, **told)
    except Exception as error:  # Ray raises many kinds
        problem = f"no Ray cluster can be reached there ({' '.join(str(error).split())[:300]}); "
        problem += "one that wants a token wants it in RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token"
        raise BadOption("coda bench", "address", problem) from error
    there = ray.cluster_resources()
    for field, name, asked in (("cpus", "CPU", cluster.cpus), ("gpus", "GPU", cluster.gpus)):
        if asked > there.get(name, 0):
            ray.shutdown()
            problem = f"a run asks for {asked:g}, and the cluster has {there.get(name, 0):g}"
            raise BadOption("coda bench", field, problem)


def _all(ray: Any, runs: Sequence[Run], cluster: Cluster, on_event: OnEvent) -> Iterator[Run]:
    board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board).remote()
    task = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_retries=RETRIES)(_task)
    threads = max(1, int(cluster.cpus))
    waiting = {}
    for number, run in enumerate(runs):
        device = "cpu" if run.device == "auto" and not cluster.gpus else run.device
        there = dataclasses.replace(run, folder=run.folder.absolute(), device=device)
        waiting[task.remote(there, number, board, str(Path.cwd()), threads)] = number
    stop = ShutdownFlag()
    with stop.handling_signals():
        while waiting and not stop():
            ended, _ = ray.wait(list(waiting), num_returns=1, timeout=PAUSE)
            for number, event in _result(ray, board.news.remote()):
                on_event(runs[number], event)
            for reference in ended:
                number = waiting.pop(reference)
                if problem := _result(ray, reference):
                    raise CodaError(problem)
                yield runs[number]
        if waiting:
            _result(ray, board.stop.remote())
            ray.wait(list(waiting), num_returns=len(waiting), timeout=LAST_STEP)
            raise Interrupted


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        cause = " ".join(str(error).split())[:300]
        raise ProcessDied("runs the benchmark", cause, "with more --cpus per run") from error


def _task(run: Run, number: int, board: Any, folder: str, threads: int) -> str | None:
    """One run in a process of the cluster; what a user can cause comes back in words."""
    if os.path.isdir(folder):  # where relative paths are meant from, on a shared disk
        os.chdir(folder)
    torch.set_num_threads(threads)
    ray: Any = importlib.import_module("ray")
    stopping, last = threading.Event(), 0.0

    def asked() -> bool:
        try:  # not by `ray.get`, for whose while Ray gives the CPU to another run
            return bool(board.stopping.remote().future().result())
        except ray.exceptions.RayError:  # the board is lost with its machine and comes again
            return False

    def listen() -> None:
        while not stopping.is_set():
            if asked():
                stopping.set()
            time.sleep(PAUSE)

    def tell(_: Run, event: Event) -> None:
        nonlocal last
        if event.kind != "step" or time.monotonic() - last > PAUSE:
            last = time.monotonic()
            board.tell.remote(number, event)

    if asked():
        return str(Interrupted())
    threading.Thread(target=listen, daemon=True).start()
    try:
        execute(run, _inputs(), tell, stopping.is_set)
    except (CodaError, OSError) as error:
        return str(error)
    finally:
        stopping.set()
    return None


@functools.cache
def _inputs() -> Inputs:
    """Of this process, in which Ray may have one run after another."""
    return Inputs()

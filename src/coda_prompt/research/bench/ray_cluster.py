"""Execute runs as tasks of a Ray cluster: a local one, or a running one by its address."""

from __future__ import annotations

import dataclasses
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

from coda_prompt.errors import BadOption, CodaError, Interrupted, MissingExtra, ProcessDied
from coda_prompt.research.bench.inputs import InputCache
from coda_prompt.research.bench.processes import SHUTDOWN_TIMEOUT
from coda_prompt.research.bench.runner import OnEvent, execute
from coda_prompt.research.bench.runs import Run
from coda_prompt.research.training.settings import Event
from coda_prompt.shutdown import ShutdownFlag

RETRIES = 5
"""How often a run whose worker is lost is retried on another worker."""
POLL_INTERVAL = 0.5
"""Seconds between two polls of the board, and between two step events of a run."""
INPUTS = InputCache()
"""Of this process: a worker may execute several runs one after another."""


@dataclass(frozen=True)
class Cluster:
    """Which Ray cluster to use, and the resources of each run."""

    address: str | None = None
    """Address of a running cluster. Default: a local cluster that ends with the command."""
    cpus: float = 1.0
    """CPUs of each run."""
    gpus: float = 0.0
    """GPUs of each run; 0.5 lets two runs share one."""


class Board:
    """Ray actor between driver and workers: events for the driver, a stop flag for the workers."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._stop_requested = False

    def post(self, number: int, event: Event) -> None:
        self._events.append((number, event))

    def take_events(self) -> list[tuple[int, Event]]:
        events, self._events = self._events, []
        return events

    def request_stop(self) -> None:
        self._stop_requested = True

    def stop_requested(self) -> bool:
        return self._stop_requested


def run_on_ray(runs: Sequence[Run], cluster: Cluster, on_event: OnEvent) -> Iterator[Run]:
    """Execute runs on a Ray cluster and yield each one when it is finished.

    Raises:
        MissingExtra: Ray is not installed.
        BadOption: The cluster cannot be reached or is too small for a run.
        ProcessDied: A run lost its worker more than `RETRIES` times.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingExtra("--executor ray", "ray") from error
    _connect(ray, cluster)
    try:
        yield from _execute_all(ray, runs, cluster, on_event)
    finally:
        ray.shutdown()


def _connect(ray: Any, cluster: Cluster) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = cluster.address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        options["include_dashboard"] = False
    if match := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:([0-9]+)", address):
        try:  # fail at once: Ray would retry for minutes
            socket.create_connection((match[1], int(match[2])), timeout=5).close()
        except (OSError, OverflowError) as error:
            problem = f"nothing answers at {address} ({error})"
            raise BadOption("coda bench", "address", problem) from error
    try:
        ray.init(cluster.address, **options)
    except Exception as error:  # Ray raises exceptions of many types
        problem = f"no Ray cluster can be reached ({' '.join(str(error).split())[:300]}); "
        problem += "if it requires a token, set RAY_AUTH_TOKEN and RAY_AUTH_MODE=token"
        raise BadOption("coda bench", "address", problem) from error
    available = ray.cluster_resources()
    for field, name, required in (("cpus", "CPU", cluster.cpus), ("gpus", "GPU", cluster.gpus)):
        if required > available.get(name, 0):
            ray.shutdown()
            problem = f"a run needs {required:g}, but the cluster has {available.get(name, 0):g}"
            raise BadOption("coda bench", field, problem)


def _execute_all(
    ray: Any, runs: Sequence[Run], cluster: Cluster, on_event: OnEvent
) -> Iterator[Run]:
    board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board).remote()
    task = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_retries=RETRIES)(
        _execute_one
    )
    threads = max(1, int(cluster.cpus))
    pending = {}
    for number, run in enumerate(runs):
        device = "cpu" if run.device == "auto" and not cluster.gpus else run.device
        remote_run = dataclasses.replace(run, folder=run.folder.absolute(), device=device)
        pending[task.remote(remote_run, number, board, str(Path.cwd()), threads)] = number
    should_stop = ShutdownFlag()
    with should_stop.handling_signals():
        while pending and not should_stop():
            finished, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_INTERVAL)
            for number, event in _result(ray, board.take_events.remote()):
                on_event(runs[number], event)
            for reference in finished:
                number = pending.pop(reference)
                if problem := _result(ray, reference):
                    raise CodaError(problem)
                yield runs[number]
        if pending:
            _result(ray, board.request_stop.remote())
            ray.wait(list(pending), num_returns=len(pending), timeout=SHUTDOWN_TIMEOUT)
            raise Interrupted


def _result(ray: Any, reference: Any) -> Any:
    """Return the value of a Ray reference; raise `ProcessDied` if its worker is gone for good."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        cause = " ".join(str(error).split())[:300]
        raise ProcessDied("runs the benchmark", cause, "with more --cpus per run") from error


def _execute_one(run: Run, number: int, board: Any, folder: str, threads: int) -> str | None:
    """Execute one run in a worker of the cluster; return the message of an error."""
    if os.path.isdir(folder):  # relative paths start at the driver's folder, if the disk is shared
        os.chdir(folder)
    torch.set_num_threads(threads)
    ray: Any = importlib.import_module("ray")
    stopping, last_post = threading.Event(), 0.0

    def stop_requested() -> bool:
        try:  # not with `ray.get`: while it waits, Ray lends this run's CPU to another one
            return bool(board.stop_requested.remote().future().result())
        except ray.exceptions.RayError:  # the board's worker was lost; Ray restarts it
            return False

    def poll() -> None:
        while not stopping.is_set():
            if stop_requested():
                stopping.set()
            time.sleep(POLL_INTERVAL)

    def on_event(_: Run, event: Event) -> None:
        nonlocal last_post
        if event.kind != "step" or time.monotonic() - last_post > POLL_INTERVAL:
            last_post = time.monotonic()
            board.post.remote(number, event)

    if stop_requested():
        return str(Interrupted())
    threading.Thread(target=poll, daemon=True).start()
    try:
        execute(run, INPUTS, on_event, stopping.is_set)
    except (CodaError, OSError) as error:
        return str(error)
    finally:
        stopping.set()
    return None

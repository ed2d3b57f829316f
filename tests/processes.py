"""Run commands in subprocesses, for tests of several devices and of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forked import PATIENCE, Forked
from small import CODA

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--standalone", "-m", "coda_prompt"),
)
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
    "OMP_NUM_THREADS": "1",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `coda` to its end."""
    return Forked(CODA, *arguments, environment=ENVIRONMENT).completed()


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Run another command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT
    )


@contextlib.contextmanager
def started_ranks(count: int, program: str, *arguments: str) -> Iterator[list[Forked]]:
    """Start a program on ranks that are forked with the variables of torchrun."""
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port.getsockname()[1])}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    common = {**ENVIRONMENT, **address, **size, "TORCHELASTIC_RUN_ID": "test"}
    ranks = [
        Forked(program, *arguments, environment={**common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(count))
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def run_ranks(count: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks to its end; return the output of rank 0."""
    with started_ranks(count, program, *arguments) as ranks:
        done = [rank.completed() for rank in ranks]
    for rank in done:
        assert rank.returncode == 0, rank.stderr
    return done[0]


@contextlib.contextmanager
def started(*arguments: str, program: str = CODA) -> Iterator[Forked]:
    """Start a program in its own session and kill the whole session at the end."""
    process = Forked(program, *arguments, environment=ENVIRONMENT, new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_checkpoint(out: Path, process: Forked) -> None:
    deadline = time.monotonic() + PATIENCE
    while not list(out.rglob("checkpoint-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)

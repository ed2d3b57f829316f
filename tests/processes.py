"""Run commands in subprocesses, for tests of several devices and of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PLAIN = (sys.executable, "-m", "coda_prompt")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--standalone", "-m", "coda_prompt"),
)
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
    "OMP_NUM_THREADS": "1",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT)


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own session and kill the whole session at the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_checkpoint(out: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not list(out.rglob("checkpoint-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""Run `coda serve` in a process of its own, as a user does."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from forked import PATIENCE, Forked
from PIL import Image
from small import CODA

Files = list[tuple[str, tuple[str, bytes]]]


@contextlib.contextmanager
def served(*arguments: str, before: str = "", **environment: str) -> Iterator[httpx.Client]:
    """Yield a client of `coda serve ARGUMENTS`; `before` is Python code that runs first."""
    port = () if "--port" in arguments else ("--port", "0")
    process = Forked(
        before + CODA, "serve", *arguments, *port,
        environment={**os.environ, **environment},
    )  # fmt: skip
    try:
        url = _wait_for_url(process)
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            client.pid = process.pid  # type: ignore[attr-defined]
            client.log = lambda: process.output()[1]  # type: ignore[attr-defined]
            yield client
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_url(process: Forked) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"http://\S+(?=\s)", process.output()[1]):
            return match[0]
        time.sleep(0.02)
    raise AssertionError(f"the service did not start: {process.output()[1]}")


def png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG")
    return buffer.getvalue()


def files(images: Any) -> Files:
    return [("images", ("image.png", png(image))) for image in images]


def teach(client: httpx.Client, images: Any, labels: list[str]) -> dict[str, Any]:
    started = client.post("/v1/learn", files=files(images), data={"labels": labels})
    assert started.status_code == 202, started.text
    job: dict[str, Any] = started.json()
    return job


def wait_for_job(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until a lesson has ended and return its state."""
    deadline = time.monotonic() + PATIENCE
    while job["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        job = client.get(f"/v1/jobs/{job['id']}").json()
    return job


def peak_memory(pid: int) -> int:
    """Return the most bytes of memory that a process has had so far."""
    (line,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(line) * 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, which does not depend on the load of the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]

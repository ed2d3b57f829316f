"""A service in its own process, as a user starts it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import selectors
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from small import CODA

Files = list[tuple[str, tuple[str, bytes]]]


@contextlib.contextmanager
def served(*arguments: str, before: str = "", **environment: str) -> Iterator[httpx.Client]:
    """A client of `coda serve ARGUMENTS`; `before` is Python run first, for limits."""
    command = list(CODA)
    command[-1] = before + command[-1]
    process = subprocess.Popen(
        [*command, "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        address = _address(process)
        with httpx.Client(base_url=address, timeout=60) as client:
            client.pid = process.pid  # type: ignore[attr-defined]
            yield client
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    told = ""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stderr, selectors.EVENT_READ)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if waiting.select(1):
                line = process.stderr.readline()
                told += line
                if found := re.search(r"http://\S+", line):
                    return found[0]
                if not line:
                    break
    raise AssertionError(f"the service did not start: {told}")


def png(pixels: Any) -> bytes:
    held = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(held, "PNG")
    return held.getvalue()


def files(images: Any) -> Files:
    return [("images", ("image.png", png(image))) for image in images]


def teach(client: httpx.Client, images: Any, labels: list[str]) -> dict[str, Any]:
    started = client.post("/v1/learn", files=files(images), data={"labels": labels})
    assert started.status_code == 202, started.text
    job: dict[str, Any] = started.json()
    return job


def ended(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """The job when it has ended."""
    deadline = time.monotonic() + 120
    while job["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        job = client.get(f"/v1/jobs/{job['id']}").json()
    return job


def children_of(pid: int) -> list[int]:
    held = Path(f"/proc/{pid}/task")
    found = []
    for task in held.iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found

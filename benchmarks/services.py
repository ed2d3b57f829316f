"""Start `coda serve` for a benchmark, as a user does: a new process with all cores."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx

PATIENCE = 120.0
"""Seconds a service may take to start or to answer."""


@contextlib.contextmanager
def service(*arguments: str) -> Iterator[httpx.Client]:
    """Yield a client of `coda serve ARGUMENTS`."""
    command = [sys.executable, "-m", "coda_prompt", "serve", *arguments, "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(command, stdout=messages, stderr=subprocess.STDOUT) as process,
    ):
        try:
            deadline, url = time.monotonic() + PATIENCE, None
            while url is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("The service did not start.")
                time.sleep(0.05)
                messages.seek(0)
                url = re.search(r"http://\S+(?=\s)", messages.read())
            with httpx.Client(base_url=url[0], timeout=PATIENCE) as client:
                yield client
        finally:
            process.terminate()

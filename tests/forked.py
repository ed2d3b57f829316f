"""Python programs in forks of a process that has imported everything (zygote.py)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

PATIENCE = 600.0
"""Seconds to wait for anything: a busy machine is not a failure."""


class Forked:
    """A program in a forked process, with the interface of `subprocess.Popen`.

    Variables that torch, Fabric or matplotlib read when imported have no effect in `environment`.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        cwd: Path | None = None,
        input: str = "",
        environment: Mapping[str, str] = os.environ,
        new_session: bool = False,
    ) -> None:
        if os.name != "posix":
            pytest.skip("POSIX only: starts processes by fork")
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._files = [folder / name for name in ("stdin", "stdout", "stderr")]
        for path, content in zip(self._files, (input, "", ""), strict=True):
            path.write_text(content)
        self._exit_code = folder / "exit-code"
        self.returncode: int | None = None
        self.args = (program, *arguments)
        request = {
            "program": program,
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "environment": {"OMP_NUM_THREADS": "1", **environment},
            "files": [str(path) for path in self._files],
            "exit_code": str(self._exit_code),
            "new_session": new_session,
        }
        zygote = _zygote()
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        self.pid = int(zygote.stdout.readline())

    def poll(self) -> int | None:
        if self.returncode is None and self._exit_code.exists():
            self.returncode = int(self._exit_code.read_text())
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.005)
        return code

    def output(self) -> tuple[str, str]:
        """Standard output and error so far."""
        stdout, stderr = (path.read_text("utf-8", "surrogateescape") for path in self._files[1:])
        return stdout, stderr

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        self.wait(timeout)
        return self.output()

    def send_signal(self, number: int) -> None:
        # Between the end of the process and its exit code, there is nothing to send a signal to.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def completed(self, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Wait for the end, as `subprocess.run` does; kill it after `timeout` seconds."""
        try:
            output = self.communicate(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert self.returncode is not None
        return subprocess.CompletedProcess(self.args, self.returncode, *output)


@functools.cache
def _zygote() -> subprocess.Popen[str]:
    """The process of zygote.py, which exits with the tests."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

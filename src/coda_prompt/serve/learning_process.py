"""The service's side of its learning process: start it, send lessons, replace it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from coda_prompt.errors import CodaError
from coda_prompt.serve import learning
from coda_prompt.serve.uploads import Example

MAX_REASON_LENGTH = 400
MAX_LINE_BYTES = 2**24


class LearningProcessDied(CodaError):
    """The learning process ended in the middle of a lesson."""


class LearningProcess:
    """A process that has the model loaded and runs one lesson after the other.

    Args:
        folder: The model folder.
        backbone: As in `ContinualClassifier.load`.
    """

    def __init__(self, folder: Path, backbone: str | None) -> None:
        self._command = (sys.executable, "-m", learning.__name__, str(folder), json.dumps(backbone))
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._stderr: asyncio.Task[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    def warm_up(self) -> None:
        """Start the process if there is none, in the background."""
        if not self.running and not self._lock.locked():
            self._in_background(self._warm_up())

    def refresh(self) -> None:
        """Let the process read the model again, in the background, if it is running."""
        if self.running:
            self._in_background(self._refresh())

    async def teach(self, examples: list[Example]) -> AsyncIterator[dict[str, Any]]:
        """Run a lesson.

        Yields:
            The lines of the process, until it waits for the next lesson.

        Raises:
            LearningProcessDied: The process ended before the lesson did. A new one was started.
        """
        async with self._lock:
            try:
                async for message in self._retried(examples):
                    yield message
            except (GeneratorExit, asyncio.CancelledError):
                await self._kill()
                raise
            except LearningProcessDied:
                if not self._closed:
                    self._in_background(self._warm_up())
                raise

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kill()

    async def _warm_up(self) -> None:
        async with self._lock:
            with contextlib.suppress(LearningProcessDied):
                await self._started()

    async def _refresh(self) -> None:
        async with self._lock:
            with contextlib.suppress(LearningProcessDied):
                async for _ in self._exchange(await self._started(), []):
                    pass

    async def _started(self) -> Process:
        """Return the process, started if there is none, when it waits for a lesson."""
        if self._process is None or self._process.returncode is not None:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES
            )
            assert process.stderr is not None
            self._stderr = asyncio.create_task(_last_line(process.stderr))
            async for _ in self._lines(process):
                pass
        return self._process

    async def _retried(self, examples: list[Example]) -> AsyncIterator[dict[str, Any]]:
        """Run a lesson; start again if the process had died before it, which shows only now."""
        begun = False
        try:
            async for message in self._exchange(await self._started(), examples):
                begun = True
                yield message
        except LearningProcessDied:
            if begun:
                raise
            async for message in self._exchange(await self._started(), examples):
                yield message

    async def _exchange(
        self, process: Process, examples: list[Example]
    ) -> AsyncIterator[dict[str, Any]]:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(learning.encode_examples(examples))
            await process.stdin.drain()
        async for message in self._lines(process):
            yield message

    async def _lines(self, process: Process) -> AsyncIterator[dict[str, Any]]:
        """Yield the lines of the process up to `idle`."""
        assert process.stdout is not None
        async for line in process.stdout:
            message: dict[str, Any] = json.loads(line)
            if message["kind"] == "idle":
                return
            yield message
        code = await process.wait()
        assert self._stderr is not None
        last = (await self._stderr).decode("utf-8", "replace").strip()[:MAX_REASON_LENGTH]
        raise LearningProcessDied(f"The learning process died ({last or f'exit code {code}'}).")

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _last_line(stream: asyncio.StreamReader) -> bytes:
    last = b""
    async for line in stream:
        last = line if line.strip() else last
    return last

"""Batching: images of concurrent requests share one forward pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from coda_prompt.serve.uploads import RequestError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class _Call(Generic[Item, Result]):
    items: Sequence[Item]
    results: asyncio.Future[list[Result]]


class Batcher(Generic[Item, Result]):
    """Runs `process` in one thread, on the items of several callers at once.

    Args:
        process: Returns one result per item.
        max_batch: Items per call of `process`; a larger call of `run` is not split.
        max_wait: Seconds to wait for further callers.
        max_waiting: Items that may wait; more are refused with status 429.
    """

    def __init__(
        self,
        process: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        max_batch: int = 64,
        max_wait: float = 0.004,
        max_waiting: int = 512,
    ) -> None:
        self._process = process
        self.max_batch, self.max_wait, self.max_waiting = max_batch, max_wait, max_waiting
        self.waiting = 0
        self._queue: asyncio.Queue[_Call[Item, Result]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "batches")
        self._worker: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count items as waiting, or refuse them if too many are waiting already."""
        if self.waiting + count > self.max_waiting:
            raise RequestError(429, "Too many images are waiting. Retry in 1 s.", retry_after=1)
        self.waiting += count
        try:
            yield
        finally:
            self.waiting -= count

    async def run(self, items: Sequence[Item]) -> list[Result]:
        """Process admitted items together with those of other callers."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        call: _Call[Item, Result] = _Call(items, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(call)
        return await call.results

    async def close(self) -> None:
        """Finish all admitted items, then stop."""
        while not self._queue.empty() or self.waiting:
            await asyncio.sleep(0.005)
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            calls = await self._next_batch()
            items = [item for call in calls for item in call.items]
            try:
                results = list(await loop.run_in_executor(self._thread, self._process, items))
            except Exception as error:  # noqa: BLE001 (raised in the callers)
                for call in calls:
                    if not call.results.done():
                        call.results.set_exception(error)
                continue
            for call in calls:
                count = len(call.items)
                if not call.results.done():  # done: the caller has timed out
                    call.results.set_result(results[:count])
                del results[:count]

    async def _next_batch(self) -> list[_Call[Item, Result]]:
        calls = [await self._queue.get()]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.max_wait
        count = len(calls[0].items)
        while count < self.max_batch:
            left = deadline - loop.time()
            try:
                if left > 0:
                    call = await asyncio.wait_for(self._queue.get(), left)
                else:
                    call = self._queue.get_nowait()
            except (asyncio.QueueEmpty, asyncio.TimeoutError):
                break
            calls.append(call)
            count += len(call.items)
        return calls

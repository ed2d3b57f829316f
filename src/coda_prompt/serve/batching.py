"""Images of concurrent requests, gathered for a few milliseconds into one pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from coda_prompt.serve.uploads import Refused

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass
class _Asked(Generic[Question, Answer]):
    questions: Sequence[Question]
    answers: asyncio.Future[list[Answer]]


class Batcher(Generic[Question, Answer]):
    """`answer` is called in one thread, with the questions of many callers together."""

    def __init__(
        self,
        answer: Callable[[Sequence[Question]], Sequence[Answer]],
        *,
        most: int = 64,
        wait: float = 0.004,
        waiting: int = 512,
    ) -> None:
        """`most`: questions at a time; `wait`: seconds to gather; `waiting`: then it is full."""
        self._answer, self.most, self.wait, self.limit = answer, most, wait, waiting
        self.waiting = 0
        self._queue: asyncio.Queue[_Asked[Question, Answer]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "passes")
        self._loop: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """So many questions come, and are waited for from here on."""
        if self.waiting + count > self.limit:
            raise Refused(429, "Too many images are waiting. Try again in a second.", retry=1)
        self.waiting += count
        try:
            yield
        finally:
            self.waiting -= count

    async def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Of one who was admitted."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve())
        asked: _Asked[Question, Answer] = _Asked(
            questions, asyncio.get_running_loop().create_future()
        )
        self._queue.put_nowait(asked)
        return await asked.answers

    async def close(self) -> None:
        """What was asked is answered first."""
        while not self._queue.empty() or self.waiting:
            await asyncio.sleep(0.005)
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        self._thread.shutdown()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            together = await self._gathered()
            questions = [question for asked in together for question in asked.questions]
            try:
                answers = list(await loop.run_in_executor(self._thread, self._answer, questions))
            except Exception as error:  # noqa: BLE001 (it is the callers' to hear)
                for asked in together:
                    if not asked.answers.done():
                        asked.answers.set_exception(error)
                continue
            for asked in together:
                own, answers = answers[: len(asked.questions)], answers[len(asked.questions) :]
                if not asked.answers.done():  # its caller may have given up
                    asked.answers.set_result(own)

    async def _gathered(self) -> list[_Asked[Question, Answer]]:
        together = [await self._queue.get()]
        until = asyncio.get_running_loop().time() + self.wait
        count = len(together[0].questions)
        while count < self.most:
            left = until - asyncio.get_running_loop().time()
            try:
                more = (
                    self._queue.get_nowait()
                    if left <= 0
                    else await asyncio.wait_for(self._queue.get(), left)
                )
            except (asyncio.QueueEmpty, asyncio.TimeoutError):
                break
            together.append(more)
            count += len(more.questions)
        return together

"""A model that predicts and learns at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr
from torch import Tensor

from coda_prompt.errors import CodaError
from coda_prompt.learner import store
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.predictor import Predictor
from coda_prompt.serve import learning
from coda_prompt.serve.batching import Batcher
from coda_prompt.serve.schemas import JobState
from coda_prompt.serve.uploads import Example, RequestError, decode_image

MAX_JOBS = 100
"""Jobs whose state is remembered; older ones are dropped."""
MAX_REASON_LENGTH = 400


@dataclass(frozen=True)
class Version:
    """One version of the model; its name is part of every answer."""

    name: str
    classifier: ContinualClassifier
    classes: tuple[str, ...]

    @cached_property
    def predictor(self) -> Predictor:
        return self.classifier.predictor


@dataclass(frozen=True)
class Answer:
    """The class probabilities of one image."""

    version: Version
    probabilities: Tensor
    typicality: float | None
    """How typical the image is of the learned classes; None in models of earlier versions."""


class Job(JobState):
    """State of a lesson, from the request to the new version."""

    _started: float = PrivateAttr(default_factory=time.time)
    _changed: asyncio.Event = PrivateAttr(default_factory=asyncio.Event)

    @property
    def seconds(self) -> float:
        """Time since the request."""
        return time.time() - self._started

    def update(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def states(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the current state and every later one, until the lesson has ended."""
        while True:
            changed = self._changed
            yield self.model_dump()
            if self.state != "running":
                return
            await changed.wait()


class Service:
    """Predicts with the current version; runs one lesson at a time in a process of its own.

    When a lesson is saved, predictions switch to the new version atomically.
    """

    def __init__(
        self, folder: Path, *, batching: bool, device: str, backbone: str | None, method: str | None
    ) -> None:
        """`backbone` and `method`: as in `ContinualClassifier.load`."""
        self.folder, self.device = folder, device
        self.parts: dict[str, Any] = {"backbone": backbone, "method": method}
        self.current = self._read()
        self.jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._write_lock = asyncio.Lock()
        self._lessons: set[asyncio.Task[None]] = set()
        limits: dict[str, Any] = {} if batching else {"max_batch": 1, "max_wait": 0.0}
        self.batcher: Batcher[Tensor, Answer] = Batcher(self._predict_batch, **limits)
        self.passes = 0

    # -- predicting

    def preprocess(self, content: bytes, name: str) -> Tensor:
        """Decode an image file and return it as the backbone expects it."""
        predictor = self.current.predictor
        return predictor.preprocess(decode_image(content, name, predictor.min_side))

    def _predict_batch(self, views: Sequence[Tensor]) -> list[Answer]:
        version = self.current
        scored = version.predictor.detector is not None
        probabilities, typicality = version.predictor.answers(views, typicality=scored)
        self.passes += 1
        shares = [None] * len(views) if typicality is None else typicality.tolist()
        return [Answer(version, *each) for each in zip(probabilities, shares, strict=True)]

    # -- learning

    def start_lesson(self, examples: list[Example]) -> Job:
        """Start learning in the background."""
        self._refuse_while_learning()
        classes = list(dict.fromkeys(example.label for example in examples))
        job = Job(id=f"{next(self._numbers)}", images=len(examples), classes=classes)
        self.jobs[job.id] = job
        for old in list(self.jobs)[:-MAX_JOBS]:
            del self.jobs[old]
        lesson = asyncio.create_task(self._run_lesson(job, examples))
        self._lessons.add(lesson)
        lesson.add_done_callback(self._lessons.discard)
        return job

    def _refuse_while_learning(self) -> None:
        if self.learning:
            raise RequestError(409, "A lesson is running. Wait until it ends.", retry_after=2)

    @property
    def learning(self) -> bool:
        """Whether a lesson is running."""
        return any(job.state == "running" for job in self.jobs.values())

    async def undo(self) -> Version:
        """Restore the version before the newest task."""
        self._refuse_while_learning()
        async with self._write_lock:
            await asyncio.to_thread(self._undo)
            self.current = await asyncio.to_thread(self._read)
        return self.current

    async def close(self) -> None:
        """Answer pending predictions; cancel a running lesson, which leaves the model unchanged."""
        await self.batcher.close()
        for lesson in list(self._lessons):
            lesson.cancel()
        await asyncio.gather(*self._lessons, return_exceptions=True)

    async def _run_lesson(self, job: Job, examples: list[Example]) -> None:
        try:
            async with self._write_lock:
                await self._learn(job, examples)
        except asyncio.CancelledError:
            job.update(state="failed", reason="The service was stopped.")
            raise
        except CodaError as error:
            job.update(state="failed", reason=str(error))
        except Exception as error:  # noqa: BLE001 (shown in the state of the job)
            job.update(state="failed", reason=f"{type(error).__name__}: {error}")

    async def _learn(self, job: Job, examples: list[Example]) -> None:
        learned, reason = await self._run_process(job, examples)
        if reason is not None and await asyncio.to_thread(self._is_current):
            job.update(state="failed", reason=reason)
            return
        self.current = await asyncio.to_thread(self._read)
        if learned is None:  # the process died after it had saved the new version
            learned = {**self.current.classifier.tasks_[-1], "seconds": job.seconds}
        job.update(
            state="done", stage="done", share=1.0, seconds_left=0.0,
            learned=learned, version=self.current.name,
        )  # fmt: skip

    async def _run_process(
        self, job: Job, examples: list[Example]
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Run the learning process; return its results and the reason if it failed."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", learning.__name__, str(self.folder), json.dumps(self.parts),
            stdin=pipe, stdout=pipe, stderr=pipe, limit=2**24,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stderr = asyncio.create_task(process.stderr.read())
        learned: dict[str, Any] | None = None
        reason: str | None = None
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(learning.encode_examples(examples))
                await process.stdin.drain()
                process.stdin.close()
            async for line in process.stdout:
                message: dict[str, Any] = json.loads(line)
                kind = message.pop("kind", None)
                if kind == "progress":
                    job.update(**message)
                elif kind == "learned":
                    learned = message
                elif kind == "failed":
                    reason = message["reason"]
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        lines = (await stderr).decode("utf-8", "replace").strip().splitlines()
        if (code != 0 or learned is None) and reason is None:
            last = lines[-1][:MAX_REASON_LENGTH] if lines else f"exit code {code}"
            reason = f"The learning process died ({last})."
        return learned, reason

    # -- model folder

    def _read(self) -> Version:
        classifier = ContinualClassifier.load(self.folder, device=self.device, **self.parts)
        digest = store.model_sha256(self.folder) or ""
        name = f"{len(classifier.tasks_)}-{digest[:8]}"
        return Version(name, classifier, tuple(classifier.classes_))

    def _is_current(self) -> bool:
        """Return whether the current version is the one on disk."""
        digest = store.model_sha256(self.folder) or ""
        return self.current.name.endswith(f"-{digest[:8]}")

    def _undo(self) -> None:
        with store.exclusive_writer(self.folder):
            store.restore_previous(self.folder)

"""A model that is asked and taught at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from coda_prompt.errors import CodaError
from coda_prompt.learner import store
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.predictor import Predictor
from coda_prompt.serve import learning
from coda_prompt.serve.batching import Batcher
from coda_prompt.serve.uploads import Example, Refused, image_of

State = Literal["running", "done", "failed"]
MOST_JOBS = 100
"""Finished jobs that are remembered."""
LAST_WORDS = 400


@dataclass(frozen=True)
class Version:
    """One state of the model; its name is in every answer."""

    name: str
    classifier: ContinualClassifier
    classes: tuple[str, ...]

    @cached_property
    def predictor(self) -> Predictor:
        return self.classifier.predictor


@dataclass(frozen=True)
class Answer:
    version: Version
    probabilities: Tensor


@dataclass
class Job:
    """A lesson: images of classes, from the request to the new version."""

    number: str
    images: int
    classes: tuple[str, ...]
    state: State = "running"
    stage: str = "starting"
    share: float = 0.0
    seconds_left: float | None = None
    reason: str | None = None
    learned: dict[str, Any] | None = None
    version: str | None = None
    began: float = field(default_factory=time.time)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self) -> dict[str, Any]:
        names = ("state", "stage", "share", "seconds_left", "reason", "learned", "version")
        found = {name: getattr(self, name) for name in names}
        return {"id": self.number, "images": self.images, "classes": list(self.classes), **found}

    def change(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """How it stands now, and whenever that changes, to its end."""
        while True:
            changed = self.changed
            yield self.told()
            if self.state != "running":
                return
            await changed.wait()


class Service:
    """Answers with one version until the next one is saved; one lesson at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        batching: bool = True,
        device: str = "auto",
        method: str | None = None,
    ) -> None:
        """`method`: `file.py:Class`, for a model that was made with a method of one's own."""
        self.folder, self.device, self.method = folder, device, method
        self.current = self._read()
        self.jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._lessons: set[asyncio.Task[None]] = set()
        self.batcher: Batcher[Tensor, Answer] = (
            Batcher(self._answers) if batching else Batcher(self._answers, most=1, wait=0.0)
        )
        self.passes = 0

    # -- asking

    def view(self, content: bytes, name: str) -> Tensor:
        predictor = self.current.predictor
        return predictor.preprocess(image_of(content, name, predictor.min_side))

    async def predict(self, views: Sequence[Tensor]) -> list[Answer]:
        return await self.batcher.ask(views)

    def _answers(self, views: Sequence[Tensor]) -> list[Answer]:
        version = self.current
        probabilities = version.predictor.probabilities(views)
        self.passes += 1
        return [Answer(version, row) for row in probabilities]

    # -- teaching

    def teach(self, examples: list[Example]) -> Job:
        """Start a lesson in its own process."""
        if self.learning:
            raise Refused(409, "A lesson is going on. Wait until it has ended.", retry=2)
        names = tuple(dict.fromkeys(example.label for example in examples))
        job = Job(f"{next(self._numbers)}", len(examples), names)
        self.jobs[job.number] = job
        for old in list(self.jobs)[:-MOST_JOBS]:
            del self.jobs[old]
        lesson = asyncio.create_task(self._lesson(job, examples))
        self._lessons.add(lesson)
        lesson.add_done_callback(self._lessons.discard)
        return job

    @property
    def learning(self) -> bool:
        return any(job.state == "running" for job in self.jobs.values())

    async def undo(self) -> Version:
        if self.learning:
            raise Refused(409, "A lesson is going on. Wait until it has ended.", retry=2)
        async with self._changing:
            await asyncio.to_thread(self._undo)
            self.current = await asyncio.to_thread(self._read)
        return self.current

    async def close(self) -> None:
        """Answer what was asked; a lesson that goes on is given up, and leaves the model whole."""
        await self.batcher.close()
        for lesson in list(self._lessons):
            lesson.cancel()
        await asyncio.gather(*self._lessons, return_exceptions=True)

    async def _lesson(self, job: Job, examples: list[Example]) -> None:
        try:
            async with self._changing:
                await self._learned(job, examples)
        except asyncio.CancelledError:
            job.change(state="failed", reason="The service was stopped.")
            raise
        except CodaError as error:
            job.change(state="failed", reason=str(error))
        except Exception as error:  # noqa: BLE001 (a lesson that fails must not be silent)
            job.change(state="failed", reason=f"{type(error).__name__}: {error}")

    async def _learned(self, job: Job, examples: list[Example]) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", learning.__name__, str(self.folder), *filter(None, [self.method]),
            stdin=pipe, stdout=pipe, stderr=pipe, limit=2**24,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(learning.sent(examples))
                await process.stdin.drain()
                process.stdin.close()
            learned: dict[str, Any] | None = None
            reason: str | None = None
            async for line in process.stdout:
                told: dict[str, Any] = json.loads(line)
                kind = told.pop("kind", None)
                if kind == "progress":
                    job.change(**told)
                elif kind == "learned":
                    learned = told
                elif kind == "failed":
                    reason = told["reason"]
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        words = (await errors).decode("utf-8", "replace").strip()
        if (code != 0 or learned is None) and await asyncio.to_thread(self._is_current):
            last = words.splitlines()[-1][:LAST_WORDS] if words else f"exit code {code}"
            job.change(state="failed", reason=reason or f"The learning process died ({last}).")
            return
        self.current = await asyncio.to_thread(self._read)
        if learned is None:  # it died after the lesson had been saved
            learned = {**self.current.classifier.tasks_[-1], "seconds": time.time() - job.began}
        job.change(state="done", stage="done", share=1.0, seconds_left=0.0,
                   learned=learned, version=self.current.name)  # fmt: skip

    # -- the folder

    def _read(self) -> Version:
        classifier = ContinualClassifier.load(self.folder, method=self.method, device=self.device)
        digest = store.model_sha256(self.folder) or ""
        name = f"{len(classifier.tasks_)}-{digest[:8]}"
        return Version(name, classifier, tuple(classifier.classes_))

    def _is_current(self) -> bool:
        """Whether the model on disk is the one that answers."""
        digest = store.model_sha256(self.folder) or ""
        return self.current.name.endswith(f"-{digest[:8]}")

    def _undo(self) -> None:
        with store.exclusive_writer(self.folder):
            store.restore_previous(self.folder)

"""A model that predicts and learns at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from pydantic import PrivateAttr

from coda_prompt.encoder.encoder import Encoder
from coda_prompt.encoder.threads import in_threads
from coda_prompt.errors import CodaError
from coda_prompt.learner.classifier import ContinualClassifier, edited
from coda_prompt.learner.explanation import Explanation, explain
from coda_prompt.learner.folder import ModelFolder
from coda_prompt.learner.model import LearnedModel
from coda_prompt.learner.predict import Answer, answer
from coda_prompt.serve.batching import Batcher
from coda_prompt.serve.learning_process import LearningProcess, LearningProcessDied
from coda_prompt.serve.schemas import JobState, ServiceState
from coda_prompt.serve.uploads import Example, RequestError, decode_image
from coda_prompt.statistics.typicality import images_needed
from coda_prompt.statistics.unknown import DEFAULT_RATE

MAX_JOBS = 100
"""Jobs whose state is remembered; older ones are dropped."""
FOLLOW_SECONDS = 1.0
"""Time between two polls of the model folder for versions of other processes."""

Result = TypeVar("Result")
HEARTBEAT = 10.0
"""Seconds after which the stream of states repeats the last one, to show that it is alive."""


@dataclass(frozen=True)
class Version:
    """One version of the model; its name is part of every answer."""

    name: str
    classifier: ContinualClassifier
    classes: tuple[str, ...]

    @property
    def model(self) -> LearnedModel:
        """What has been learned.

        Raises:
            RequestError: Nothing.
        """
        if not self.classes:
            raise RequestError(409, "The model has not learned any class yet.")
        return self.classifier.model

    @cached_property
    def missing_images(self) -> int:
        """How many more images `unknown=auto` needs at its default rate."""
        if not self.classes:
            return images_needed(DEFAULT_RATE)
        return self.model.scorer.missing_images(DEFAULT_RATE)


@dataclass(frozen=True)
class Answered:
    """The answer for one image, and the version that gave it."""

    version: Version
    answer: Answer


class Job(JobState):
    """State of a lesson, from the request to the new version."""

    _started: float = PrivateAttr(default_factory=time.time)

    @property
    def seconds(self) -> float:
        """Time since the request."""
        return time.time() - self._started

    @property
    def ended(self) -> bool:
        """Whether the state will not change any more."""
        return self.state == "failed" or self.stage == "done"


class Service:
    """Predicts with the current version; runs one lesson at a time in a process of its own.

    When a lesson is saved, predictions switch to the new version atomically.

    Args:
        folder: The model folder.
        batching: Whether concurrent requests share forward passes.
        backbone: As in `ContinualClassifier.load`.
        temporary: Whether the folder is deleted when the service stops.
    """

    def __init__(
        self,
        folder: Path,
        *,
        batching: bool,
        backbone: str | None = None,
        temporary: bool = False,
    ) -> None:
        self.folder, self.temporary = ModelFolder(folder), temporary
        self.backbone = backbone
        self.current = self._read(backbone)
        self.process = LearningProcess(folder, backbone)
        self._changed = asyncio.Event()
        self.closing = False
        self.jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._write_lock = asyncio.Lock()
        self._edit_lock = asyncio.Lock()
        self.exporting = asyncio.Lock()
        self._lessons: set[asyncio.Task[None]] = set()
        limits: dict[str, Any] = {} if batching else {"max_batch": 1, "max_wait": 0.0}
        self.batcher: Batcher[Image.Image, Answered] = Batcher(self._predict_batch, **limits)
        self.passes = 0

    # -- predicting

    def explain(self, content: bytes) -> tuple[Version, Explanation]:
        """Return how the answer for an image file comes about, and the version that answers."""
        version = self.current
        return version, explain(version.model, self.decode(content, "the image"))

    def decode(self, content: bytes, name: str) -> Image.Image:
        """Decode an image file."""
        return decode_image(content, name, self.current.model.encoder.min_side)

    def _predict_batch(self, images: Sequence[Image.Image]) -> list[Answered]:
        version = self.current
        model = version.model
        self.passes += 1
        return [
            Answered(version, each)
            for each in in_threads(lambda image: answer(model, image, typicality=True), images)
        ]

    # -- learning

    def start_lesson(self, examples: list[Example]) -> Job:
        """Start learning in the background."""
        self._refuse_while_learning()
        classes = list(dict.fromkeys(example.label for example in examples))
        job = Job(id=f"{next(self._numbers)}", images=len(examples), classes=classes)
        self.jobs[job.id] = job
        for old in list(self.jobs)[:-MAX_JOBS]:
            del self.jobs[old]
        self._notify()
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

    async def restore(self, to: int | None = None, *, redo: bool = False) -> None:
        """Restore another version; arguments as in `ModelFolder.restore`."""

        def restore() -> None:
            with self.folder.writing() as at_end:
                self.folder.restore(at_end, to, redo=redo)

        await self._change(restore)

    async def edit(
        self, change: Callable[[ContinualClassifier], Result], *, forgets: bool = False
    ) -> Result:
        """Change the model on disk, which may be newer than the current version, and read it."""

        def edit() -> Result:
            with edited(self.folder, forgets=forgets, backbone=self.encoder) as classifier:
                return change(classifier)

        return await self._change(edit)

    async def read(self, question: Callable[[ContinualClassifier], Result]) -> Result:
        """Ask the current version something that takes time."""
        async with self._write_lock:
            return await asyncio.to_thread(question, self.current.classifier)

    async def after_edits(self) -> Version:
        """Return the current version after a running edit, which may forget a class, has ended."""
        async with self._edit_lock:
            return self.current

    async def follow_folder(self) -> None:
        """Switch to a version that another process has written, as long as the service runs."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            with contextlib.suppress(CodaError, OSError):
                async with self._write_lock:
                    if not await asyncio.to_thread(self._is_current):
                        await self._switch()

    async def _change(self, change: Callable[[], Result]) -> Result:
        self._refuse_while_learning()
        async with self._edit_lock, self._write_lock:
            result = await asyncio.to_thread(change)
            await self._switch()
        self.process.refresh()
        return result

    @property
    def state(self) -> ServiceState:
        """The version, and the newest lesson since the service started."""
        newest = next(reversed(self.jobs.values()), None)
        return ServiceState(version=self.current.name, learning=self.learning, job=newest)

    async def states(self, job: Job | None = None) -> AsyncIterator[dict[str, Any]]:
        """Yield a state at every change and every few seconds, until the service closes.

        Args:
            job: The lesson to follow, until it has ended; None: the service.
        """
        while True:
            changed = self._changed  # read before the state
            yield (job or self.state).model_dump()
            if self.closing or (job is not None and job.ended):
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), HEARTBEAT)

    def _notify(self) -> None:
        """Wake everyone who follows the state."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end_streams(self) -> None:
        """End the streams of states, which would delay a shutdown."""
        self.closing = True
        self._notify()

    async def close(self) -> None:
        """Answer pending predictions; cancel a running lesson, which leaves the model unchanged."""
        self.end_streams()
        await self.batcher.close()
        for lesson in list(self._lessons):
            lesson.cancel()
        await asyncio.gather(*self._lessons, return_exceptions=True)
        await self.process.close()

    async def _run_lesson(self, job: Job, examples: list[Example]) -> None:
        try:
            async with self._write_lock:
                await self._learn(job, examples)
        except asyncio.CancelledError:
            if not job.ended:
                self._update(job, state="failed", reason="The service was stopped.")
            raise
        except CodaError as error:
            self._update(job, state="failed", reason=str(error))
        except Exception as error:  # noqa: BLE001 (shown in the state of the job)
            self._update(job, state="failed", reason=f"{type(error).__name__}: {error}")

    async def _learn(self, job: Job, examples: list[Example]) -> None:
        """Run a lesson; the new version answers as soon as it is saved."""
        try:
            async for message in self.process.teach(examples):
                kind = message.pop("kind")
                if kind == "failed":
                    self._update(job, state="failed", reason=message["reason"])
                elif kind == "progress":
                    self._update(job, **message)
                elif job.state == "running":
                    await self._finish(job, message)
                else:  # what the lesson made the model forget was measured
                    self._update(job, learned=message)
        except LearningProcessDied:
            if job.state == "running":
                if await asyncio.to_thread(self._is_current):
                    raise
                await self._finish(job, None)  # it died after it had saved the new version
        if job.state == "done":
            self._update(job, stage="done")

    async def _finish(self, job: Job, learned: dict[str, Any] | None) -> None:
        """Switch to the version a lesson has saved."""
        await self._switch()
        if learned is None:
            learned = {**self.current.classifier.tasks_[-1], "seconds": job.seconds}
        self._update(
            job, state="done", stage="checking", share=1.0, seconds_left=0.0,
            learned=learned, version=self.current.name,
        )  # fmt: skip

    def _update(self, job: Job, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(job, name, value)
        self._notify()

    # -- model folder

    async def _switch(self) -> None:
        """Predict with the version in the folder from now on."""
        self.current = await asyncio.to_thread(self._read, self.encoder)
        self._notify()

    @property
    def encoder(self) -> Encoder:
        """The encoder of the model, loaded once."""
        return self.current.classifier.model.encoder

    def _read(self, backbone: str | Encoder | None) -> Version:
        """Read the version in the folder, onto an encoder that may be loaded already."""
        classifier = ContinualClassifier.load(self.folder.path, backbone=backbone, verbose=False)
        digest = self.folder.sha256 or ""
        name = f"{len(classifier.tasks_)}-{digest[:8]}"
        return Version(name, classifier, tuple(classifier.model.classes))

    def _is_current(self) -> bool:
        """Return whether the current version is the one on disk."""
        digest = self.folder.sha256 or ""
        return self.current.name.endswith(f"-{digest[:8]}")

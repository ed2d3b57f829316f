"""The learning process of the service: it has the model loaded before a lesson comes.

    python -m coda_prompt.serve.learning MODEL BACKBONE

BACKBONE is JSON: null or a text, as in `ContinualClassifier.load`. Standard input, for
each lesson: a JSON line with `labels` and `sizes`, then the image files' bytes; a lesson without
images reloads the model if it has changed. Standard output: JSON lines with a `kind` (`progress`,
`learned`, `failed`, and `idle` when the process waits for the next lesson). The process exits when
standard input ends or its parent dies; the model is replaced atomically or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from PIL import Image

from coda_prompt.errors import CodaError
from coda_prompt.learner import checks
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.folder import ModelFolder
from coda_prompt.learner.records import WatchedAccuracy
from coda_prompt.learner.results import Progress
from coda_prompt.serve.checking import CheckImages
from coda_prompt.serve.uploads import Example, decode_image
from coda_prompt.shutdown import exit_with_parent

PROGRESS_INTERVAL = 0.2
"""Seconds between two progress lines."""


class ProgressReporter:
    """Writes progress lines with an estimate of the seconds left."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._last = 0.0

    def on_progress(self, progress: Progress) -> None:
        stage = "looking" if progress.stage == "reading images" else "learning"
        share = progress.done / max(1, progress.total)
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL:
            self._last = now
            left = None
            if share > 0:
                left = (now - self.started) * (1 - share) / share
            send_line("progress", stage=stage, share=share, seconds_left=left)


def send_line(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)  # noqa: T201


def read_examples(stream: IO[bytes]) -> list[Example] | None:
    """Read what `encode_examples` wrote; None at the end of the stream."""
    line = stream.readline()
    if not line:
        return None
    head = json.loads(line)
    return [
        Example(label, stream.read(size))
        for label, size in zip(head["labels"], head["sizes"], strict=True)
    ]


def encode_examples(examples: list[Example]) -> bytes:
    """Encode examples for the standard input of the learning process."""
    head = {
        "labels": [example.label for example in examples],
        "sizes": [len(example.content) for example in examples],
    }
    return json.dumps(head).encode() + b"\n" + b"".join(example.content for example in examples)


class ExampleDataset:
    """Uploaded images as a dataset; each is decoded when it is used."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples
        self.targets = [example.label for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        example = self.examples[index]
        return decode_image(example.content, f"image {index + 1} ({example.label})"), example.label


class Teacher:
    """Runs lessons on a model folder, with the model in memory from one lesson to the next."""

    def __init__(self, folder: ModelFolder, backbone: str | None) -> None:
        self.folder, self.backbone = folder, backbone
        self._classifier: ContinualClassifier | None = None
        self._sha256: str | None = None
        self._check_images = CheckImages()

    def warm_up(self) -> None:
        """Load the model and run its encoder once. Errors are those of the next lesson."""
        with contextlib.suppress(CodaError, OSError):
            classifier = self._current()
            classifier.model.encoder.encode(Image.new("RGB", (8, 8)), classifier.model.prompts)
            self._check_images.accuracy(classifier, self._sha256, classifier.classes_)

    def teach(self, examples: list[Example]) -> None:
        """Learn the examples, replace the model, then measure what the lesson made it forget."""
        started = time.monotonic()
        try:
            with self.folder.writing():
                classifier = self._current()
                known = list(classifier.classes_)
                before = self._check_images.accuracy(classifier, self._sha256, known)
                reporter = ProgressReporter()
                learned = classifier.learn(
                    ExampleDataset(examples), on_progress=reporter.on_progress
                )
                send_line("progress", stage="saving", share=1.0, seconds_left=0.0)
                classifier.write(self.folder)
                self._sha256 = self.folder.sha256
        except (CodaError, OSError) as error:
            self._classifier = None  # it may have learned what could not be saved
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"The model folder cannot be read or written ({error.strerror or error})."
            send_line("failed", reason=reason)
            return
        fields = {**dataclasses.asdict(learned), "forgotten": None, "kept": None}
        fields["seconds"] = time.monotonic() - started
        del fields["held_out_images"]
        send_line("learned", **fields)
        if before is not None:
            fields["kept"] = self._check(classifier, known, before)
            send_line("learned", **fields)
        self._check_images.add(examples, learned)

    def _check(
        self, classifier: ContinualClassifier, known: list[str], before: float
    ) -> dict[str, Any]:
        """Measure what a lesson cost the classes that were known before it, and record it."""
        images = self._check_images.images(classifier, known)
        after = self._check_images.accuracy(classifier, self._sha256, known)
        assert after is not None
        classes = len({image.label for image in images})
        measured = WatchedAccuracy(classes=classes, images=len(images), before=before, after=after)
        tasks = classifier.model.tasks
        with contextlib.suppress(OSError):
            checks.add_check(self.folder.path, len(tasks), tasks[-1], measured)
        return measured.model_dump()

    def _current(self) -> ContinualClassifier:
        """Return the model in the folder, read again if it is another one than the last."""
        sha256, classifier = self.folder.sha256, self._classifier
        if classifier is None or sha256 != self._sha256:
            known = self.backbone if classifier is None else classifier.model.encoder
            self._classifier = classifier = ContinualClassifier.load(
                self.folder.path, verbose=False, backbone=known
            )
            self._sha256 = sha256
        return classifier


def main() -> None:
    exit_with_parent(os.getppid(), 3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the service, which decides
    teacher = Teacher(ModelFolder(Path(sys.argv[1])), json.loads(sys.argv[2]))
    teacher.warm_up()
    send_line("idle")
    while (examples := read_examples(sys.stdin.buffer)) is not None:
        if examples:
            teacher.teach(examples)
        teacher.warm_up()
        send_line("idle")


if __name__ == "__main__":
    main()

"""The learning process of the service.

    python -m coda_prompt.serve.learning MODEL PARTS

PARTS is JSON with `backbone` and `method` as in `ContinualClassifier.load`. Standard input: a JSON
line with `labels` and `sizes`, then the image files' bytes. Standard output: JSON lines with a
`kind` (`progress`, `learned` or `failed`). The process exits when its parent dies; the model is
replaced atomically or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import IO, Any

from PIL import Image

from coda_prompt.data.pocket import pocket_source
from coda_prompt.errors import CodaError
from coda_prompt.learner import store
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.serve.uploads import Example, decode_image
from coda_prompt.shutdown import exit_with_parent
from coda_prompt.training.settings import Event

PROGRESS_INTERVAL = 0.2
"""Seconds between two progress lines."""


class ProgressReporter:
    """Writes progress lines with an estimate of the seconds left."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._last = 0.0

    def on_event(self, event: Event) -> None:
        if event.kind == "pass":
            stage, share = "looking", event.step / max(1, event.steps)
        elif event.kind in ("step", "epoch"):
            done = event.epoch * event.steps + event.step
            stage, share = "learning", done / max(1, event.epochs * event.steps)
        else:
            return
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL:
            self._last = now
            left = None
            if stage == "learning" and share > 0:
                left = (now - self.started) * (1 - share) / share
            send_line("progress", stage=stage, share=share, seconds_left=left)


def send_line(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)  # noqa: T201


def read_examples(stream: IO[bytes]) -> list[Example]:
    """Read what `encode_examples` wrote."""
    head = json.loads(stream.readline())
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


def pocket_test_images(classifier: ContinualClassifier) -> list[tuple[Any, str]] | None:
    """Return pocket's test drawings of the known classes, to measure what a lesson forgets."""
    if classifier.backbone_name != "pocket":
        return None
    source = pocket_source()
    known = set(classifier.classes_)
    images: Any = source.test
    pairs = [
        (images.images[index], source.class_names[label])
        for index, label in enumerate(images.labels)
        if source.class_names[label] in known
    ]
    return pairs or None


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


def learn(model: Path, examples: list[Example], **parts: Any) -> None:
    """Learn the examples and replace the model."""
    dataset = ExampleDataset(examples)
    with store.exclusive_writer(model):
        classifier = ContinualClassifier.load(model, verbose=False, **parts)
        check = pocket_test_images(classifier)
        learned = classifier.learn(dataset, check=check, on_event=ProgressReporter().on_event)
        send_line("progress", stage="saving", share=1.0, seconds_left=0.0)
        classifier.write(model)
    accuracies = learned.forgotten  # of old classes, before and after
    summary = None
    if accuracies:
        before, after = (statistics.fmean(each) for each in zip(*accuracies.values(), strict=True))
        summary = {"classes": len(accuracies), "before": before, "after": after}
    send_line("learned", **{**dataclasses.asdict(learned), "kept": summary, "forgotten": None})


def main() -> None:
    exit_with_parent(os.getppid(), 3)
    try:
        model, parts = Path(sys.argv[1]), json.loads(sys.argv[2])
        learn(model, read_examples(sys.stdin.buffer), **parts)
    except CodaError as error:
        send_line("failed", reason=str(error))
        sys.exit(2)
    except OSError as error:
        with contextlib.suppress(OSError):
            send_line("failed", reason=f"{error.strerror or error}")
        sys.exit(2)


if __name__ == "__main__":
    main()

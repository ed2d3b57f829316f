"""The process that learns: examples come in on standard input, what happens goes out as lines.

    python -m coda_prompt.serve.learning MODEL [METHOD]

The first line is a JSON object with `labels` and `sizes`; the images' bytes follow. Each line that
goes out is a JSON object with a `kind`. It ends when its parent does; the model is replaced in one
step or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from PIL import Image

from coda_prompt.data.pocket import pocket_source
from coda_prompt.errors import CodaError
from coda_prompt.learner import store
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.serve.uploads import Example, image_of
from coda_prompt.shutdown import exit_with_parent
from coda_prompt.training.settings import Event

EVERY = 0.2
"""Seconds between two words on progress."""


class Progress:
    """Tells how far the training is, and when it will be done."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._told = 0.0

    def on_event(self, event: Event) -> None:
        if event.kind == "pass":
            stage, share = "looking", event.step / max(1, event.steps)
        elif event.kind in ("step", "epoch"):
            done = event.epoch * event.steps + event.step
            stage, share = "learning", done / max(1, event.epochs * event.steps)
        else:
            return
        now = time.monotonic()
        if now - self._told >= EVERY:
            self._told = now
            left = None
            if stage == "learning" and share > 0:
                left = (now - self.started) * (1 - share) / share
            tell("progress", stage=stage, share=share, seconds_left=left)


def tell(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)  # noqa: T201


def received(stream: IO[bytes]) -> list[Example]:
    head = json.loads(stream.readline())
    return [
        Example(label, stream.read(size))
        for label, size in zip(head["labels"], head["sizes"], strict=True)
    ]


def sent(examples: list[Example]) -> bytes:
    """The reverse of `received`."""
    head = {
        "labels": [example.label for example in examples],
        "sizes": [len(example.content) for example in examples],
    }
    return json.dumps(head).encode() + b"\n" + b"".join(example.content for example in examples)


def watched(classifier: ContinualClassifier) -> list[tuple[Any, str]] | None:
    """Test drawings of pocket's classes among those known: what a lesson makes it forget."""
    if classifier.backbone_name != "pocket":
        return None
    source = pocket_source()
    known = set(classifier.classes_)
    images: Any = source.test
    pairs = [
        (images.images[place], source.class_names[label])
        for place, label in enumerate(images.labels)
        if source.class_names[label] in known
    ]
    return pairs or None


class Lesson:
    """A dataset of images as they were sent: each is decoded when it is looked at."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples
        self.targets = [example.label for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: int) -> tuple[Image.Image, str]:
        example = self.examples[place]
        return image_of(example.content, f"image {place + 1} ({example.label})"), example.label


def learn(model: Path, examples: list[Example], method: str | None = None) -> None:
    lesson = Lesson(examples)
    with store.exclusive_writer(model):
        classifier = ContinualClassifier.load(model, method=method)
        watch = watched(classifier)
        learned = classifier.learn(lesson, watch=watch, on_event=Progress().on_event)
        tell("progress", stage="saving", share=1.0, seconds_left=0.0)
        classifier.write(model)
    kept = learned.forgotten
    summary = None
    if kept:
        before, after = (sum(part) / len(kept) for part in zip(*kept.values(), strict=True))
        summary = {"classes": len(kept), "before": before, "after": after}
    tell("learned", **{**dataclasses.asdict(learned), "kept": summary, "forgotten": None})


def main() -> None:
    exit_with_parent(os.getppid(), 3)
    try:
        model, method = Path(sys.argv[1]), next(iter(sys.argv[2:]), None)
        learn(model, received(sys.stdin.buffer), method)
    except CodaError as error:
        tell("failed", reason=str(error))
        sys.exit(2)
    except OSError as error:
        with contextlib.suppress(OSError):
            tell("failed", reason=f"{error.strerror or error}")
        sys.exit(2)


if __name__ == "__main__":
    main()

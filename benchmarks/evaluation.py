"""Measure what fixed features save in the evaluations of a stream of ten tasks.

    python benchmarks/evaluation.py [--images 20]

All rows of the accuracy matrix are computed with features that are computed once, and again by
computing them in every row. CPU seconds; the machine need not be idle.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from speed import show

from coda_prompt.images.sources import ArraySplit, Source
from coda_prompt.research import methods
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import Views
from coda_prompt.research.training.settings import Result, Training
from coda_prompt.research.vit.catalog import load_backbone

TASKS = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "ncm": {},
    "deep-ranpac": {"width": 256},
    "coda-p-ranpac": {"width": 256},
}


def seconds_of_rows(name: str, images: int, *, once: bool) -> float:
    """Return the CPU seconds of all evaluations of a stream, without its training."""
    backbone = load_backbone("pocket")
    size, random = backbone.preprocessing.size, np.random.default_rng(0)
    pixels = random.integers(0, 256, (TASKS * (2 + images), size, size), np.uint8)
    labels = np.arange(len(pixels)) % TASKS
    train, test = (
        ArraySplit(pixels[part], labels[part])
        for part in (slice(0, 2 * TASKS), slice(2 * TASKS, None))
    )
    source = Source("noise", tuple("0123456789"), train, test)
    stream = make_stream(source, tasks=TASKS)
    engine = Engine(Views(backbone.preprocessing, None), Training(epochs=1, batch_size=20))
    method = methods.make(name, backbone.vit, **OPTIONS[name])
    result, spent = Result.empty(stream.test_images), 0.0
    for task in stream.tasks:
        engine.learn(method, task)
        started = time.process_time()
        engine._measure(method, stream, task.index, result)
        spent += time.process_time() - started
        if not once:
            engine.queries.tables.clear()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=20, help="test images of a task")
    options = parser.parse_args()
    rows = []
    for name in OPTIONS:
        assert issubclass(methods.find(name).type, ClosedForm)
        again = seconds_of_rows(name, options.images, once=False)
        once = seconds_of_rows(name, options.images, once=True)
        rows.append({"method": name, "every row s": again, "once s": once, "ratio": again / once})
    show(rows, "Evaluations of ten tasks, CPU seconds")


if __name__ == "__main__":
    main()

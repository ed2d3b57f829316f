"""Measure the cost of the n-th task of a long stream: classes of pocket, one at a time.

    python benchmarks/tasks.py [--tasks 500] [--out FILE]

A class is a class of pocket in one of its ten styles (1,000 in total, each with about 8 training
and 2 test drawings). At some tasks the whole command `coda learn MODEL FOLDER` is measured too,
including start-up, loading and saving.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from speed import show

from coda_prompt import ContinualClassifier
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.storage.files import write_atomically

METHODS = ("ncm", "coda-p", "ranpac")
MIN_DRAWINGS = 4
"""Training drawings that a class needs to be used."""
COMMAND = (sys.executable, "-c", "from coda_prompt.cli import main; main()")


def classes() -> list[tuple[str, Any, Any]]:
    """Return name, training and test drawings of each class, in a fixed random order."""
    source = pocket_source()
    train: Any = source.train
    test: Any = source.test
    usable = []
    for label, name in enumerate(source.class_names):
        for style in range(10):
            drawings = [
                split.images[(split.labels == label) & (split.domains == style)]
                for split in (train, test)
            ]
            if len(drawings[0]) >= MIN_DRAWINGS and len(drawings[1]):
                usable.append((f"{name} {style}", *drawings))
    order = np.random.default_rng(0).permutation(len(usable))
    return [usable[index] for index in order]


def command_seconds(classifier: ContinualClassifier, name: str, images: Any) -> float:
    """Return the median seconds of three `coda learn` commands that add one class."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder) / "model", Path(folder) / "data"
        (data / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(data / name / f"{number}.png")
        classifier.save(model)
        for attempt in range(3):
            copy = Path(folder) / str(attempt)
            shutil.copytree(model, copy)
            started = time.perf_counter()
            subprocess.run(
                [*COMMAND, "learn", str(copy), str(data)], check=True, capture_output=True
            )
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def learn_stream(method: str, tasks: int) -> list[dict[str, Any]]:
    """Learn classes one at a time and return measurements at some of the tasks."""
    taught = classes()[: tasks + 1]
    classifier = ContinualClassifier(method=method)
    rows, times = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, images, _) in enumerate(taught[:-1], 1):
            started = time.perf_counter()
            classifier.learn(images, [name] * len(images), validation=0)
            classifier.save(folder)
            times.append(time.perf_counter() - started)
            if number in (10, 100, 500, 1000) or number == tasks:
                tests = [(image, label) for label, _, test in taught[:number] for image in test]
                score = classifier.score(
                    np.stack([image for image, _ in tests]), [label for _, label in tests]
                )
                rows.append(
                    {
                        "method": method,
                        "task": number,
                        "learn and save s": statistics.median(times[-9:]),
                        "coda learn s": command_seconds(classifier, *taught[number][:2]),
                        "model MB": (Path(folder) / "model.safetensors").stat().st_size / 1e6,
                        "accuracy %": 100 * score,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/tasks.json"))
    options = parser.parse_args()
    rows = [row for method in METHODS for row in learn_stream(method, options.tasks)]
    for row in rows:
        early = next(r for r in rows if r["method"] == row["method"] and r["task"] == 10)
        row["to task 10"] = row["coda learn s"] / early["coda learn s"]
    show(rows, "One class at a time")
    write_atomically(options.out, json.dumps(rows, indent=1).encode())


if __name__ == "__main__":
    main()

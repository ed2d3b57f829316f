"""Time of a lesson of photographs against the forward passes of its images alone.

    python benchmarks/lesson_time.py [--photographs 2000] [--megapixels 1] [--method ranpac]
        [--threads N] [--out FILE]

Writes JPEG files in ten class folders, teaches them to a `photo` model, and runs the backbone over
as many images that are in memory, in the batches of the lesson. Also measures the peak memory above
the loaded model for half as many photographs and for all: it should hardly grow. CPU time is that
of all threads; on a busy machine compare CPU time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lesson_memory
import torch
from lesson_memory import peak, photograph, reset_peak, resident, write_photographs
from speed import machine, show

from coda_prompt import ContinualClassifier
from coda_prompt.learner.network import PHOTO_TRAINING
from coda_prompt.storage.files import write_atomically

Times = tuple[float, float]


def timed(work: Callable[..., object], *arguments: object) -> Times:
    """Return wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(*arguments)
    return time.perf_counter() - wall, time.process_time() - cpu


def warm_classifier(method: str) -> ContinualClassifier:
    """Return a classifier that has learned and classified once, so that everything is loaded."""
    classifier = ContinualClassifier("photo", method, device="cpu", verbose=False)
    small = [photograph(seed, 224, 224) for seed in range(20)]
    classifier.learn(small, ["a", "b"] * 10)
    classifier.predict(small[0])
    return classifier


def forward(classifier: ContinualClassifier, images: int) -> None:
    """Pass as many images through the backbone as a lesson does, in batches of the same size."""
    vit, size = classifier.network.backbone.vit, int(PHOTO_TRAINING["micro_batch"])
    side = vit.config.image_size
    batch = torch.randn(size, 3, side, side)
    with torch.inference_mode():
        for _ in range(images // size):
            vit.features(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--photographs", type=int, default=2000)
    parser.add_argument("--megapixels", type=float, default=1.0)
    parser.add_argument("--method", default="ranpac")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/lesson_time.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lesson_memory.CLASSES = 10
    rows: list[dict[str, Any]] = []
    for count in (options.photographs // 2, options.photographs):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_photographs(folder, count, options.megapixels)
            classifier = warm_classifier(options.method)
            loaded = resident()
            reset_peak()
            lesson = timed(classifier.learn, folder)
            above = peak() - loaded
            alone = timed(forward, classifier, count)
            rows.append(
                {
                    "method": options.method,
                    "photographs": count,
                    "lesson s": lesson[0],
                    "forward s": alone[0],
                    "times forward": lesson[0] / alone[0],
                    "lesson CPU s": lesson[1],
                    "forward CPU s": alone[1],
                    "times forward, CPU": lesson[1] / alone[1],
                    "peak MB above the model": above,
                }
            )
        show(rows, "Time of a lesson")
        results = {"machine": machine(), "megapixels": options.megapixels, "lessons": rows}
        write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()

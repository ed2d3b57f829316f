"""Time and memory of the classifier's commands; with --before, ratios to another installation.

    python benchmarks/classifier.py [--before PATH/bin/coda] [--photographs 1200] [--repeats 5]
        [--backbone photo] [--folder FOLDER] [--out FILE]

Each command is a process of its own, as a user starts it: `coda predict` of one photograph, `coda
learn` of a folder, `coda evaluate` of 400 photographs. Both installations take turns, so that a
busy machine concerns both. Memory is the peak of the process. Without --folder, photographs of
noise with 0.1 megapixels in 40 classes are written. The time of `import torch` is measured in turns
with predictions: a ratio to it says more than seconds. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from speed import machine, show

from coda_prompt.storage.files import write_atomically

CLASSES = 40
Measured = tuple[float, float]
"""Seconds and megabytes."""


def measured(command: Sequence[str]) -> Measured:
    """Run a command; return its seconds and its peak memory in megabytes."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"this command failed: {' '.join(command)}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def write_photographs(folder: Path, count: int, megapixels: float = 0.1) -> None:
    """Write JPEG files whose colours change over about a tenth of the image."""
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    for number in range(count):
        path = folder / f"class {number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = np.random.default_rng(number).integers(0, 256, (8, 10, 3), np.uint8)
        image = Image.fromarray(coarse).resize((height * 4 // 3, height))
        image.save(path, quality=90)


def commands(coda: str, work: Path, backbone: str) -> dict[str, list[str]]:
    """Return what is measured of one installation, in order."""
    model, photographs = str(work / "model"), work / "photographs"
    first = str(next(photographs.rglob("*.jpg")))
    learn = [coda, "learn", model, str(photographs), "--backbone", backbone]
    return {
        "learn": learn,
        "evaluate 400": [coda, "evaluate", model, str(work / "test")],
        "predict 1": [coda, "predict", model, first],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", help="the coda command of another installation")
    parser.add_argument("--backbone", default="photo")
    parser.add_argument("--backbone-before", default="photo")
    parser.add_argument("--photographs", type=int, default=1200)
    parser.add_argument("--folder", type=Path, help="class folders of your own photographs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    own = str(Path(sys.executable).with_name("coda"))
    installed = {"now": (own, options.backbone)}
    if options.before:
        installed["before"] = (options.before, options.backbone_before)
    seconds: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory() as name:
        works = {each: Path(name) / each for each in installed}
        for work in works.values():
            if options.folder is None:
                write_photographs(work / "photographs", options.photographs)
            else:
                shutil.copytree(options.folder, work / "photographs")
            write_photographs(work / "test", 400)
        for _ in range(options.repeats):
            for each, (coda, backbone) in installed.items():
                shutil.rmtree(works[each] / "model", ignore_errors=True)
                for what, command in commands(coda, works[each], backbone).items():
                    seconds.setdefault(f"{what}, {each}", []).append(measured(command))
            torch = measured([sys.executable, "-c", "import torch"])
            seconds.setdefault("import torch", []).append(torch)
    rows = [
        {
            "command": what,
            "seconds": statistics.median(each for each, _ in found),
            "peak MB": statistics.median(each for _, each in found),
        }
        for what, found in seconds.items()
    ]
    show(rows, f"Commands, medians of {options.repeats}")
    if options.out:
        results = {"machine": machine(), "commands": rows}
        write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()

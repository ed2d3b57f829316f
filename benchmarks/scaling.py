"""Compare two processes with one, a local Ray cluster with `--jobs 2`, and tar shards with files.

    python benchmarks/scaling.py [--rounds 3] [--only PART] [--out FILE]

CODA-P on pocket, one epoch per task. Variants are measured alternately, and medians are reported.
The seconds of one training are those in its run folder, without start-up; those of several
trainings are of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from speed import machine, show

from coda_prompt.data.folders import folder_source
from coda_prompt.data.packing import pack
from coda_prompt.data.pocket import pocket_source
from coda_prompt.data.shards import shard_source
from coda_prompt.storage.files import write_atomically

PREFIX = (sys.executable, "-m", "coda_prompt", "bench", "pocket", "--set", "training.epochs=1")
ONE = {
    "one process, one thread": ("1", ()),
    "one process, two threads": ("2", ()),
    "two processes (--devices 2)": ("1", ("--devices", "2")),
}
IMAGES = 40_000
MANY = {
    "--jobs 2": ("--jobs", "2"),
    "--executor ray": ("--executor", "ray"),
}


def run(threads: str, *more: str) -> tuple[float, float]:
    """Return the seconds of the whole command and the sum over its runs."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        subprocess.run(
            [*PREFIX, *more, "--out", out], check=True, capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        )  # fmt: skip
        whole = time.perf_counter() - started
        results = [json.loads(path.read_text()) for path in Path(out).rglob("result.json")]
    return whole, sum(result["seconds"] for result in results)


def compare(variants: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Measure variants alternately; the first one is the baseline."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            times[name].append(measure())
    base = statistics.median(next(iter(times.values())))
    return [
        {
            "way": name,
            "seconds": statistics.median(seconds),
            "times faster": base / statistics.median(seconds),
        }
        for name, seconds in times.items()
    ]


def data(rounds: int) -> list[dict[str, Any]]:
    """Compare a folder of small drawings with its shards: time and bytes per image."""
    drawings = pocket_source(0).train
    with tempfile.TemporaryDirectory() as name:
        folder, shards = Path(name, "folder"), Path(name, "shards")
        for number in range(IMAGES):
            path = folder / f"class-{number % 100:02}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            drawings.image(number % len(drawings)).save(path)
        pack(str(folder), str(shards), megabytes=1)
        started = time.perf_counter()
        shard_source(str(shards))
        indexing = time.perf_counter() - started
        index = [*shards.glob(".coda-index-*")]
        index_bytes = sum(path.stat().st_size for path in index)
        started = time.perf_counter()
        packed = shard_source(str(shards)).train
        opening = time.perf_counter() - started
        opened = traced(lambda: shard_source(str(shards)))
        for path in index:
            path.unlink()
        making = traced(lambda: shard_source(str(shards)))
        order = np.random.default_rng(0).permutation(len(packed))
        loose = folder_source(str(folder)).train
        times: dict[str, list[float]] = {"folder": [], "shards": []}
        for _ in range(rounds):
            for variant, split in (("folder", loose), ("shards", packed)):
                started = time.perf_counter()
                for position in order:
                    split.image(int(position))
                times[variant].append(time.perf_counter() - started)
    folder_time, shard_time = (statistics.median(each) for each in times.values())
    return [
        {"what": "images", "found": IMAGES},
        {"what": "index, bytes an image on disk", "found": index_bytes / IMAGES},
        {"what": "index in memory, bytes an image", "found": opened[1] / IMAGES},
        {"what": "most memory while it is made, bytes an image", "found": making[0] / IMAGES},
        {"what": "us an image to make the index", "found": 1e6 * indexing / IMAGES},
        {"what": "us an image to open it again", "found": 1e6 * opening / IMAGES},
        {
            "what": "reading at random, times faster than files",
            "found": folder_time / shard_time,
        },
    ]


def traced(action: Callable[[], object]) -> tuple[int, int]:
    """Return the peak memory of an action and the memory of its result, in bytes."""
    tracemalloc.start()
    result = action()
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result is not None
    return peak, current


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("one", "many", "data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scaling.json"))
    options = parser.parse_args()
    one = ("--methods", "coda-p", "--trials", "1")
    four = ("--methods", "coda-p,dualprompt", "--trials", "2")
    results: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # keep parts that are not measured now
        results = {**json.loads(options.out.read_text("utf-8")), **results}
    if options.only in (None, "one"):
        variants: dict[str, Any] = {
            name: lambda threads=threads, more=more: run(threads, *one, *more)[1]
            for name, (threads, more) in ONE.items()
        }
        results["one training"] = compare(variants, options.rounds)
        show(results["one training"], "One training")
    if options.only in (None, "many"):
        variants = {
            name: lambda more=more: run("1", *four, *more)[0] for name, more in MANY.items()
        }
        results["four trainings"] = compare(variants, options.rounds)
        show(results["four trainings"], "Four trainings, whole command")
    if options.only in (None, "data"):
        results["shards"] = data(options.rounds)
        show(results["shards"], "Tar shards")
    write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()

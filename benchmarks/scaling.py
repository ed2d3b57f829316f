"""Two processes against one on this machine, a Ray cluster of it against `--jobs 2`, tar shards
against the folder they were made from.

    python benchmarks/scaling.py [--rounds 3] [--only PART] [--out FILE]

CODA-P on pocket, one epoch a task. The ways take turns; medians count. Seconds of a training are
what its run folder says, without start-up; those of many trainings are of the whole command.
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
    """Seconds of the whole command, and the sum of its trainings."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        subprocess.run(
            [*PREFIX, *more, "--out", out], check=True, capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        )  # fmt: skip
        whole = time.perf_counter() - started
        results = [json.loads(path.read_text()) for path in Path(out).rglob("result.json")]
    return whole, sum(result["seconds"] for result in results)


def compared(ways: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """The first way is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, seconds in ways.items():
            times[name].append(seconds())
    base = statistics.median(next(iter(times.values())))
    return [
        {
            "way": name,
            "seconds": statistics.median(own),
            "times faster": base / statistics.median(own),
        }
        for name, own in times.items()
    ]


def data(rounds: int) -> list[dict[str, Any]]:
    """A folder of small drawings and shards of it: seconds, and bytes for each image."""
    drawn = pocket_source(0).train
    with tempfile.TemporaryDirectory() as name:
        folder, shards = Path(name, "folder"), Path(name, "shards")
        for number in range(IMAGES):
            place = folder / f"class-{number % 100:02}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            drawn.image(number % len(drawn)).save(place)
        pack(str(folder), str(shards), megabytes=1)
        started = time.perf_counter()
        shard_source(str(shards))
        indexing = time.perf_counter() - started
        index = [*shards.glob(".coda-index-*")]
        kept = sum(path.stat().st_size for path in index)
        started = time.perf_counter()
        packed = shard_source(str(shards)).train
        opening = time.perf_counter() - started
        held = traced(lambda: shard_source(str(shards)))
        for path in index:
            path.unlink()
        making = traced(lambda: shard_source(str(shards)))
        order = np.random.default_rng(0).permutation(len(packed))
        loose = folder_source(str(folder)).train
        times: dict[str, list[float]] = {"folder": [], "shards": []}
        for _ in range(rounds):
            for way, split in (("folder", loose), ("shards", packed)):
                started = time.perf_counter()
                for at in order:
                    split.image(int(at))
                times[way].append(time.perf_counter() - started)
    folder_time, shard_time = (statistics.median(own) for own in times.values())
    return [
        {"what": "images", "found": IMAGES},
        {"what": "index, bytes an image on disk", "found": kept / IMAGES},
        {"what": "index in memory, bytes an image", "found": held[1] / IMAGES},
        {"what": "most memory while it is made, bytes an image", "found": making[0] / IMAGES},
        {"what": "us an image to make the index", "found": 1e6 * indexing / IMAGES},
        {"what": "us an image to open it again", "found": 1e6 * opening / IMAGES},
        {
            "what": "reading at random, times faster than files",
            "found": folder_time / shard_time,
        },
    ]


def traced(action: Callable[[], object]) -> tuple[int, int]:
    """Most bytes while it goes on, and those its result holds."""
    tracemalloc.start()
    result = action()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result is not None
    return most, held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("one", "many", "data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scaling.json"))
    options = parser.parse_args()
    one = ("--methods", "coda-p", "--trials", "1")
    four = ("--methods", "coda-p,dualprompt", "--trials", "2")
    found: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # what is not measured now stays
        found = {**json.loads(options.out.read_text("utf-8")), **found}
    if options.only in (None, "one"):
        ways: dict[str, Any] = {
            name: lambda threads=threads, more=more: run(threads, *one, *more)[1]
            for name, (threads, more) in ONE.items()
        }
        found["one training"] = compared(ways, options.rounds)
        show(found["one training"], "One training")
    if options.only in (None, "many"):
        ways = {name: lambda more=more: run("1", *four, *more)[0] for name, more in MANY.items()}
        found["four trainings"] = compared(ways, options.rounds)
        show(found["four trainings"], "Four trainings, whole command")
    if options.only in (None, "data"):
        found["shards"] = data(options.rounds)
        show(found["shards"], "Tar shards")
    write_atomically(options.out, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()

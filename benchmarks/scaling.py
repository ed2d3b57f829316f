"""Two processes against one on this machine, and a Ray cluster of it against `--jobs 2`.

    python benchmarks/scaling.py [--rounds 3] [--out FILE]

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
from pathlib import Path
from typing import Any

from speed import machine, show

from coda_prompt.files import write_atomically

PREFIX = (sys.executable, "-m", "coda_prompt", "bench", "pocket", "--set", "training.epochs=1")
ONE = {
    "one process, one thread": ("1", ()),
    "one process, two threads": ("2", ()),
    "two processes (--devices 2)": ("1", ("--devices", "2")),
}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("one", "many"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scaling.json"))
    options = parser.parse_args()
    one = ("--methods", "coda-p", "--trials", "1")
    four = ("--methods", "coda-p,dualprompt", "--trials", "2")
    found: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # what is not measured now stays
        found = {**json.loads(options.out.read_text("utf-8")), **found}
    if options.only != "many":
        ways: dict[str, Any] = {
            name: lambda threads=threads, more=more: run(threads, *one, *more)[1]
            for name, (threads, more) in ONE.items()
        }
        found["one training"] = compared(ways, options.rounds)
        show(found["one training"], "One training")
    if options.only != "one":
        ways = {name: lambda more=more: run("1", *four, *more)[0] for name, more in MANY.items()}
        found["four trainings"] = compared(ways, options.rounds)
        show(found["four trainings"], "Four trainings, whole command")
    write_atomically(options.out, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()

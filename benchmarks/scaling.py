"""Compare two processes with one, and a local Ray cluster with `--jobs 2`.

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
from pathlib import Path
from typing import Any

from speed import machine, show

from coda_prompt.storage.files import write_atomically

PYTHON = (sys.executable, "-m")
TORCHRUN = (*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
PREFIX = ("coda_prompt", "bench", "pocket", "--set", "training.epochs=1")
ONE = {
    "one process, one thread": ("1", PYTHON),
    "one process, two threads": ("2", PYTHON),
    "two processes (torchrun)": ("1", TORCHRUN),
}
MANY = {
    "--jobs 2": ("--jobs", "2"),
    "--executor ray": ("--executor", "ray"),
}


def run(threads: str, *more: str, start: tuple[str, ...] = PYTHON) -> tuple[float, float]:
    """Return the seconds of the whole command and the sum over its runs."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        subprocess.run(
            [*start, *PREFIX, *more, "--out", out], check=True, capture_output=True,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("one", "many"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scaling.json"))
    options = parser.parse_args()
    one = ("--methods", "coda-p", "--trials", "1")
    four = ("--methods", "coda-p,dualprompt", "--trials", "2")
    results: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # keep parts that are not measured now
        results = {**json.loads(options.out.read_text("utf-8")), **results}
    if options.only in (None, "one"):
        variants: dict[str, Any] = {
            name: lambda threads=threads, start=start: run(threads, *one, start=start)[1]
            for name, (threads, start) in ONE.items()
        }
        results["one training"] = compare(variants, options.rounds)
        show(results["one training"], "One training")
    if options.only in (None, "many"):
        variants = {
            name: lambda more=more: run("1", *four, *more)[0] for name, more in MANY.items()
        }
        results["four trainings"] = compare(variants, options.rounds)
        show(results["four trainings"], "Four trainings, whole command")
    write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()

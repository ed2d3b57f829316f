"""Compare the speed of a training step with a committed baseline; fail if it has become slower.

    python benchmarks/regression.py [--update] [--tolerance 0.15] [--baseline FILE]

What is compared are ratios to the textbook step (benchmarks/textbook.py), medians of alternating
steps, so that a baseline of one machine holds approximately on another. A ratio that is more than
15 % below the baseline is measured again; the check fails if the second run confirms it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from speed import interleaved, machine, show, steps_of

from coda_prompt.storage.files import write_atomically

Ratios = dict[str, float]
REPETITIONS = {"pocket": 41, "ViT-S/16": 7}
"""Backbone -> steps of each kind."""
STEPS = ("textbook", "exact", "cached")
TOLERANCE = 0.15


def measure(backbones: Mapping[str, int] = REPETITIONS) -> Ratios:
    """Return how many times faster than the textbook each step of each backbone is."""
    ratios = {}
    for backbone, repetitions in backbones.items():
        steps = steps_of(backbone, 16)
        seconds = interleaved({name: steps[name] for name in STEPS}, repetitions)
        for name in STEPS[1:]:
            ratios[f"{backbone}, {name}"] = seconds["textbook"] / seconds[name]
    return ratios


def slower(baseline: Ratios, measured: Ratios, tolerance: float = TOLERANCE) -> list[str]:
    """Return the names of ratios that are too far below the baseline, or were not measured."""
    return [
        name
        for name, expected in baseline.items()
        if measured.get(name, 0.0) < (1 - tolerance) * expected
    ]


def confirmed(
    baseline: Ratios, again: Callable[[], Ratios], first: Ratios, tolerance: float = TOLERANCE
) -> list[str]:
    """Return the regressions of a first run that a second run confirms; it is made if needed."""
    suspects = slower(baseline, first, tolerance)
    if not suspects:
        return []
    second = slower(baseline, again(), tolerance)
    return [name for name in suspects if name in second]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--baseline", type=Path, default=Path(__file__).parent / "baseline.json")
    options = parser.parse_args()
    first = measure()
    if options.update:
        content = {"machine": machine(), "times faster than the textbook": first}
        write_atomically(options.baseline, json.dumps(content, indent=1).encode() + b"\n")
        return
    baseline = json.loads(options.baseline.read_text("utf-8"))["times faster than the textbook"]
    rows = [
        {"step": name, "baseline": expected, "measured": first.get(name, 0.0)}
        for name, expected in baseline.items()
    ]
    show(rows, "Times faster than the textbook step")
    if regressions := confirmed(baseline, measure, first, options.tolerance):
        sys.exit(f"Slower than the baseline in two runs: {'; '.join(regressions)}.")


if __name__ == "__main__":
    main()

"""Estimate the GPU hours of each table of the paper from counted operations.

    python tools/gpu_hours.py --teraflops 10

Two operations per multiply-add of training (every image once per epoch) and of evaluation (after
each task all test images so far), divided by the sustained speed of the GPU. Queries are computed
in every step, as in the paper; `--set training.queries=cached` saves nearly a third of the time of
a prompt method.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from coda_prompt.research import methods
from coda_prompt.research.bench.config import Benchmark, load_benchmark
from coda_prompt.research.bench.cost import multiply_adds
from coda_prompt.research.bench.sweep import load_sweep, sweep_runs
from coda_prompt.research.vit.vit import ViTConfig

IMAGES = {  # train, test
    "imagenet-r": (24_000, 6_000),
    "cifar-100": (50_000, 10_000),
    "domainnet": (409_832, 176_743),
}
TABLES = (
    "imagenet-r-5", "imagenet-r-10", "imagenet-r-20", "imagenet-r-dual-shift", "cifar-100-10",
    "domainnet-5", "imagenet-r-10-ablations",
)  # fmt: skip
DOMAINS = 15  # of ImageNet-R's images; the dual shift removes some of them


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--teraflops", type=float, default=10, help="sustained speed of the GPU")
    seconds_per_operation = 1 / (parser.parse_args().teraflops * 1e12)
    names = list(load_benchmark("imagenet-r-10").methods)
    print("| table or figure | trials | " + " | ".join(names) + " | all |")
    print("|---" * (len(names) + 3) + "|")
    for table in TABLES:
        benchmark = load_benchmark(table)
        hours = {
            row: operations(benchmark, row) * benchmark.trials * seconds_per_operation / 3600
            for row in benchmark.methods
        }
        cells = [f"{hours[name]:.1f}" if name in hours else "-" for name in names]
        print(
            f"| `{table}` | {benchmark.trials} | {' | '.join(cells)} | {sum(hours.values()):.0f} |"
        )
    for figure in ("components", "length", "tuning"):
        runs = sweep_runs(load_sweep(figure, None, [], ""), [], Path())
        totals = dict.fromkeys(names, 0.0)
        for run in runs:
            totals[run.method] += (
                operations(run.benchmark, run.method) * seconds_per_operation / 3600
            )
        cells = [f"{hours:.1f}" if hours else "-" for hours in totals.values()]
        trials = runs[0].benchmark.trials
        print(f"| `{figure}` | {trials} | {' | '.join(cells)} | {sum(totals.values()):.0f} |")


def operations(benchmark: Benchmark, row: str) -> float:
    """Count the operations of one trial of one row."""
    tasks = benchmark.stream.tasks or 1
    train, test = IMAGES[benchmark.source]
    if benchmark.stream.validation:
        train, test = train * 4 // 5, train // 5
    train = train * (DOMAINS - benchmark.stream.remove_domains) // DOMAINS
    sizes = [(benchmark.classes or tasks) // tasks] * tasks
    per_image = multiply_adds(benchmark, row, ViTConfig(), sizes)
    method = methods.find(benchmark.method_of(row)).type
    passes: float = 1 if method.closed_form else benchmark.method_training(row, 0).epochs
    if method.keeps_images:  # replays as many images in every task but the first
        passes *= 2 - 1 / tasks
    tested = test if method.trains_on == "all" else test * (tasks + 1) / 2
    return 2 * (passes * train * per_image.training + tested * per_image.inference)


if __name__ == "__main__":
    main()

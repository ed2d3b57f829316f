"""Measure closed-form methods on 200 tasks of one class each; docs/lab/single-classes.md has them.

    python tools/measure_single_classes.py [--seeds 3]

The classes of `pocket` count twice: drawings in five of the ten styles are one class, those in the
other styles another (about 40 drawings to learn and 10 to test on). For each method: the accuracy
in % over all classes so far after 50, 100 and 200 tasks, the accuracy of one task with all classes,
and the condition number of the matrix that the method inverts at the end.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coda_prompt.images.preprocessing import eval_view
from coda_prompt.images.sources import Split
from coda_prompt.research import methods
from coda_prompt.research.methods import Method, TaskBrief
from coda_prompt.research.methods.loranpac import LoRanPAC
from coda_prompt.research.methods.ranpac import RanPAC
from coda_prompt.research.methods.slda import StreamingLDA
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.streams.renditions import STYLES
from coda_prompt.research.vit.catalog import LoadedBackbone, load_backbone
from coda_prompt.statistics.moments import shrink_covariance
from coda_prompt.statistics.ridge import RELATIVE_RIDGE

MEASURED = (50, 100, 200)
LEARN = {"ridge": "relative", "balance": True}
ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "nearest class mean": ("ncm", {}),
    "streaming LDA": ("slda", {}),
    "RanPAC": ("ranpac", {}),
    "RanPAC as in `coda learn`": ("ranpac", LEARN),
    "LoRanPAC": ("loranpac", {}),
    "LoRanPAC, 8,192 random features": ("loranpac", {"width": 8192}),
}
Part = tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    backbone = load_backbone("pocket")
    source = pocket_source()
    train, test = (features(backbone, split) for split in (source.train, source.test))
    heads = " | ".join(f"after {tasks}" for tasks in MEASURED)
    print(f"| method | {heads} | in one task | condition number |\n|---|{'---|' * 5}")
    for row in options.rows:
        results = [measure(backbone, row, seed, train, test) for seed in range(options.seeds)]
        means, deviations = np.mean(results, axis=0), np.std(results, axis=0)
        cells = [f"{means[at]:.1f} ± {deviations[at]:.1f}" for at in range(len(MEASURED) + 1)]
        condition = "-" if np.isnan(means[-1]) else f"{means[-1]:.1e}"
        print(f"| {row} | {' | '.join(cells)} | {condition} |", flush=True)


def features(backbone: LoadedBackbone, split: Split) -> Part:
    """Compute the features of all drawings; return them with classes and styles."""
    rows = []
    for index in range(len(split.labels)):
        view = eval_view(split.image(index), backbone.preprocessing, "squash")
        rows.append(torch.from_numpy(view))
    with torch.inference_mode():
        computed = torch.cat([backbone.vit(batch) for batch in torch.stack(rows).split(100)])
    assert split.domains is not None
    return computed.clone(), split.labels, split.domains


def measure(backbone: LoadedBackbone, row: str, seed: int, train: Part, test: Part) -> list[float]:
    """Return the accuracies after `MEASURED` tasks, in one task, and the condition number."""
    generator = np.random.default_rng(seed)
    halves = np.zeros(len(STYLES), np.int64)
    halves[generator.permutation(len(STYLES))[: len(STYLES) // 2]] = 1
    order = generator.permutation(2 * (int(train[1].max()) + 1))
    labels = [
        torch.from_numpy(np.argsort(order)[2 * classes + halves[styles]])
        for _, classes, styles in (train, test)
    ]
    name, options = ROWS[row]
    accuracies = []
    method = methods.make(name, backbone.vit, **options)
    for task in range(len(order)):
        teach(method, train[0], labels[0], (task,), seed)
        if task + 1 in MEASURED:
            accuracies.append(accuracy(method, test[0], labels[1]))
    condition = condition_number(method)
    at_once = methods.make(name, backbone.vit, **options)
    teach(at_once, train[0], labels[0], tuple(range(len(order))), seed)
    return [*accuracies, accuracy(at_once, test[0], labels[1]), condition]


def teach(
    method: Method, rows: Tensor, labels: Tensor, classes: tuple[int, ...], seed: int
) -> None:
    """Teach a closed-form method one task."""
    of_task = torch.isin(labels, torch.tensor(classes))
    own = labels[of_task]
    method.begin_task(TaskBrief(len(method.task_sizes), seed, classes, own))
    method.fit(rows[of_task], rows[of_task], own)
    method.end_task()


def accuracy(method: Method, rows: Tensor, labels: Tensor) -> float:
    """Accuracy in % on the test drawings of the classes seen."""
    known = labels < method.classes_seen
    with torch.inference_mode():
        scores = method.scores(rows[known])
    return 100 * float((scores.argmax(dim=1) == labels[known]).double().mean())


def condition_number(method: Method) -> float:
    """Return that of the matrix a method inverts; NaN if it inverts none."""
    if isinstance(method, LoRanPAC):
        squares = method.statistics.spectrum.frozen.double().square().sum(dim=1)
    elif isinstance(method, RanPAC):
        gram = method.statistics._unpacked()
        images = int(method.statistics.counts.frozen.sum())
        ridge = float(method.statistics.ridge) or RELATIVE_RIDGE * float(gram.trace()) / images
        squares = torch.linalg.eigvalsh(gram).clamp_min(0) + ridge
    elif isinstance(method, StreamingLDA):
        covariance = shrink_covariance(*method.moments.value.covariance())
        squares = torch.linalg.eigvalsh(torch.from_numpy(covariance))
    else:
        return float("nan")
    return float(squares.max() / squares.min())


if __name__ == "__main__":
    main()

"""Which method should `learn` take by default? Accuracies of the candidates on small real data.

    python tools/compare_learners.py            (needs scikit-learn; Debian: dataset-fashion-mnist)

Each dataset is taught one class after another and in tasks of several classes, 80 images a class,
on the embedded backbone; the mean over seeds (other class orders and images) is printed.
`split` is 20 classes of pocket in four tasks or in one. `--few` instead teaches 40 classes with 80
drawings each and then two more with few.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt import ContinualClassifier
from coda_prompt.data.pocket import pocket_source

FASHION = Path("/usr/share/datasets/fashion-mnist")
CANDIDATES: dict[str, dict[str, Any]] = {
    "ncm": {"method": "ncm"},
    "coda-p": {"method": "coda-p"},
    "coda-p, imprinted head": {"method": "coda-p", "head_init": "imprint"},
    "ranpac": {"method": "ranpac"},
    "coda-p-ranpac": {"method": "coda-p-ranpac"},
}
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Data = tuple[Images, Labels, Images, Labels]


def pocket() -> Data:
    source = pocket_source()
    train: Any = source.train
    test: Any = source.test
    return train.images, train.labels, test.images, test.labels


def digits() -> Data:
    """scikit-learn's 8 x 8 digits, 16 shades."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, import-not-found, unused-ignore]

    found = load_digits()
    images = (found.images * 255 / 16).astype(np.uint8)
    return images[::2], found.target[::2], images[1::2], found.target[1::2]


def fashion() -> Data:
    parts: list[Any] = []
    for part in ("train", "t10k"):
        with gzip.open(FASHION / f"{part}-images-idx3-ubyte.gz") as file:
            parts.append(np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28))
        with gzip.open(FASHION / f"{part}-labels-idx1-ubyte.gz") as file:
            parts.append(np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64))
    images, labels, test_images, test_labels = parts
    return images, labels, test_images, test_labels


DATASETS: dict[str, tuple[Callable[[], Data], int, tuple[int, ...]]] = {
    # classes, and how many of them a task has
    "pocket": (pocket, 30, (1, 10)),
    "digits": (digits, 10, (1, 2)),
    "fashion-mnist": (fashion, 10, (1, 2)),
    "split": (pocket, 20, (5, 20)),
}


def accuracy(options: dict[str, Any], data: Data, order: list[int], size: int, seed: int) -> float:
    """After teaching the classes in this order, so many at a time."""
    images, labels, test_images, test_labels = data
    random = np.random.default_rng(seed)
    classifier = ContinualClassifier(seed=seed, **options)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        places = [
            place
            for row in rows
            for place in random.permutation(np.flatnonzero(labels == row))[:80]
        ]
        classifier.learn(images[places], labels[places], validation=0)
    tested = [place for row in order for place in np.flatnonzero(test_labels == row)[:100]]
    return classifier.score(test_images[tested], test_labels[tested])


BESIDE: dict[str, dict[str, Any]] = {
    "ncm": {"method": "ncm"},
    "ranpac, as published": {"method": "ranpac", "balance": False},
    "ranpac": {"method": "ranpac"},
}
FEW = (3, 5, 10, 20)


def few_beside_many(seeds: int) -> None:
    """What two classes of few drawings get beside forty of eighty, and what these keep."""
    images, labels, test_images, test_labels = pocket()
    print("| method | " + " | ".join(f"{count} drawings" for count in FEW) + " |")
    print("|---" * (len(FEW) + 1) + "|")
    for name, options in BESIDE.items():
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in FEW}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(np.unique(labels))[:42]
            old, new = np.isin(labels, order[:40]), order[40:]
            classifier = ContinualClassifier(seed=seed, **options)
            classifier.learn(images[old], labels[old], validation=0)
            for count in FEW:
                chosen = [p for row in new for p in np.flatnonzero(labels == row)[:count]]
                classifier.learn(images[chosen], labels[chosen], validation=0)
                tested = [np.isin(test_labels, rows) for rows in (new, order[:40])]
                scores = [classifier.score(test_images[t], test_labels[t]) for t in tested]
                found[count].append((100 * scores[0], 100 * scores[1]))
                classifier.undo()
        cells = [
            f"{np.mean([n for n, _ in own]):.0f} / {np.mean([o for _, o in own]):.1f}"
            for own in found.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--few", action="store_true")
    options = parser.parse_args()
    if options.few:
        few_beside_many(options.seeds)
        return
    print("| data | taught | " + " | ".join(CANDIDATES) + " |")
    print("|---" * (len(CANDIDATES) + 2) + "|")
    for name in options.datasets.split(","):
        load, classes, sizes = DATASETS[name]
        data = load()
        available = np.unique(data[1])
        for at_once in sizes:
            cells = []
            for candidate in CANDIDATES.values():
                found = []
                for seed in range(options.seeds):
                    order = np.random.default_rng(seed).permutation(available)[:classes]
                    given = {**candidate, "epochs": options.epochs}
                    found.append(100 * accuracy(given, data, order.tolist(), at_once, seed))
                cells.append(f"{np.mean(found):.1f} ± {np.std(found):.1f}")
            taught = "one class at a time" if at_once == 1 else f"{at_once} classes at a time"
            print(f"| {name}, {classes} classes | {taught} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

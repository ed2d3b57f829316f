"""Compare candidates for the default method of `learn` on small real datasets.

    python tools/compare_learners.py            (needs scikit-learn; Debian: dataset-fashion-mnist)

Each dataset is learned one class at a time and in tasks of several classes, on the embedded
backbones. Prints mean and deviation over seeds, which change class order and images. `split` is 20
classes of pocket in four tasks or in one. `photographs` are those of CIFAR-100, which --data has as
arrays (cifar-train.npy, cifar-test.npy, each with -labels.npy; tools/photo_data.py writes them).
`--few` instead learns 40 classes with 80 drawings each and then two more with few drawings.
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
from coda_prompt.research.streams.pocket import pocket_source

FASHION = Path("/usr/share/datasets/fashion-mnist")
CANDIDATES: dict[str, dict[str, Any]] = {
    "ncm": {"method": "ncm"},
    "coda-p": {"method": "coda-p"},
    "ranpac": {"method": "ranpac"},
    "coda-p-ranpac": {"method": "coda-p-ranpac"},
    "slda": {"method": "slda"},
}
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Data = tuple[Images, Labels, Images, Labels]


def pocket() -> Data:
    """Load the drawings of the pocket benchmark."""
    source = pocket_source()
    train: Any = source.train
    test: Any = source.test
    return train.images, train.labels, test.images, test.labels


def digits() -> Data:
    """Load scikit-learn's digits: 8 x 8 pixels, 16 grey levels."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, import-not-found, unused-ignore]

    dataset = load_digits()
    images = (dataset.images * 255 / 16).astype(np.uint8)
    return images[::2], dataset.target[::2], images[1::2], dataset.target[1::2]


def fashion() -> Data:
    """Load Fashion-MNIST from the Debian package."""
    parts: list[Any] = []
    for part in ("train", "t10k"):
        with gzip.open(FASHION / f"{part}-images-idx3-ubyte.gz") as file:
            parts.append(np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28))
        with gzip.open(FASHION / f"{part}-labels-idx1-ubyte.gz") as file:
            parts.append(np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64))
    images, labels, test_images, test_labels = parts
    return images, labels, test_images, test_labels


def photographs(folder: Path) -> Data:
    """Load CIFAR-100, of which `photo` has seen no image."""
    parts: list[Any] = []
    for part in ("train", "test"):
        parts.append(np.load(folder / f"cifar-{part}.npy", mmap_mode="r"))
        parts.append(np.load(folder / f"cifar-{part}-labels.npy"))
    images, labels, test_images, test_labels = parts
    return images, labels, test_images, test_labels


DATASETS: dict[str, tuple[Callable[..., Data], int, int, tuple[int, ...]]] = {
    # loader, number of classes, images per class, classes per task
    "pocket": (pocket, 30, 80, (1, 10)),
    "digits": (digits, 10, 80, (1, 2)),
    "fashion-mnist": (fashion, 10, 80, (1, 2)),
    "split": (pocket, 20, 80, (5, 20)),
    "photographs": (photographs, 30, 20, (1, 10)),
}
MAX_TESTED = 100
"""Test images of a class."""


def accuracy(
    options: dict[str, Any], data: Data, order: list[int], count: int, size: int, seed: int
) -> float:
    """Learn `count` images of each class in this order, `size` classes at a time."""
    images, labels, test_images, test_labels = data
    random = np.random.default_rng(seed)
    classifier = ContinualClassifier(seed=seed, **options)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        indices = [
            index
            for row in rows
            for index in random.permutation(np.flatnonzero(labels == row))[:count]
        ]
        classifier.learn(images[indices], labels[indices], validation=0)
    most = min(MAX_TESTED, 2 * count)
    tested = [index for row in order for index in np.flatnonzero(test_labels == row)[:most]]
    return classifier.score(test_images[tested], test_labels[tested])


FEW_CANDIDATES = ("ncm", "ranpac", "slda")
FEW = (3, 5, 10, 20)


def compare_few_shot(seeds: int) -> None:
    """Print accuracy of two classes with few drawings / of forty classes with eighty each."""
    images, labels, test_images, test_labels = pocket()
    print("| method | " + " | ".join(f"{count} drawings" for count in FEW) + " |")
    print("|---" * (len(FEW) + 1) + "|")
    for name in FEW_CANDIDATES:
        accuracies: dict[int, list[tuple[float, float]]] = {count: [] for count in FEW}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(np.unique(labels))[:42]
            old, new = np.isin(labels, order[:40]), order[40:]
            classifier = ContinualClassifier(method=name, seed=seed)
            classifier.learn(images[old], labels[old], validation=0)
            for count in FEW:
                chosen = [p for row in new for p in np.flatnonzero(labels == row)[:count]]
                classifier.learn(images[chosen], labels[chosen], validation=0)
                tested = [np.isin(test_labels, rows) for rows in (new, order[:40])]
                scores = [classifier.score(test_images[t], test_labels[t]) for t in tested]
                accuracies[count].append((100 * scores[0], 100 * scores[1]))
                classifier.undo()
        cells = [
            f"{np.mean([few for few, _ in pairs]):.0f} / {np.mean([many for _, many in pairs]):.1f}"
            for pairs in accuracies.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--datasets", default="pocket,digits,fashion-mnist,split")
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    parser.add_argument("--data", type=Path, help="folder with arrays of photographs")
    parser.add_argument("--few", action="store_true")
    options = parser.parse_args()
    if options.few:
        compare_few_shot(options.seeds)
        return
    names = options.candidates.split(",")
    print("| data | taught | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for name in options.datasets.split(","):
        load, classes, count, sizes = DATASETS[name]
        data = load(options.data) if name == "photographs" else load()
        available = np.unique(data[1])
        for at_once in sizes:
            cells = []
            for candidate in (CANDIDATES[each] for each in names):
                accuracies = []
                for seed in range(options.seeds):
                    order = np.random.default_rng(seed).permutation(available)[:classes]
                    arguments = {**candidate, "epochs": options.epochs, "verbose": False}
                    rows = order.tolist()
                    accuracies.append(100 * accuracy(arguments, data, rows, count, at_once, seed))
                cells.append(f"{np.mean(accuracies):.1f} ± {np.std(accuracies):.1f}")
            taught = "one class at a time" if at_once == 1 else f"{at_once} classes at a time"
            print(f"| {name}, {classes} classes | {taught} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Measure what a lesson from another domain does to classes that are known already.

    python tools/measure_domains.py [--folders] [--seeds 3]

Teaches drawings of 30 classes of `pocket` in half of the ten styles, then drawings of the same
classes in the other styles, and measures the accuracy on test drawings of both halves after each
lesson. For comparison, one lesson with all of them. `--folders` teaches PNG files in class folders
instead of images in memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt import ContinualClassifier
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.streams.renditions import STYLES

CLASSES = 30
METHODS = ("ncm", "slda", "ranpac")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folders", action="store_true", help="teach class folders of PNG files")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    print("| method | after | old styles | new styles |\n|---|---|---|---|")
    for method in options.methods:
        rows = [accuracies(method, seed, options.folders) for seed in range(options.seeds)]
        means, deviations = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)
        for number, after in enumerate(("old styles", "then new styles", "both at once")):
            figures = zip(means[number], deviations[number], strict=True)
            cells = " | ".join(f"{mean:.1f} ± {deviation:.1f}" for mean, deviation in figures)
            print(f"| {method} | {after} | {cells} |", flush=True)


def accuracies(method: str, seed: int, folders: bool) -> NDArray[np.float64]:
    """Accuracy in % on old and new styles (columns) after three ways of teaching (rows)."""
    source = pocket_source()
    generator = np.random.default_rng(seed)
    rows = generator.permutation(len(source.class_names))[:CLASSES]
    styles = generator.permutation(len(STYLES))
    halves = styles[: len(STYLES) // 2], styles[len(STYLES) // 2 :]
    train = [drawings(source.train, source.class_names, rows, half) for half in halves]
    test = [drawings(source.test, source.class_names, rows, half) for half in halves]

    def measured(classifier: ContinualClassifier) -> list[float]:
        return [100 * classifier.score(*part) for part in test]

    def teach(classifier: ContinualClassifier, images: list[Any], labels: list[str]) -> None:
        if not folders:
            classifier.learn(images, labels)
            return
        with tempfile.TemporaryDirectory() as folder:
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                path = Path(folder, label, f"{number}.png")
                path.parent.mkdir(exist_ok=True)
                image.save(path)
            classifier.learn(folder)

    in_turn = ContinualClassifier("pocket", method, verbose=False)
    teach(in_turn, *train[0])
    first = measured(in_turn)
    teach(in_turn, *train[1])
    second = measured(in_turn)
    at_once = ContinualClassifier("pocket", method, verbose=False)
    teach(at_once, train[0][0] + train[1][0], train[0][1] + train[1][1])
    return np.array([first, second, measured(at_once)])


def drawings(
    split: Any, names: tuple[str, ...], rows: NDArray[np.int64], styles: NDArray[np.int64]
) -> tuple[list[Any], list[str]]:
    """Images of some classes in some styles, and their class names."""
    selected = np.flatnonzero(np.isin(split.labels, rows) & np.isin(split.domains, styles))
    return [split.image(i) for i in selected], [names[split.labels[i]] for i in selected]


if __name__ == "__main__":
    main()

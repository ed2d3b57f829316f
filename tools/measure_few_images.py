"""Measure RanPAC's classifier with few images of a class; docs/lab/few-images.md has the results.

    PYTHONPATH=src python tools/measure_few_images.py pocket
    PYTHONPATH=src python tools/measure_few_images.py photo --images FILE.npy --labels FILE.npy \\
        --backbone dinov2-s14@112=FILE.safetensors

Prints Markdown tables. Features are computed once and stored in `--cache`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.images.preprocessing import eval_view
from coda_prompt.research.methods.ridge import RandomRidge, RidgeConfig
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import load_backbone

CLASSES, OLD, NEW = 100, 80, 10
"""All classes, those taught with all their images, and those added, one to each copy of these."""
COUNTS = (1, 3, 5, 10)
PER_TASK = 10
MAX_WIDTH = 2048
PHOTO_TRAIN = 35

Features = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training features and labels, test features and labels."""


def pocket_features() -> Features:
    """Compute the features of the embedded drawings."""
    backbone, source = load_backbone("pocket"), pocket_source()
    parts = []
    for split in (source.train, source.test):
        views = (
            torch.from_numpy(eval_view(split.image(index), backbone.preprocessing, "squash"))
            for index in range(len(split.labels))
        )
        parts += [extracted(backbone.vit.features, views), torch.from_numpy(split.labels)]
    return parts[0], parts[1], parts[2], parts[3]


def photo_features(images: Path, labels: Path, name: str) -> Features:
    """Compute the features of the first classes; the first images of a class are for training."""
    backbone, pixels = load_backbone(name), np.load(images, mmap_mode="r")
    truth = torch.from_numpy(np.load(labels).astype(np.int64))
    members = [torch.nonzero(truth == row)[:, 0] for row in range(CLASSES)]
    parts = []
    for indices in (
        torch.cat([each[:PHOTO_TRAIN] for each in members]),
        torch.cat([each[PHOTO_TRAIN:] for each in members]),
    ):
        views = (
            torch.from_numpy(
                eval_view(Image.fromarray(pixels[index]), backbone.preprocessing, "crop")
            )
            for index in indices.tolist()
        )
        parts += [extracted(backbone.vit.features, views), truth[indices]]
    return parts[0], parts[1], parts[2], parts[3]


@torch.inference_mode()
def extracted(features: Callable[[Tensor], Tensor], views: object) -> Tensor:
    """Compute features in batches of 64."""
    batch, rows = list[Tensor](), list[Tensor]()
    for view in views:  # type: ignore[attr-defined]
        batch.append(view)
        if len(batch) == 64:
            rows.append(features(torch.stack(batch)))
            batch = []
    return torch.cat([*rows, *([features(torch.stack(batch))] if batch else [])])


def taught(
    features: Tensor, labels: Tensor, per_class: int, classes: int, **options: object
) -> RandomRidge:
    """Teach the first classes in tasks of ten, with the first images of each."""
    width = min(MAX_WIDTH, 16 * features.shape[1])
    ridge = RandomRidge(features.shape[1], width, RidgeConfig(**options))  # type: ignore[arg-type]
    solve = ridge.solve
    ridge.solve = lambda: None  # type: ignore[method-assign]  # once, after the last task
    for task in range(0, classes, PER_TASK):
        rows = range(task, min(task + PER_TASK, classes))
        chosen = torch.cat([torch.nonzero(labels == row)[:per_class, 0] for row in rows])
        ridge.grow(rows[-1] + 1)
        ridge.fit(features[chosen], labels[chosen], task // PER_TASK)
    del ridge.solve
    solve()
    return ridge


def standardised(scores: Tensor) -> Tensor:
    """Scale the scores of each image to mean 0 and variance 1."""
    return (scores - scores.mean(dim=1, keepdim=True)) / scores.std(dim=1, keepdim=True)


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the direction of each class's mean."""
    sums = torch.zeros(classes, features.shape[1])
    return F.normalize(sums.index_add(0, labels, features))


def new_class_table(data: Features) -> None:
    """Print the recall of one new class beside 80, and the accuracy of these.

    Balanced ridge with a selected ridge is what models used before; a lesson of one class selects
    no ridge.
    """
    features, labels, test, truth = data
    old = labels < OLD
    kinds = {
        "balanced ridge": taught(features, labels, 10**6, OLD, ridge=None, balance=True),
        "after": taught(features, labels, 10**6, OLD, ridge="relative", balance=True),
    }
    heads = ["nearest class mean", "balanced ridge", "their blend", "after"]
    print(f"| images of the new class | {' | '.join(heads)} |")
    print("|---|" + "---|" * len(heads))
    old_test = test[truth < OLD][::4]
    old_truth = truth[truth < OLD][::4]
    for count in COUNTS:
        recalls, olds = {head: 0.0 for head in heads}, {head: 0.0 for head in heads}
        for row in range(OLD, OLD + NEW):
            chosen = torch.nonzero(labels == row)[:count, 0]
            own = test[truth == row]
            both = torch.cat([own, old_test])
            wanted = torch.cat([torch.full((len(own),), OLD), old_truth])
            everything = torch.cat([torch.nonzero(old)[:, 0], chosen])
            means = class_means(features[everything], labels[everything].clamp(max=OLD), OLD + 1)
            scores = {"nearest class mean": F.normalize(both) @ means.T}
            for head, ridge in kinds.items():
                grown = copy.deepcopy(ridge)
                grown.grow(OLD + 1)
                grown.fit(features[chosen], torch.full((count,), OLD), OLD)
                scores[head] = grown(both)
            scores["their blend"] = standardised(scores["nearest class mean"]) + standardised(
                scores["balanced ridge"]
            )
            for head in heads:
                correct = (scores[head].argmax(dim=1) == wanted).double()
                recalls[head] += float(correct[: len(own)].mean()) / NEW
                olds[head] += float(correct[len(own) :].mean()) / NEW
        cells = [f"{100 * recalls[head]:.1f} ({100 * olds[head]:.1f})" for head in heads]
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


def all_classes_table(data: Features) -> None:
    """Print the accuracy with equally many images of every class."""
    features, labels, test, truth = data
    print("\n| images of every class | selected ridge | relative ridge | shrinkage | root of it |")
    print("|---|---|---|---|---|")
    for count in (10**6, 20, 5, 2):
        cells = []
        for ridge in (None, "relative"):
            fitted = taught(features, labels, count, CLASSES, ridge=ridge, balance=True)
            cells.append(float((fitted(test).argmax(dim=1) == truth).double().mean()))
        for power in (1.0, 0.5):
            fitted.fixed_ridge = shrinkage_ridge(fitted, power)
            fitted.ridge = torch.tensor(fitted.fixed_ridge)
            fitted.solve()
            cells.append(float((fitted(test).argmax(dim=1) == truth).double().mean()))
        shown = " | ".join(f"{100 * cell:.1f}" for cell in cells)
        print(f"| {'all' if count > 1000 else count} | {shown} |", flush=True)


def shrinkage_ridge(fitted: RandomRidge, power: float) -> float:
    """Return the ridge of oracle approximating shrinkage of the covariance within classes."""
    counts, sums = fitted.counts.frozen.double(), fitted.sums.frozen.double().T
    scatter = fitted._unpacked().double() - (sums / counts[:, None]).T @ sums
    freedom, width = float((counts - 1).sum()), len(scatter)
    trace, squares = float(scatter.trace()), float(scatter.square().sum())
    share = (1 - 2 / width) * squares + trace**2
    share /= (freedom + 1 - 2 / width) * (squares - trace**2 / width)
    share = min(0.99, share) ** power
    return share / (1 - share) * trace / width


def one_image_check(data: Features) -> None:
    """Print how many of their own training images 30 classes of one image answer right."""
    features, labels, _, _ = data
    chosen = torch.cat([torch.nonzero(labels == row)[:1, 0] for row in range(30)])
    width = features.shape[1]
    for ridge in (None, "relative"):
        config = RidgeConfig(ridge=ridge, balance=True)
        fitted = RandomRidge(width, min(MAX_WIDTH, 16 * width), config)
        fitted.grow(30)
        fitted.fit(features[chosen], labels[chosen], 0)
        scores = fitted(features[chosen])
        right = float((scores.argmax(dim=1) == labels[chosen]).double().mean())
        print(f"\n30 classes of one image, ridge {ridge or 'selected'}: {100 * right:.1f} % right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", choices=["pocket", "photo"])
    parser.add_argument("--images", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--backbone")
    parser.add_argument("--cache", type=Path, default=Path("/tmp"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cache = arguments.cache / f"few-images-{arguments.data}.npz"
    if not cache.exists():
        data = (
            pocket_features()
            if arguments.data == "pocket"
            else photo_features(arguments.images, arguments.labels, arguments.backbone)
        )
        np.savez(cache, *(part.numpy() for part in data))
    with np.load(cache) as arrays:
        parts = [torch.from_numpy(arrays[name]) for name in sorted(arrays.files)]
    loaded = (parts[0], parts[1], parts[2], parts[3])
    one_image_check(loaded)
    new_class_table(loaded)
    all_classes_table(loaded)


if __name__ == "__main__":
    main()

"""Measure how well images of untaught classes are recognised; docs/lab/unknown.md has the results.

    python tools/measure_unknown.py pocket
    python tools/measure_unknown.py photo --data /path/to/arrays --backbone photo

Half of the classes are set aside for choosing the score (--choose); the other half is reported.
`--data` has tiny-val.npy and cifar-test.npy (uint8, N x side x side x 3) with -labels.npy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.data.images import eval_view
from coda_prompt.data.pocket import pocket_source
from coda_prompt.learner.separation import auroc, false_positive_rate
from coda_prompt.learner.typicality import WEIGHTS
from coda_prompt.learner.unknown import UnknownDetector
from coda_prompt.methods.ridge import RandomRidge
from coda_prompt.model.catalog import LoadedBackbone, load_backbone

Labelled = tuple[Tensor, NDArray[np.int64]]
RATE = 0.05
HELD_DRAWINGS, HELD_PHOTOGRAPHS = 10, 15
"""Of the 80 training drawings and the 50 photographs of a class; not taught."""


def features_of(backbone: LoadedBackbone, images: list[Image.Image], resize: str) -> Tensor:
    """Compute the class tokens of images before the final norm, N x D in float64."""
    rows = []
    for start in range(0, len(images), 64):
        views = [
            eval_view(each, backbone.preprocessing, resize)  # type: ignore[arg-type]
            for each in images[start : start + 64]
        ]
        with torch.inference_mode():
            rows.append(backbone.vit.features(torch.stack(views), norm=False).double())
    return torch.cat(rows).clone()


def pocket(backbone: LoadedBackbone) -> tuple[Labelled, Labelled]:
    """Return features and labels of the training and the test drawings."""
    source = pocket_source()
    parts = []
    for split in (source.train, source.test):
        images = [split.image(index) for index in range(len(split.labels))]
        parts.append((features_of(backbone, images, "squash"), np.asarray(split.labels)))
    return parts[0], parts[1]


def photographs(
    backbone: LoadedBackbone, data: Path, name: str, classes: int, count: int
) -> Labelled:
    """Return features and labels of `count` photographs of each of the first classes."""
    images = np.load(data / f"{name}.npy", mmap_mode="r")
    labels = np.load(data / f"{name}-labels.npy")
    indices = np.concatenate([np.flatnonzero(labels == row)[:count] for row in range(classes)])
    opened = [Image.fromarray(images[index]) for index in indices]
    return features_of(backbone, opened, "crop"), labels[indices]


def divided(images: Labelled, count: int) -> tuple[Labelled, Labelled]:
    """Take the last `count` images of each class from the others."""
    features, labels = images
    last = np.concatenate([np.flatnonzero(labels == row)[-count:] for row in np.unique(labels)])
    is_held = np.isin(np.arange(len(labels)), last)
    first, second = ((features[torch.from_numpy(m)], labels[m]) for m in (~is_held, is_held))
    return first, second


def measure(
    train: Labelled,
    test: Tensor,
    held: Tensor,
    others: dict[str, Tensor],
    norm: Callable[[Tensor], Tensor],
) -> tuple[dict[str, dict[str, float]], float, float]:
    """Teach classes in three lessons and compare scores.

    Args:
        train: Images of the taught classes.
        test: Other images of the taught classes.
        held: Images of the taught classes from the same distribution as `train`.
        others: Images of untaught classes, by name of the set.
        norm: The final norm of the backbone, which the classifier of the maximum probability needs.

    Returns:
        AUROC of each score for each set, the share of `held` that is rejected, and the share of
        untaught images that is accepted if 95 % of `test` is, on the first set.
    """
    features, labels = train[0], torch.from_numpy(np.searchsorted(np.unique(train[1]), train[1]))
    classes = int(labels.max()) + 1
    detector, ridge = UnknownDetector(features.shape[1]), RandomRidge(features.shape[1], 2048, None)
    for lesson, rows in enumerate(torch.arange(classes).tensor_split(3)):
        own, seen = torch.isin(labels, rows), int(rows.max()) + 1
        detector = detector.learned(features[own], labels[own], seen)
        ridge.grow(seen, 0)
        ridge.fit(norm(features[own].float()), labels[own], lesson)
    scorer = detector.scorer()

    def scores(rows: Tensor) -> dict[str, Tensor]:
        single = dict(zip(WEIGHTS, scorer.measures(rows).T, strict=True))
        means = detector.moments.means()
        cosine = (F.normalize(rows) @ F.normalize(means).T).amax(dim=1)
        probability = torch.softmax(ridge(norm(rows.float())).double() / 0.1, dim=1).amax(dim=1)
        return {
            "maximum probability": probability,
            "cosine": cosine,
            **single,
            "combined": scorer.standardised(rows),
        }

    known = scores(test)
    table = {}
    for name, rows in others.items():
        unknown = scores(rows)
        table[name] = {score: auroc(known[score], unknown[score]) for score in known}
    rejected = float((scorer(held) < RATE).double().mean())
    first = scores(next(iter(others.values())))
    return table, rejected, false_positive_rate(known["combined"], first["combined"])


@dataclass(frozen=True)
class Features:
    """Features of all images of an experiment."""

    train: Labelled
    test: Labelled
    held: Labelled
    """Of the same distribution as `train`."""
    extra: dict[str, Tensor]
    """Images of classes that are in none of the others, by name of the set."""
    norm: Callable[[Tensor], Tensor]
    """The final norm of the backbone."""


def trial(
    images: Features, pool: NDArray[np.int64], seed: int
) -> tuple[dict[str, dict[str, float]], float, float]:
    """Draw taught and untaught classes from a pool, half of it each."""
    drawn = np.random.RandomState(seed).permutation(pool)
    taught, untaught = drawn[: len(pool) // 2], drawn[len(pool) // 2 :]
    train, test, held = (
        (features[np.isin(labels, taught)], labels[np.isin(labels, taught)])
        for features, labels in (images.train, images.test, images.held)
    )
    others = {"untaught": images.test[0][np.isin(images.test[1], untaught)], **images.extra}
    return measure(train, test[0], held[0], others, images.norm)


@torch.no_grad()
def report(images: Features, pool: NDArray[np.int64], seeds: list[int]) -> None:
    """Print the table of all scores, over seeds."""
    results = [trial(images, pool, seed) for seed in seeds]
    for name in results[0][0]:
        print(f"\n| AUROC, {name} | mean | by seed |\n|---|---|---|")
        for score in results[0][0][name]:
            values = [result[0][name][score] for result in results]
            print(f"| {score} | {np.mean(values):.3f} | {', '.join(f'{v:.3f}' for v in values)} |")
    rejected, accepted = (np.array([result[column] for result in results]) for column in (1, 2))
    print(f"\nrejected at {RATE:.0%}: {rejected.mean():.1%} ({np.round(100 * rejected, 1)})")
    print(f"untaught images accepted at 95 %: {accepted.mean():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", choices=["pocket", "photo"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--backbone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true", help="Use the classes set aside.")
    options = parser.parse_args()
    backbone = load_backbone(options.backbone or options.images)
    extra: dict[str, Tensor] = {}
    if options.images == "pocket":
        (drawings, test), set_aside = pocket(backbone), 40
        # The test drawings are cleaner than the training drawings: not for the rate of rejections.
        train, held = divided(drawings, HELD_DRAWINGS)
    else:
        features, labels = photographs(backbone, options.data, "tiny-val", 120, 50)
        train, test = divided((features, labels), HELD_PHOTOGRAPHS)
        held = test
        extra["CIFAR-100"] = photographs(backbone, options.data, "cifar-test", 40, 25)[0]
        set_aside = 60
    order = np.random.RandomState(123).permutation(len(np.unique(train[1])))
    pool = order[:set_aside] if options.choose else order[set_aside:]
    images = Features(train, test, held, extra, backbone.vit.norm)
    report(images, pool, options.seeds)


if __name__ == "__main__":
    main()

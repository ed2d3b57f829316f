"""Measure how well images of untaught classes are recognised; docs/lab/unknown.md has the results.

    python tools/measure_unknown.py pocket
    python tools/measure_unknown.py photo --data /path/to/arrays --backbone photo

Half of the classes are set aside for choosing the score (--choose); the other half is reported.
`--data` has tiny-val.npy and cifar-test.npy (uint8, N x side x side x 3) with -labels.npy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.images.preprocessing import eval_view
from coda_prompt.learner.separation import auroc, false_positive_rate
from coda_prompt.learner.typicality import Prior
from coda_prompt.learner.unknown import UnknownDetector
from coda_prompt.research.methods.ridge import RandomRidge, RidgeConfig
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import LoadedBackbone, load_backbone

Labelled = tuple[Tensor, NDArray[np.int64]]
RATES = (0.01, 0.05, 0.1)
HELD_DRAWINGS, HELD_PHOTOGRAPHS = 10, 15
"""Of the 80 training drawings and the 50 photographs of a class; not taught."""
LESSONS = 3


def features_of(backbone: LoadedBackbone, images: list[Image.Image], resize: str) -> Tensor:
    """Compute `ViT.plain_tokens` of images, N x 2 D in float64."""
    rows = []
    for start in range(0, len(images), 64):
        views = [
            torch.from_numpy(eval_view(each, backbone.preprocessing, resize))  # type: ignore[arg-type]
            for each in images[start : start + 64]
        ]
        with torch.inference_mode():
            rows.append(backbone.vit.plain_tokens(torch.stack(views)).double())
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


def taught(train: Labelled, width: int, prior: Prior | None) -> UnknownDetector:
    """Return a detector that has learned the classes in three lessons, in the order of labels."""
    features, labels = train[0], torch.from_numpy(np.searchsorted(np.unique(train[1]), train[1]))
    detector = UnknownDetector(width, prior=prior)
    for rows in torch.arange(int(labels.max()) + 1).tensor_split(LESSONS):
        own = torch.isin(labels, rows)
        detector = detector.learned(features[own], labels[own], int(rows.max()) + 1)
    return detector


def measure(
    train: Labelled, test: Tensor, others: dict[str, Tensor], backbone: LoadedBackbone
) -> tuple[dict[str, dict[str, float]], float]:
    """Teach classes in three lessons and compare scores.

    Args:
        train: Images of the taught classes.
        test: Other images of the taught classes.
        others: Images of untaught classes, by name of the set.
        backbone: Its norm is for the classifier of the maximum probability.

    Returns:
        AUROC of each score for each set, and the share of untaught images of the first set that is
        accepted if 95 % of `test` is.
    """
    width, norm, prior = backbone.vit.config.width, backbone.vit.norm, Prior.of(backbone)
    labels = torch.from_numpy(np.searchsorted(np.unique(train[1]), train[1]))
    ridge = RandomRidge(width, 2048, RidgeConfig())
    for lesson, rows in enumerate(torch.arange(int(labels.max()) + 1).tensor_split(LESSONS)):
        own = torch.isin(labels, rows)
        ridge.grow(int(rows.max()) + 1)
        ridge.fit(norm(train[0][own, :width].float()), labels[own], lesson)
    detector = taught(train, width if prior is None else prior.width, prior)
    scorer, means = detector.scorer(), detector.moments.means()[:, :width]

    def scores(rows: Tensor) -> dict[str, Tensor]:
        tokens, used = rows[:, :width], rows[:, : detector.width]
        probability = torch.softmax(ridge(norm(tokens.float())).double() / 0.1, dim=1).amax(dim=1)
        relative, distance = scorer.gaussians(used).T
        return {
            "maximum probability": probability,
            "cosine": (F.normalize(tokens) @ F.normalize(means).T).amax(dim=1),
            "Mahalanobis distance": distance,
            "relative Mahalanobis distance": relative,
            "score": scorer.standardised(used),
        }

    known, results = scores(test), {name: scores(rows) for name, rows in others.items()}
    table = {
        name: {score: auroc(known[score], unknown[score]) for score in known}
        for name, unknown in results.items()
    }
    first = next(iter(results.values()))
    for name, rows in others.items():
        rejected = float((scorer(rows) < 0.05).double().mean())
        print(f"rejected at 5 %, {name}: {rejected:.1%}")
    return table, false_positive_rate(known["score"], first["score"])


def drawn(pool: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw taught and untaught classes from a pool, half of it each."""
    order = np.random.RandomState(seed).permutation(pool)
    return order[: len(pool) // 2], order[len(pool) // 2 :]


def of_classes(images: Labelled, classes: NDArray[np.int64]) -> Labelled:
    """Select the images of some classes."""
    features, labels = images
    chosen = np.isin(labels, classes)
    return features[torch.from_numpy(chosen)], labels[chosen]


@torch.no_grad()
def report(
    train: Labelled,
    test: Labelled,
    extra: dict[str, Tensor],
    pool: NDArray[np.int64],
    seeds: list[int],
    backbone: LoadedBackbone,
) -> None:
    """Print the table of all scores, over seeds."""
    results = []
    for seed in seeds:
        known, unknown = drawn(pool, seed)
        others = {"untaught": of_classes(test, unknown)[0], **extra}
        results.append(
            measure(of_classes(train, known), of_classes(test, known)[0], others, backbone)
        )
    for name in results[0][0]:
        print(f"\n| AUROC, {name} | mean | by seed |\n|---|---|---|")
        for score in results[0][0][name]:
            values = [result[0][name][score] for result in results]
            print(f"| {score} | {np.mean(values):.3f} | {', '.join(f'{v:.3f}' for v in values)} |")
    print(f"\nuntaught images accepted at 95 %: {np.mean([each[1] for each in results]):.1%}")


@torch.no_grad()
def report_rates(
    train: Labelled,
    test: Labelled | None,
    pool: NDArray[np.int64],
    draws: int,
    held: int,
    backbone: LoadedBackbone,
) -> None:
    """Print the share of images of taught classes that is rejected, over draws.

    In each draw, `held` random images of each class of `train` are not taught.
    """
    prior, width = Prior.of(backbone), backbone.vit.config.width
    features, labels = train
    shares: dict[str, list[list[float]]] = {}
    for seed in range(draws):
        known, _ = drawn(pool, seed)
        order = np.random.RandomState(1000 + seed).permutation(len(labels))
        lesson, others = divided(of_classes((features[order], labels[order]), known), held)
        scorer = taught(lesson, width if prior is None else prior.width, prior).scorer()
        sets = {"images not taught": others[0]}
        if test is not None:
            sets["test images"] = of_classes(test, known)[0]
        for name, rows in sets.items():
            typicality = scorer(rows)
            row = [100 * float((typicality < rate).double().mean()) for rate in RATES]
            shares.setdefault(name, []).append(row)
    print(f"\n| rejected (%), {draws} draws, {held} images of a class not taught | rate | mean |")
    print("|---|---|---|")
    for name, rows_of in shares.items():
        table = np.array(rows_of)
        for column, rate in enumerate(RATES):
            values = table[:, column]
            error = values.std(ddof=1) / np.sqrt(draws)
            print(
                f"| {name} | {rate:.0%} | {values.mean():.2f} +- {error:.2f} "
                f"(single draws {values.min():.1f} to {values.max():.1f}) |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", choices=["pocket", "photo"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--backbone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=20, help="Draws for the rejected shares.")
    parser.add_argument("--choose", action="store_true", help="Use the classes set aside.")
    options = parser.parse_args()
    random = np.random.RandomState(0)
    backbone = load_backbone(options.backbone or options.images)
    extra: dict[str, Tensor] = {}
    noise = random.randint(0, 256, (200, 64, 64, 3)).astype(np.uint8)
    resize = "squash" if options.images == "pocket" else "crop"
    extra["noise"] = features_of(backbone, [Image.fromarray(each) for each in noise], resize)
    if options.images == "pocket":
        (images, test), set_aside, held = pocket(backbone), 40, HELD_DRAWINGS
        train = divided(images, held)[0]
        drawings = [pocket_source().test.image(index) for index in range(0, 2000, 10)]
        inverted = [ImageOps.invert(each) for each in drawings]
        extra["inverted drawings"] = features_of(backbone, inverted, resize)
    else:
        images = photographs(backbone, options.data, "tiny-val", 120, 50)
        train, test = divided(images, HELD_PHOTOGRAPHS)
        extra["CIFAR-100"] = photographs(backbone, options.data, "cifar-test", 40, 25)[0]
        set_aside, held = 60, HELD_PHOTOGRAPHS
    order = np.random.RandomState(123).permutation(len(np.unique(train[1])))
    pool = order[:set_aside] if options.choose else order[set_aside:]
    report(train, test, extra, pool, options.seeds, backbone)
    others = test if options.images == "pocket" else None
    report_rates(images, others, pool, options.draws, held, backbone)


if __name__ == "__main__":
    main()

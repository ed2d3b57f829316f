"""Compare what a ridge regression sees: random features of some tokens, or the tokens themselves.

    python tools/compare_random_features.py                         (drawings of pocket)
    python tools/compare_random_features.py --data DIR --images 15  (CIFAR-100)

DIR has arrays that tools/photo_data.py writes. All 100 classes are learned at once, because ridge
regression does not depend on their order. Accuracy in % on other training images, mean and
deviation over seeds, which change the images and the random features. docs/lab/token-ranpac.md has
the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.images.preprocessing import eval_view
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import LoadedBackbone, load_backbone

BLOCKS = 3
"""Blocks whose tokens are compared, counted from the last."""
RIDGES = (0.02, 0.05, 0.1)
"""Shares of an image's mean squared length."""
Part = tuple[str, int | None]
"""Which tokens, and the number of random features of them; None: the tokens themselves."""
TOKENS = {"class": slice(-2, -1), "last": slice(-2, None), "all": slice(None)}
"""The class token of the last block; with its mean patch token; those of all compared blocks."""
INFINITE = 0
"""Instead of a number of random features: their kernel, the limit of infinitely many."""
VARIANTS: dict[str, Sequence[Part]] = {
    "2,048 R(class)": [("class", 2048)],
    "2,048 R(class), last": [("class", 2048), ("last", None)],
    "2,048 R(class), all": [("class", 2048), ("all", None)],
    "1,280 R(class), last": [("class", 1280), ("last", None)],
    "1,280 R(class), all": [("class", 1280), ("all", None)],
    "1,792 R(class), last": [("class", 1792), ("last", None)],
    "1,920 R(class), class": [("class", 1920), ("class", None)],
    "R(class)": [("class", 4096)],
    "R(all)": [("all", 4096)],
    "R(class), R(all)": [("class", 2048), ("all", 2048)],
    "R(class), class": [("class", 4096), ("class", None)],
    "R(class), all": [("class", 4096), ("all", None)],
    "R(all), all": [("all", 4096), ("all", None)],
    "R(class), R(all), all": [("class", 2048), ("all", 2048), ("all", None)],
    "class": [("class", None)],
    "all": [("all", None)],
    "infinite R(class)": [("class", INFINITE)],
    "infinite R(all)": [("all", INFINITE)],
    "infinite R(class), all": [("class", INFINITE), ("all", None)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with arrays of photographs")
    parser.add_argument("--images", type=int, default=40, help="of each class to learn from")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    results: dict[str, list[list[float]]] = {name: [] for name in options.variants}
    for seed in range(options.seeds):
        parts = photographs(options.data, options.images, seed) if options.data else drawings(seed)
        (train, labels), test = choose(*parts[0], options.images), parts[1]
        for name in options.variants:
            results[name].append(accuracies(VARIANTS[name], train, labels, *test, seed))
    print("| h | " + " | ".join(f"ridge {ridge:g}" for ridge in RIDGES) + " |")
    print("|---" * (len(RIDGES) + 1) + "|")
    for name, rows in results.items():
        means, deviations = np.mean(rows, axis=0), np.std(rows, axis=0)
        cells = [f"{m:.1f} ± {d:.1f}" for m, d in zip(means, deviations, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def drawings(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Compute tokens of pocket's training drawings, a fifth of them to test on."""
    split, backbone = pocket_source().train, load_backbone("pocket")
    order = np.random.default_rng(seed).permutation(len(split.labels))
    fifth = len(order) // 5
    return [
        (tokens(backbone, (split.image(i) for i in rows)), torch.from_numpy(split.labels[rows]))
        for rows in (order[fifth:], order[:fifth])
    ]


def photographs(folder: Path, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Compute tokens of `count` training photographs of each class, and of 20 to test on."""
    images = np.load(folder / "cifar-train.npy", mmap_mode="r")
    labels = np.load(folder / "cifar-train-labels.npy")
    generator, backbone = np.random.default_rng(seed), load_backbone("photo-vit@84")
    chosen = [generator.permutation(np.flatnonzero(labels == row)) for row in range(100)]
    groups = [
        np.concatenate([rows[first:last] for rows in chosen])
        for first, last in ((0, count), (count, count + 20))
    ]
    return [
        (
            tokens(backbone, (Image.fromarray(images[index]) for index in rows)),
            torch.from_numpy(labels[rows]),
        )
        for rows in groups
    ]


@torch.inference_mode()
def tokens(backbone: LoadedBackbone, images: Iterable[Image.Image]) -> Tensor:
    """Compute the unit class token and mean patch token of the last blocks, n x tokens x D."""
    pixels = backbone.preprocessing
    views = [torch.from_numpy(eval_view(image, pixels, "squash")) for image in images]
    rows = [backbone.vit.pooled_features(batch, BLOCKS) for batch in torch.stack(views).split(64)]
    return F.normalize(torch.cat(rows).unflatten(1, (2 * BLOCKS, -1)), dim=2)


def choose(tokens: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first images of each class."""
    rows = torch.cat([(labels == row).nonzero()[:count, 0] for row in range(100)])
    return tokens[rows], labels[rows]


def accuracies(
    variant: Sequence[Part], train: Tensor, labels: Tensor, test: Tensor, answers: Tensor, seed: int
) -> list[float]:
    """Return the accuracy with each ridge; the regression is solved in its dual form."""
    kernels = [part_kernels(part, train, test, seed) for part in variant]
    own, cross = (sum(kernel[at] for kernel in kernels) for at in (0, 1))
    assert isinstance(own, Tensor)
    identity, targets = torch.eye(len(own)), F.one_hot(labels, 100).float()
    scores = [
        cross @ torch.linalg.solve(own + ridge * len(variant) * identity, targets)
        for ridge in RIDGES
    ]
    return [100 * float((each.argmax(dim=1) == answers).double().mean()) for each in scores]


def part_kernels(part: Part, train: Tensor, test: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return inner products of training images, and of test with training images.

    They are scaled to a mean squared length of 1.
    """
    which, random = part
    train, test = (each[:, TOKENS[which]].flatten(1) for each in (train, test))
    if random == INFINITE:
        own, cross = relu_kernel(train, train), relu_kernel(test, train)
    else:
        if random is not None:
            state = np.random.RandomState(seed)
            columns = torch.from_numpy(state.standard_normal((train.shape[1], random))).float()
            train, test = F.relu(train @ columns), F.relu(test @ columns)
        own, cross = train @ train.T, test @ train.T
    scale = own.diagonal().mean()
    return own / scale, cross / scale


def relu_kernel(left: Tensor, right: Tensor) -> Tensor:
    """Return what inner products of random ReLU features tend to (Cho and Saul 2009, degree 1)."""
    lengths = left.norm(dim=1)[:, None] * right.norm(dim=1)
    cosines = (left @ right.T / lengths).clamp(-1, 1)
    angles = cosines.acos()
    return lengths * (angles.sin() + (torch.pi - angles) * cosines) / torch.pi


if __name__ == "__main__":
    main()

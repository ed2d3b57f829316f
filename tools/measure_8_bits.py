"""Compare the features of an embedded ViT in 8 bits with those of its weights in float32.

    python tools/measure_8_bits.py pocket                  # drawings that are part of the package
    python tools/measure_8_bits.py photo-vit --folder DIR  # photographs in class folders

20 images of each class are learned, all others tested, three draws. Unknown images are those of
half of the classes. Writes what docs/lab/encoders-in-8-bits.md has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.encoder.encoder import load_encoder
from coda_prompt.encoder.threads import in_threads
from coda_prompt.images.folders import files_below
from coda_prompt.images.reading import open_image
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.statistics.classifier import Classifier, ClassifierOptions
from coda_prompt.statistics.moments import Moments
from coda_prompt.statistics.typicality import Gaussians

Values = NDArray[np.float32]
Item = tuple[Image.Image | str, int]
"""An image or its file, and its class."""
CLASSIFIERS = {
    "slda": ClassifierOptions("unit", "shared"),
    "ranpac": ClassifierOptions("random", "ridge"),
}
LEARNED, DRAWS = 20, 3


def drawings() -> list[Item]:
    source = pocket_source(0.0)
    return [
        (split.image(index), int(split.labels[index]))
        for split in (source.train, source.test)
        for index in range(len(split.labels))
    ]


def photographs(folder: Path, most: int) -> list[Item]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(f, row) for row, each in enumerate(classes) for f in files_below(str(each))[0][:most]]


def learned_rows(labels: NDArray[np.int64], classes: NDArray[np.int64], seed: int) -> Values:
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.flatnonzero(labels == row))[:LEARNED] for row in classes]
    return np.concatenate(rows)


def auroc(known: Values, unknown: Values) -> float:
    ranks = np.concatenate([unknown, known]).argsort().argsort() + 1
    above = ranks[len(unknown) :].sum() - len(known) * (len(known) + 1) / 2
    return float(above / len(known) / len(unknown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["pocket", "photo-vit"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--most", type=int, default=65, help="images of a class")
    options = parser.parse_args()
    encoder, backbone = load_encoder(options.name), load_backbone(options.name)
    items = drawings() if options.folder is None else photographs(options.folder, options.most)
    labels = np.array([label for _, label in items])

    def features(item: Item) -> tuple[Values, Values]:
        image = open_image(item[0]) if isinstance(item[0], str) else item[0]
        view = encoder.views(image)[0]
        with torch.inference_mode():
            exact = backbone.vit.features(torch.from_numpy(view)[None])[0].numpy()
        return encoder.encode(image).features, exact / np.linalg.norm(exact)

    torch.set_num_threads(1)
    quantised, exact = (np.stack(each) for each in zip(*in_threads(features, items), strict=True))
    cosines, classes = (quantised * exact).sum(axis=1), np.unique(labels)
    print(f"{len(labels)} images of {len(classes)} classes")
    print(f"cosine: mean {cosines.mean():.5f}, smallest {cosines.min():.4f}")
    for name, kind in CLASSIFIERS.items():
        correct = []
        for seed in range(DRAWS):
            rows = learned_rows(labels, classes, seed)
            test = np.setdiff1d(np.arange(len(labels)), rows)
            for each in (quantised, exact):
                empty = Classifier.empty(kind, each.shape[1])
                classifier = empty.learned(each[rows], labels[rows], len(classes))
                correct.append(classifier.scores(each[test]).argmax(axis=1) == labels[test])
        first, second = np.stack(correct[::2]) * 100.0, np.stack(correct[1::2]) * 100.0
        error = 1.96 * (first - second)[0].std() / first.shape[1] ** 0.5
        difference = (first - second).mean()
        shares = f"{first.mean():.2f} %, float32 {second.mean():.2f} %"
        print(f"{name}: {shares}, {difference:+.2f} +- {error:.2f}")
    areas = []
    for seed in range(DRAWS):
        known = np.sort(np.random.default_rng(seed).permutation(classes)[: len(classes) // 2])
        rows = learned_rows(labels, known, seed)
        test = np.setdiff1d(np.arange(len(labels)), rows)
        is_known = np.isin(labels[test], known)
        for each in (quantised, exact):
            moments = Moments.empty(each.shape[1])
            learned = moments.added(each[rows], np.searchsorted(known, labels[rows]))
            scores = Gaussians.of(learned).distances(each[test])[:, 0]
            areas.append(auroc(scores[is_known], scores[~is_known]))
    print(f"unknown images, AUROC: {np.mean(areas[::2]):.4f}, float32 {np.mean(areas[1::2]):.4f}")


if __name__ == "__main__":
    main()

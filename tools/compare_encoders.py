"""Compare encoders and classifiers on folders of photographs, as docs/lab/encoders.md does.

    python tools/compare_encoders.py flowers birds --encoder photo-vit --encoder photo
    python tools/compare_encoders.py flowers --encoder lite0/photo-lite.onnx --sizes 32 64

Each folder has a folder of images for each class. Encoders are named as for `--backbone`; a name
with a plus (`photo-vit+lite0/photo-lite.onnx`) is several of them, their features of unit length
side by side. Features are kept in `--cache`. Of each class, 20 images (or fewer: `--taught`) are
taught and the others classified, in several draws; AUROC is that of the images of unknown classes,
with half of the classes taught. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.encoder.encoder import Encoder, load_encoder
from coda_prompt.encoder.threads import in_threads
from coda_prompt.images.reading import open_image
from coda_prompt.statistics.algebra import unit
from coda_prompt.statistics.calibration import expected_calibration_error
from coda_prompt.statistics.classifier import OPTIONS, Classifier
from coda_prompt.statistics.moments import Moments
from coda_prompt.statistics.typicality import Gaussians

POOL = 20
"""Images of a class that are never classified, whichever of them are taught."""
METHODS = ("slda", "ranpac", "ncm")

Values = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Images of one draw."""

    features: Values
    labels: Labels
    tested: Values
    test_labels: Labels


@dataclass(frozen=True)
class Photographs:
    """Features of the images in folders of classes."""

    name: str
    features: Values
    labels: Labels

    def draws(self, taught: int, count: int) -> Iterator[Draw]:
        """Yield the same images for every encoder."""
        for seed in range(count):
            rng, chosen, rest = np.random.default_rng([seed, taught]), [], []
            for row in range(self.labels.max() + 1):
                order = rng.permutation(np.flatnonzero(self.labels == row))
                chosen.append(order[:POOL][:taught])
                rest.append(order[POOL:])
            train, test = np.concatenate(chosen), np.concatenate(rest)
            yield Draw(
                self.features[train], self.labels[train], self.features[test], self.labels[test]
            )


def reduced(image: Image.Image, side: int) -> Image.Image:
    """Reduce an image to a shorter side of so many pixels."""
    share = min(1.0, side / min(image.size))
    return image.convert("RGB").resize([max(1, round(share * length)) for length in image.size])


def encoded(encoder: Encoder, folder: Path, side: int | None, cache: Path) -> Photographs:
    """Encode the images of a folder, or read their features from the cache."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    paths = [(path, row) for row, each in enumerate(classes) for path in sorted(each.iterdir())]
    labels = np.array([row for _, row in paths])
    identity = f"{encoder.fingerprint} {folder.resolve()} {side} {len(paths)}"
    file = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npy"
    if not file.is_file():

        def features(path: Path) -> NDArray[np.float32]:
            image = open_image(path, None if side else encoder.min_side)
            return encoder.encode(image if side is None else reduced(image, side)).features

        cache.mkdir(exist_ok=True, parents=True)
        np.save(file, np.stack(list(in_threads(features, (path for path, _ in paths)))))
    name = folder.name if side is None else f"{folder.name}, {side} px"
    return Photographs(name, np.load(file).astype(np.float64), labels)


def learned(method: str, draw: Draw) -> Classifier:
    """Return a classifier of the taught images."""
    classifier = Classifier.empty(OPTIONS[method], draw.features.shape[1])
    return classifier.learned(draw.features, draw.labels, draw.labels.max() + 1)


def accuracy(method: str, draw: Draw) -> float:
    """Return the share of images that are classified correctly, in per cent."""
    correct = learned(method, draw).scores(draw.tested).argmax(axis=1) == draw.test_labels
    return 100 * float(correct.mean())


def calibration_error(method: str, draw: Draw) -> float:
    """Return the expected calibration error in per cent, with the temperature `learn` uses."""
    classifier = learned(method, draw)
    scores = classifier.scores(draw.tested)
    return 100 * expected_calibration_error(scores, draw.test_labels, classifier.temperature)


def unknown_auroc(draw: Draw) -> float:
    """Return how well the relative Mahalanobis distance tells half of the classes from others."""
    known = draw.labels % 2 == 0
    taught = Draw(draw.features[known], draw.labels[known] // 2, draw.tested, draw.test_labels)
    scores = Gaussians.of(_moments(taught)).distances(draw.tested)[:, 0]
    ranks = scores.argsort().argsort() + 1
    is_known = draw.test_labels % 2 == 0
    count = int(is_known.sum())
    pairs = count * (len(scores) - count)
    return float(ranks[is_known].sum() - count * (count + 1) / 2) / pairs


def _moments(draw: Draw) -> Moments:
    moments = Moments.empty(draw.features.shape[1]).grown(int(draw.labels.max()) + 1)
    return moments.added(draw.features, draw.labels)


def milliseconds(encoders: Sequence[Encoder]) -> float:
    """Return the time of an image in the networks, one image a run on one thread."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (300, 400, 3), dtype=np.uint8))
    times = []
    for _ in range(30):
        started = time.perf_counter()
        for encoder in encoders:
            encoder.encode(image)
        times.append(time.perf_counter() - started)
    return 1000 * float(np.median(times))


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def summary(values: Sequence[Sequence[float]], digits: int = 1) -> str:
    """Return means of draws for each number of taught images, with their deviations."""
    return " / ".join(f"{np.mean(each):.{digits}f}" for each in values) + (
        f" (±{max(np.std(each) for each in values):.{digits}f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--encoder", action="append", required=True)
    parser.add_argument("--taught", type=int, nargs="+", default=[20, 5, 1])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="shorter sides in pixels")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/coda-encoders"))
    options = parser.parse_args()
    sides = options.sizes or [None]
    loaded: dict[str, list[Encoder]] = {
        name: [load_encoder(part) for part in name.split("+")] for name in options.encoder
    }
    sets: dict[str, list[Photographs]] = {}
    for name, encoders in loaded.items():
        sets[name] = []
        for folder, side in ((folder, side) for folder in options.folders for side in sides):
            parts = [encoded(encoder, folder, side, options.cache) for encoder in encoders]
            features = unit(np.concatenate([unit(part.features) for part in parts], axis=1))
            sets[name].append(Photographs(parts[0].name, features, parts[0].labels))

    def table(title: str, measure: Any, taught: Sequence[int], digits: int = 1) -> None:
        print(f"\n{title}, {' / '.join(map(str, taught))} images a class\n")
        names = [photographs.name for photographs in sets[options.encoder[0]]]
        row("", *names)
        row(*["---"] * (len(names) + 1))
        for name, photographs in sets.items():
            cells = [
                [[measure(draw) for draw in each.draws(count, options.draws)] for count in taught]
                for each in photographs
            ]
            row(name, *(summary(values, digits) for values in cells))

    print("\nMilliseconds an image\n")
    for name, encoders in loaded.items():
        row(name, f"{milliseconds(encoders):.1f}")
    for method in METHODS:
        table(f"{method}, accuracy in %", lambda draw, m=method: accuracy(m, draw), options.taught)
    for method in METHODS:
        title = f"{method}, calibration error in %"
        table(title, lambda draw, m=method: calibration_error(m, draw), options.taught)
    several = [count for count in options.taught if count > 1]
    table("Unknown classes, AUROC", unknown_auroc, several, 3)


if __name__ == "__main__":
    main()

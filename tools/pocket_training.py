"""How `pretrain_pocket.py` trains: warped drawings, losses, and a resumable run with a schedule.

The augmentation is geometric only (flip, affine map, elastic displacement), so that most of the
benchmark's renditions (contrast, noise, blur, ground, stroke width, gaps) stay new to the backbone.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pocket_networks import Teacher
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger("pretrain_pocket")


def warp(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each drawing flipped, rotated, stretched, sheared, shifted and bent a little, B x 1 x H x W.

    One sampling by bicubic interpolation, because bilinear would blur strokes one pixel wide.
    """
    count, size = len(images), images.shape[-1]

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(count).uniform_(low, high, generator=generator)

    angle = uniform(-math.pi / 12, math.pi / 12)
    scale, stretch = uniform(0.85, 1.2), uniform(-0.12, 0.12)
    shear = uniform(-0.15, 0.15)
    flip = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    across, down = scale * (1 + stretch), scale * (1 - stretch)
    cosine, sine = angle.cos(), angle.sin()
    affine = torch.stack(
        [
            torch.stack([flip * across * cosine, -down * sine + shear, uniform(-0.12, 0.12)], -1),
            torch.stack([flip * across * sine, down * cosine, uniform(-0.12, 0.12)], -1),
        ],
        dim=1,
    )  # B x 2 x 3
    grid = F.affine_grid(affine, [count, 1, size, size], align_corners=False)
    coarse = torch.randn(count, 2, 4, 4, generator=generator) * 0.06
    bend = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    grid = grid + bend.permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="bicubic", align_corners=False).clamp_(0, 1)


@dataclass(frozen=True)
class Recipe:
    """How one network is trained. Either `minutes` or `epochs` sets the length."""

    minutes: float
    epochs: float
    learning_rate: float
    weight_decay: float = 0.05
    batch: int = 128
    warm_up: float = 0.04
    """Part of the schedule in which the learning rate rises."""
    average: float = 0.998
    """Decay of the moving average of the weights, per step."""


@dataclass(frozen=True)
class Drawings:
    """Images between 0 and 1, N x 1 x 28 x 28, and their labels."""

    images: Tensor
    labels: Tensor

    def of_batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[rows], self.labels[rows]


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images)[1].float(), labels)


def distillation(teacher: Teacher, temperature: float = 2.0) -> Loss:
    """Labels, the teacher's softened predictions, and the direction of the teacher's features."""

    def loss(student: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_features, teacher_logits = teacher(images)
        features, logits = student(images)
        logits = logits.float()
        hard = F.cross_entropy(logits, labels)
        soft = F.kl_div(
            F.log_softmax(logits / temperature, -1),
            F.log_softmax(teacher_logits.float() / temperature, -1),
            reduction="batchmean",
            log_target=True,
        )
        # What all drawings share would make every direction look alike.
        wanted = teacher_features.float() - teacher_features.float().mean(0)
        mapped = student.get_submodule("to_teacher")(features).float()
        direction = 1 - F.cosine_similarity(mapped - mapped.mean(0), wanted).mean()
        return 0.3 * hard + 0.7 * temperature**2 * soft + 2.0 * direction

    return loss


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels, none for biases, norms, tokens and positions."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        bare = name.endswith(("cls_token", "pos_embed"))
        (free if bare or parameter.dim() < 2 else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


class Run:
    """One network in training, with its average, its clock and its checkpoint."""

    def __init__(
        self, name: str, network: nn.Module, average: nn.Module, recipe: Recipe, work: Path
    ) -> None:
        self.name, self.network, self.recipe = name, network, recipe
        self.average = average
        self.average.load_state_dict(network.state_dict())
        self.average.requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(network, recipe.weight_decay), lr=recipe.learning_rate, fused=True
        )
        self.step = 0
        self.seconds = 0.0
        self.path = work / f"{name}.pt"

    def progress(self, images: int) -> float:
        """Part of the schedule that is done, 0 to 1."""
        if self.recipe.epochs:
            return min(1.0, self.step * self.recipe.batch / (self.recipe.epochs * images))
        return min(1.0, self.seconds / (60 * self.recipe.minutes))

    def learning_rate(self, progress: float) -> float:
        recipe = self.recipe
        if progress < recipe.warm_up:
            return recipe.learning_rate * max(progress / recipe.warm_up, 0.01)
        annealed = (progress - recipe.warm_up) / (1 - recipe.warm_up)
        return recipe.learning_rate * max(0.5 * (1 + math.cos(math.pi * annealed)), 1e-3)

    def gradients(self, loss: Loss, images: Tensor, labels: Tensor) -> tuple[float, list[Tensor]]:
        """Loss and gradients of one lane's part of the batch; runs in the lane's own thread."""
        # Lanes must not share the cache of cast weights: it is one for all threads.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = loss(self.network, images, labels)
        return value.item(), list(torch.autograd.grad(value, list(self.network.parameters())))

    def update(self, gradients: list[Tensor], progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        # A short average at first, or the random start would stay in it for long.
        decay = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            new = self.network.state_dict()
            for name, value in self.average.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(new[name], 1 - decay)

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        state = {
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "recipe": dataclasses.asdict(self.recipe),
        }
        torch.save(state, partial)
        os.replace(partial, self.path)

    def resume(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(
                f"{self.path} was trained with {state['recipe']}: give the same options to go on, "
                "or another --work to start afresh."
            )
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        log.info("%s: resumed after %d steps", self.name, self.step)


def accuracy(network: nn.Module, drawings: Drawings) -> float:
    """Top-1 in per cent, in evaluation mode."""
    with torch.inference_mode():
        batches = [network(images)[1].argmax(1) for images in drawings.images.split(500)]
    return 100 * (torch.cat(batches) == drawings.labels).double().mean().item()


def train(
    run: Run, loss: Loss, data: Drawings, validation: Drawings, seed: int, lanes: int
) -> None:
    """Train to the end of the schedule. Order and warps depend on the seed and the step only.

    A batch is cut into `lanes`, each computed by one thread alone: on a machine that does other
    work too, operations cut over all cores wait for the slowest one at every step.
    """
    run.resume()
    run.network.train()
    count, batch = len(data.labels), run.recipe.batch
    per_epoch = count // batch
    first, resumed_at, saved = run.step, run.seconds, run.seconds
    started = time.monotonic() - run.seconds
    losses: list[float] = []
    # The fused attention is slower backwards in bfloat16 than the rest of the network.
    with ThreadPoolExecutor(lanes) as pool, sdpa_kernel(SDPBackend.MATH):
        while (progress := run.progress(count)) < 1:
            epoch, place = divmod(run.step, per_epoch)
            if place == 0 or run.step == first:
                order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
            images, labels = data.of_batch(order[place * batch : (place + 1) * batch])
            images = warp(images, torch.Generator().manual_seed((seed << 32) + run.step))
            parts = list(
                pool.map(run.gradients, [loss] * lanes, images.chunk(lanes), labels.chunk(lanes))
            )
            losses.append(sum(value for value, _ in parts) / lanes)
            by_parameter = zip(*(gradients for _, gradients in parts), strict=True)
            run.update([torch.stack(each).mean(0) for each in by_parameter], progress)
            run.seconds = time.monotonic() - started
            if place == per_epoch - 1:
                done = run.progress(count)
                quality = f"loss {sum(losses) / len(losses):.3f}"
                if (epoch + 1) % 5 == 0:
                    quality += f", validation {accuracy(run.average, validation):.1f} %"
                log.info(
                    "%s epoch %d, %.0f %% of the schedule, %s, %.0f images/s, %.1f min left",
                    run.name,
                    epoch + 1,
                    100 * done,
                    quality,
                    (run.step - first) * batch / (run.seconds - resumed_at),
                    run.seconds * (1 - done) / done / 60,
                )
                losses.clear()
            if run.seconds - saved > 120:
                run.save()
                saved = run.seconds
    if run.step > first:
        run.save()

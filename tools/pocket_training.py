"""Training of `pretrain_pocket.py`: augmentation, losses, and a resumable training loop.

The augmentation is geometric only (flip, affine map, elastic displacement), so that the backbone
has not seen most of the benchmark's styles (contrast, noise, blur, background, stroke width, gaps).
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
    """Randomly flip, rotate, stretch, shear, shift and bend each drawing, B x 1 x H x W.

    Samples once, with bicubic interpolation: bilinear would blur strokes one pixel wide.
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
    """Hyperparameters of one network. Either `minutes` or `epochs` sets the length."""

    minutes: float
    epochs: float
    learning_rate: float
    weight_decay: float = 0.05
    batch: int = 128
    warm_up: float = 0.04
    """Fraction of the schedule in which the learning rate rises."""
    average: float = 0.998
    """Decay per step of the moving average of the weights."""


@dataclass(frozen=True)
class Drawings:
    """Images between 0 and 1, N x 1 x 28 x 28, and their labels."""

    images: Tensor
    labels: Tensor

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[rows], self.labels[rows]


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images)[1].float(), labels)


def distillation(teacher: Teacher, temperature: float = 2.0) -> Loss:
    """Combine losses on labels, softened teacher predictions and directions of teacher features."""

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
        # Without centring, what all drawings share would make all directions similar.
        target = teacher_features.float() - teacher_features.float().mean(0)
        mapped = student.get_submodule("to_teacher")(features).float()
        direction = 1 - F.cosine_similarity(mapped - mapped.mean(0), target).mean()
        return 0.3 * hard + 0.7 * temperature**2 * soft + 2.0 * direction

    return loss


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Apply weight decay to matrices and kernels, not to biases, norms, tokens and positions."""
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
    """A network in training with its weight average, schedule and checkpoint."""

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
        """Return the finished fraction of the schedule, 0 to 1."""
        if self.recipe.epochs:
            return min(1.0, self.step * self.recipe.batch / (self.recipe.epochs * images))
        return min(1.0, self.seconds / (60 * self.recipe.minutes))

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then cosine annealing."""
        recipe = self.recipe
        if progress < recipe.warm_up:
            return recipe.learning_rate * max(progress / recipe.warm_up, 0.01)
        annealed = (progress - recipe.warm_up) / (1 - recipe.warm_up)
        return recipe.learning_rate * max(0.5 * (1 + math.cos(math.pi * annealed)), 1e-3)

    def gradients(self, loss: Loss, images: Tensor, labels: Tensor) -> tuple[float, list[Tensor]]:
        """Compute loss and gradients of one lane's part of the batch, in the lane's own thread."""
        # The cache of cast weights is global; lanes would race for it.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = loss(self.network, images, labels)
        return value.item(), list(torch.autograd.grad(value, list(self.network.parameters())))

    def update(self, gradients: list[Tensor], progress: float) -> None:
        """Take an optimizer step and update the weight average."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        # Average over few steps at first, so that it forgets the random initial weights.
        decay = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            new = self.network.state_dict()
            for name, value in self.average.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(new[name], 1 - decay)

    def save(self) -> None:
        """Write a checkpoint atomically."""
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
        """Load the checkpoint, if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(
                f"{self.path} was trained with {state['recipe']}: use the same options to resume, "
                "or another --work to start again."
            )
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        log.info("%s: resumed after %d steps", self.name, self.step)


def accuracy(network: nn.Module, drawings: Drawings) -> float:
    """Return top-1 accuracy in percent."""
    with torch.inference_mode():
        batches = [network(images)[1].argmax(1) for images in drawings.images.split(500)]
    return 100 * (torch.cat(batches) == drawings.labels).double().mean().item()


def train(
    run: Run, loss: Loss, data: Drawings, validation: Drawings, seed: int, lanes: int
) -> None:
    """Train to the end of the schedule; order and augmentation depend on seed and step only.

    Each batch is split into `lanes`, one thread each: on a machine with other load, operations
    that use all cores would wait for the slowest core every time.
    """
    run.resume()
    run.network.train()
    count, batch = len(data.labels), run.recipe.batch
    per_epoch = count // batch
    first, resumed_at, saved = run.step, run.seconds, run.seconds
    started = time.monotonic() - run.seconds
    losses: list[float] = []
    # The backward pass of fused attention in bfloat16 is slower than the rest of the network.
    with ThreadPoolExecutor(lanes) as pool, sdpa_kernel(SDPBackend.MATH):
        while (progress := run.progress(count)) < 1:
            epoch, position = divmod(run.step, per_epoch)
            if position == 0 or run.step == first:
                order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
            images, labels = data.batch(order[position * batch : (position + 1) * batch])
            images = warp(images, torch.Generator().manual_seed((seed << 32) + run.step))
            parts = list(
                pool.map(run.gradients, [loss] * lanes, images.chunk(lanes), labels.chunk(lanes))
            )
            losses.append(sum(value for value, _ in parts) / lanes)
            by_parameter = zip(*(gradients for _, gradients in parts), strict=True)
            run.update([torch.stack(each).mean(0) for each in by_parameter], progress)
            run.seconds = time.monotonic() - started
            if position == per_epoch - 1:
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

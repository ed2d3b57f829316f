"""Small things to learn: tiny ViTs, and classes of noisy patterns."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from coda_prompt.data.sources import Source, array_source
from coda_prompt.methods import Method, TaskBrief
from coda_prompt.model.vit import ViT, ViTConfig
from coda_prompt.pixels import Pixels
from coda_prompt.training.loading import Views

TINY = ViTConfig(image_size=16, patch_size=4, channels=1, width=32, depth=6, heads=4, mlp_width=64)
PLAIN_VIEWS = Views(Pixels(16, 1, (0.5,), (0.5,)), augmentation=None, resize="squash")
AUGMENTED_VIEWS = Views(Pixels(16, 1, (0.5,), (0.5,)))


def tiny_vit(seed: int = 0, config: ViTConfig = TINY) -> ViT:
    """A ViT whose features differ from image to image, as those of a pre-trained one do."""
    generator = torch.Generator().manual_seed(seed)
    vit = ViT(config).initialise(generator)
    for name, parameter in vit.named_parameters():
        if parameter.dim() == 2:
            scale = parameter.shape[1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif name.endswith("cls_token"):
            parameter.data.zero_()
    return vit.eval()


def patterns(classes: int, train: int, test: int = 6, domains: int = 0, seed: int = 0) -> Source:
    """Classes that are noisy copies of one random pattern each."""
    random = np.random.default_rng(seed)
    prototypes = random.integers(0, 256, (classes, 16, 16)).astype(float)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        labels = np.repeat(np.arange(classes), count)
        noise = random.integers(0, 100, (len(labels), 16, 16))
        images = (prototypes[labels] * 0.6 + noise).astype(np.uint8)
        return images, labels, np.arange(len(labels)) % domains if domains else None

    train_images, train_labels, train_domains = draw(train)
    test_images, test_labels, test_domains = draw(test)
    return array_source(
        "patterns",
        train_images,
        train_labels,
        test_images,
        test_labels,
        train_domains=train_domains,
        test_domains=test_domains,
    )


def brief(method: Method, new: int, known: tuple[int, ...] = (), seed: int = 0) -> TaskBrief:
    """A task of `new` new classes and some known ones, without images."""
    seen = method.classes_seen
    classes = (*known, *range(seen, seen + new))
    return TaskBrief(len(method.task_sizes), seed, classes, torch.zeros(0, dtype=torch.int64))


CODA = (sys.executable, "-c", "from coda_prompt.cli import main; main()")


def _one_thread(options: dict[str, Any]) -> dict[str, Any]:
    """Tiny networks are fastest on one thread."""
    return {**options, "env": {"OMP_NUM_THREADS": "1", **(options.get("env") or os.environ)}}


def coda(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*CODA, *arguments]
    given = _one_thread(options)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **given)


def started_coda(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command at work in another process."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*CODA, *arguments], text=True, **pipes, **_one_thread(options))

"""Helpers for tests: tiny ViTs, classes of noisy patterns, and the `coda` command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from coda_prompt import methods
from coda_prompt.data.sources import Source, array_source
from coda_prompt.methods import Method, TaskBrief
from coda_prompt.model.vit import ViT, ViTConfig
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.training.loading import Views

TINY = ViTConfig(image_size=16, patch_size=4, channels=1, width=32, depth=6, heads=4, mlp_width=64)
PLAIN_VIEWS = Views(Preprocessing(16, 1, (0.5,), (0.5,)), augmentation=None, resize="squash")
AUGMENTED_VIEWS = Views(Preprocessing(16, 1, (0.5,), (0.5,)))


def tiny_vit(seed: int = 0, config: ViTConfig = TINY) -> ViT:
    """A random ViT whose features differ between images, as those of a pre-trained ViT do."""
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
    """A source in which each class consists of noisy copies of one random pattern."""
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
    """A task of `new` new classes and some seen before, without images."""
    seen = method.classes_seen
    classes = (*known, *range(seen, seen + new))
    return TaskBrief(len(method.task_sizes), seed, classes, torch.zeros(0, dtype=torch.int64))


CODA = (sys.executable, "-c", "from coda_prompt.cli import main; main()")


def _one_thread(options: dict[str, Any]) -> dict[str, Any]:
    """Tiny networks are fastest on one thread."""
    return {**options, "env": {"OMP_NUM_THREADS": "1", **(options.get("env") or os.environ)}}


def coda(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; in a forked process (zygote.py) if the environment allows."""
    if options.keys() <= {"cwd", "input"}:
        zygote = Zygote.started()
        if zygote.environment == _environment():
            return zygote.run(arguments, **options)
    command = [*CODA, *arguments]
    options = _one_thread(options)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}


class Zygote:
    """Client of zygote.py, which exits with the tests."""

    only: ClassVar[Zygote | None] = None

    def __init__(self) -> None:
        self.environment = _environment()
        script = str(Path(__file__).with_name("zygote.py"))
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            **_one_thread({}),
        )  # fmt: skip

    @classmethod
    def started(cls) -> Zygote:
        cls.only = cls.only or cls()
        return cls.only

    def run(
        self, arguments: Sequence[str], cwd: Path | None = None, input: str = ""
    ) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            for path, content in zip(files, (input, "", ""), strict=True):
                path.write_text(content)
            request = {
                "arguments": arguments,
                "cwd": str(cwd or Path.cwd()),
                "files": [str(path) for path in files],
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            child = int(self._process.stdout.readline())
            timeout = threading.Timer(120, os.kill, (child, signal.SIGKILL))
            timeout.start()
            code = int(self._process.stdout.readline())
            timeout.cancel()
            output = [path.read_text("utf-8", "surrogateescape") for path in files[1:]]
        return subprocess.CompletedProcess([*CODA, *arguments], code, *output)


def started_coda(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the command in another process."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*CODA, *arguments], text=True, **pipes, **_one_thread(options))


def reloaded(method: Method, folder: Path) -> Method:
    """Save the learned state to a safetensors file and load it into a new method."""
    state = {name: tensor.contiguous().clone() for name, tensor in method.learned_state().items()}
    save_file(state, folder / "state.safetensors")
    new = methods.make(method.name, tiny_vit(), **asdict(method.config))
    new.load_learned_state(load_file(folder / "state.safetensors"))
    return new

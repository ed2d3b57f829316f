"""Helpers for tests: tiny ViTs, classes of noisy patterns, scripts, and the `coda` command."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from forked import Forked
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load_file, save_file

from coda_prompt.errors import Interrupted
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.images.sources import ArraySplit, Integers, Source
from coda_prompt.research import methods
from coda_prompt.research.bench.runs import RESULT
from coda_prompt.research.methods import Method, TaskBrief
from coda_prompt.research.training.loading import Views
from coda_prompt.research.vit.vit import ViT, ViTConfig

Outcome = TypeVar("Outcome")
ROOT = Path(__file__).parents[1]
PAPER_METHODS = (
    "upper-bound",
    "er-5000",
    "ft",
    "ft++",
    "lwf-mc",
    "l2p++",
    "deep-l2p++",
    "dualprompt",
    "coda-p-s",
    "coda-p",
)
"""The rows of the CODA-Prompt paper."""
TINY = ViTConfig(image_size=16, patch_size=4, channels=1, width=32, depth=6, heads=4, mlp_width=64)
PLAIN_VIEWS = Views(Preprocessing(16, 1, (0.5,), (0.5,)), augmentation=None, resize="squash")
AUGMENTED_VIEWS = Views(Preprocessing(16, 1, (0.5,), (0.5,)))


def interrupted_repeatedly(
    run: Callable[[Callable[[], bool]], Outcome], first: int, attempts: int
) -> tuple[Outcome, int]:
    """Run something again and again, stopped at one of three polls in turn, until it finishes.

    Args:
        run: Takes the function that asks whether to stop.
        first: The first of the three polls.
        attempts: Most runs.

    Returns:
        What the last run returned, and how many were interrupted before it.
    """
    for attempt in range(attempts):
        polls = itertools.count(1)
        try:
            return run(lambda at=first + attempt % 3, polls=polls: next(polls) == at), attempt
        except Interrupted:
            continue
    raise AssertionError(f"not finished after {attempts} runs")


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


def array_source(
    name: str,
    train_images: NDArray[np.uint8],
    train_labels: ArrayLike,
    test_images: NDArray[np.uint8],
    test_labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    train_domains: ArrayLike | None = None,
    test_domains: ArrayLike | None = None,
    domain_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Source:
    """Make a source of uint8 arrays; unnamed classes and domains are called 0, 1, 2, ..."""
    train = ArraySplit(train_images, train_labels, train_domains)
    test = ArraySplit(test_images, test_labels, test_domains)
    if class_names is None:
        class_names = _default_names(train.labels, test.labels)
    if domain_names is None:
        domain_names = _default_names(train.domains, test.domains)
    return Source(name, tuple(class_names), train, test, tuple(domain_names), tuple(notes))


def _default_names(*arrays: Integers | None) -> tuple[str, ...]:
    largest = max(
        (int(array.max()) for array in arrays if array is not None and len(array)), default=-1
    )
    return tuple(str(number) for number in range(largest + 1))


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


def quick_options(name: str) -> dict[str, int]:
    """Options for a short training: small alignments, few random features."""
    known = {field.name for field in fields(methods.find(name).type.Config)}
    short = {"align_epochs": 1, "align_samples": 64, "infer_epochs": 1, "rank": 4, "width": 64}
    return {option: value for option, value in short.items() if option in known}


def quick_method(name: str) -> Method:
    return methods.make(name, tiny_vit(), **quick_options(name))


CODA = "from coda_prompt.cli import main; main()"
"""The program of the `coda` command."""


def coda(
    *arguments: str, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return Forked(CODA, *arguments, cwd=cwd, input=input).completed()


def started_coda(*arguments: str, new_session: bool = False) -> Forked:
    """Start the command in another process."""
    return Forked(CODA, *arguments, new_session=new_session)


def micro(tiny: Path, out: Path) -> list[str]:
    """Arguments of a benchmark of a few seconds."""
    settings = ("training.epochs=4", "training.batch_size=3", "trials=1")
    return [str(tiny), "--out", str(out), *(part for each in settings for part in ("--set", each))]


def comparable(out: Path) -> dict[str, Any]:
    """Return all results and logs below a folder except times and memory."""
    found = {}
    for path in sorted(out.rglob(RESULT)):
        result = json.loads(path.read_text())
        for name in ("seconds", "peak_memory_bytes"):
            del result[name]
        log = (path.parent / "events.jsonl").read_text()
        found[str(path.parent.relative_to(out))] = (result, log)
    return found


def reloaded(method: Method, folder: Path) -> Method:
    """Save the learned state to a safetensors file and load it into a new method."""
    state = {name: tensor.contiguous().clone() for name, tensor in method.learned_state().items()}
    save_file(state, folder / "state.safetensors")
    new = methods.make(method.name, tiny_vit(), **asdict(method.config))
    new.load_learned_state(load_file(folder / "state.safetensors"))
    return new


def tool(name: str) -> Any:
    """Import a script of tools/ by its name, with the scripts it imports itself."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    return importlib.import_module(name)

"""Shared fixtures: tiny ViTs and small real data; one thread per process."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of NumPy, before it is imported: results depend on it

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drawings import NAMES, SOURCE
from PIL import Image
from safetensors.torch import load_file
from small import coda, comparable, micro, tiny_vit
from torch import Tensor

from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research.vit.catalog import write_weights

GOLDEN = Path(__file__).parent / "golden"


SLOWEST = (
    *("serve", "contract", "serve_attacks", "checkpointing", "page", "models", "kills", "report"),
    *("fuzz", "paper_data", "devices", "commands", "bench", "engine", "cluster", "learner_shell"),
    *("distributed", "evaluation", "outside_methods", "catalog", "editing", "stream_contract"),
)
"""The slowest test files run first, so that all workers finish at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {f"test_{name}": rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    if os.name != "posix":
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip(reason="POSIX only"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny networks are fastest on one thread, and results are independent of the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden_tensors() -> dict[str, Tensor]:
    """Tensors computed by the released code; golden/README.md describes them."""
    return load_file(GOLDEN / "released.safetensors")


@pytest.fixture(scope="session")
def golden_numbers() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((GOLDEN / "released.json").read_text())
    return numbers


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark file with a folder of 16 x 16 images and a tiny ViT."""
    root = tmp_path_factory.mktemp("tiny")
    random = np.random.default_rng(0)
    for name in "abcdef":
        prototype = random.integers(0, 150, (16, 16))
        for part, count in (("train", 6), ("test", 3)):
            folder = root / "data" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = (prototype + random.integers(0, 100, (16, 16))).astype(np.uint8)
                Image.fromarray(image).save(folder / f"{number}.png")
    write_weights(
        root / "tiny.safetensors", tiny_vit(), Preprocessing(16, 1, (0.5,), (0.5,), "bilinear")
    )
    benchmark = {
        "name": "tiny",
        "source": str(root / "data"),
        "backbone": str(root / "tiny.safetensors"),
        "stream": {"tasks": 3},
        "trials": 2,
        "training": {"epochs": 1, "batch_size": 8},
        "methods": {
            "coda-p": {"options": {"components": 6}},
            "ncm": {},
            "upper-bound": {"training": {"learning_rate": 1e-3}},
        },
    }
    (root / "tiny.yaml").write_text(yaml.safe_dump(benchmark))
    return root / "tiny.yaml"


@pytest.fixture(scope="session")
def tiny_runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The finished benchmark: its folder and the output of --json."""
    out = tmp_path_factory.mktemp("runs")
    finished = coda("bench", str(tiny), "--json", "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    return out, json.loads(finished.stdout)


@pytest.fixture(scope="session")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results and logs of `micro`, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    finished = coda("bench", *micro(tiny, out))
    assert finished.returncode == 0, finished.stderr
    assert not list(out.rglob("checkpoint-*")), "nothing is left over"
    return comparable(out)


@pytest.fixture(scope="session")
def drawing_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders of four classes as PNG files, and a test folder of all twelve."""
    root = tmp_path_factory.mktemp("drawings")
    for row in range(12):
        for part, split, count in (
            (f"task-{row // 4 + 1}", SOURCE.train, 20),
            ("test", SOURCE.test, 8),
        ):
            folder = root / part / NAMES[row]
            folder.mkdir(parents=True)
            for number, index in enumerate(np.flatnonzero(split.labels == row)[:count]):
                split.image(int(index)).save(folder / f"{number:02}.png")
    return root

"""The recipe of `--fast`: recurring views with one query each, and bfloat16 where it is faster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from coda_prompt.bench.config import load_benchmark
from coda_prompt.cli import app
from coda_prompt.errors import BadOption
from coda_prompt.training.fast import fast_precision, fast_views


@pytest.mark.parametrize(("epochs", "views"), [(1, 1), (2, 1), (3, 2), (9, 5), (10, 5), (20, 10)])
def test_there_is_one_view_for_every_two_epochs(epochs: int, views: int) -> None:
    assert fast_views(epochs) == views


@pytest.mark.parametrize(
    ("device", "cuda", "cpu", "expected"),
    [
        ("auto", False, True, "bf16-mixed"),
        ("auto", False, False, "32-true"),
        ("cpu", True, False, "32-true"),
        ("cuda", True, False, "bf16-mixed"),
        ("auto", True, False, "bf16-mixed"),
        ("mps", False, True, "32-true"),
    ],
)
def test_bfloat16_is_used_where_the_device_has_it(
    device: str, cuda: bool, cpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    answer = "faster" if cpu else "slower"
    monkeypatch.setattr("coda_prompt.training.fast.bfloat16_products", lambda: answer)
    assert fast_precision(device) == expected


def test_a_fast_benchmark_has_exact_queries_of_recurring_views() -> None:
    exact = load_benchmark("pocket", [(("training", "queries"), "cached")])
    fast = load_benchmark("pocket", [(("training", "queries"), "cached"), (("fast",), True)])
    training = fast.method_training("coda-p", 0)
    assert (training.queries, training.views, training.epochs) == ("exact", 2, 3)
    assert exact.method_training("coda-p", 0).views is None
    assert fast.resolved(["coda-p"]).method_training("coda-p", 0) == training
    chosen = load_benchmark("pocket", [(("training", "views"), 1), (("fast",), True)])
    assert chosen.method_training("coda-p", 0).views == 1
    longer = load_benchmark("pocket", [(("training", "epochs"), 20), (("fast",), True)])
    assert longer.method_training("coda-p", 0).views == 10


def test_fast_says_what_it_does_and_takes_no_other_queries() -> None:
    done = CliRunner().invoke(app, ["bench", "pocket", "--fast", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "--fast: one view for every 2 epochs per image, each with one query" in done.output
    done = CliRunner().invoke(app, ["bench", "pocket", "--fast", "--queries", "cached"])
    assert isinstance(done.exception, BadOption)
    assert "--fast computes exact ones" in str(done.exception)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two drawings."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            pixels = random.integers(0, 256, (28, 28), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def test_a_fast_lesson_says_how_many_views_it_has(folder: Path, tmp_path: Path) -> None:
    arguments = ["learn", str(tmp_path / "model"), str(folder), "--backbone", "pocket", "--fast"]
    done = CliRunner().invoke(app, [*arguments, "--method", "coda-p", "--epochs", "1"])
    assert done.exit_code == 0, done.output
    assert "--fast: 1 view per image, each with one query" in done.output


def test_a_closed_form_has_nothing_to_train_fast(folder: Path, tmp_path: Path) -> None:
    """It is refused before the folder is read."""
    for images in (folder, tmp_path / "missing"):
        arguments = ["learn", str(tmp_path / "model"), str(images), "--backbone", "pocket"]
        done = CliRunner().invoke(app, [*arguments, "--fast"])
        assert isinstance(done.exception, BadOption)
        assert "ranpac has nothing to train" in str(done.exception)
    assert not (tmp_path / "model").exists()

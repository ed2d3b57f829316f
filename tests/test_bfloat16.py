"""bfloat16 on a CPU: timed once for a machine, attention in float32, and the recipe of `--fast`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from coda_prompt.cli import app
from coda_prompt.errors import BadOption
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.training import bfloat16
from coda_prompt.research.training.bfloat16 import KNOWN, bfloat16_products
from coda_prompt.research.training.devices import Devices
from coda_prompt.research.training.fast import fast_precision, fast_views
from coda_prompt.research.vit.fast_cpu import AttentionInFloat32


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the answer is kept, in an empty cache, as a new process sees it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bfloat16_products.cache_clear()
    yield tmp_path / "coda-prompt" / KNOWN
    bfloat16_products.cache_clear()


def test_the_answer_is_kept_for_this_machine(path: Path) -> None:
    answer = bfloat16_products()
    assert answer in ("faster", "slower", "fails")
    ((machine, kept),) = json.loads(path.read_text()).items()
    assert kept == answer
    path.write_text(json.dumps({"another machine": "slower", machine: "fails"}))
    bfloat16_products.cache_clear()
    assert bfloat16_products() == "fails", "it is not measured again"


@pytest.mark.parametrize("content", [b"\xff{", b"[1]", b'{"a": "?", "b": [], "c": "slower"}'])
def test_a_damaged_file_is_replaced(
    content: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    monkeypatch.setattr(bfloat16, "TIMED", "print('faster')")
    assert bfloat16_products() == "faster"
    known = json.loads(path.read_text())
    assert known.pop(bfloat16._machine()) == "faster"
    assert known == ({"c": "slower"} if b"c" in content else {})


@pytest.mark.posix
@pytest.mark.parametrize("program", ["os.kill(os.getpid(), signal.SIGILL)", "print('faster')"])
def test_a_cache_that_cannot_be_written_to(
    program: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.touch()  # a file in place of the folder
    monkeypatch.setattr(bfloat16, "TIMED", f"import os, signal; {program}")
    assert bfloat16_products() == ("faster" if "print" in program else "fails")


def test_a_process_that_does_not_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "TIMEOUT", 0.5)
    monkeypatch.setattr(bfloat16, "TIMED", "import time; time.sleep(60)")
    assert bfloat16_products() == "slower"
    assert not path.exists(), "the next process tries again"


def test_where_bfloat16_does_not_work(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({bfloat16._machine(): "fails"}))
    with pytest.raises(BadOption, match="bfloat16 does not work on this processor"):
        Devices("cpu", precision="bf16-mixed").fabric()


# -- attention


def rows() -> list[Tensor]:
    """Queries, keys and values: 2 images x 3 heads x tokens x 8 channels."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def test_outputs_and_gradients_are_those_of_torch_in_float32() -> None:
    mine, other = rows(), rows()
    found = AttentionInFloat32.apply(*mine)
    expected = F.scaled_dot_product_attention(*(each.float() for each in other))
    assert torch.equal(found, expected.bfloat16())
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found.backward(gradient)
    expected.backward(gradient.float())
    for each, reference in zip(mine, other, strict=True):
        assert each.grad is not None
        assert reference.grad is not None
        assert each.grad.dtype == torch.bfloat16
        error = (each.grad.float() - reference.grad.float()).abs().max()
        assert error < 0.01 * reference.grad.float().abs().max()  # the stored outputs are rounded


def test_inputs_and_outputs_are_stored_in_bfloat16() -> None:
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: stored.append(each.dtype) or each, lambda each: each
    ):
        AttentionInFloat32.apply(*rows())
    assert stored.count(torch.bfloat16) == 4
    assert len(stored) == 5  # and the normalisers


def test_an_empty_batch() -> None:
    empty = [each[:0] for each in rows()]
    assert AttentionInFloat32.apply(*empty).shape == (0, 3, 5, 8)


# -- --fast


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
    monkeypatch.setattr("coda_prompt.research.training.fast.bfloat16_products", lambda: answer)
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

"""Products in bfloat16 are timed once for a machine, in a process of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption
from coda_prompt.training import bfloat16
from coda_prompt.training.bfloat16 import KNOWN, bfloat16_products
from coda_prompt.training.devices import Devices
from coda_prompt.training.local import find_device


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


def test_where_bfloat16_does_not_work(path: Path, tmp_path: Path) -> None:
    """By default predictions are in float32; who asks for bfloat16 gets an error."""
    path.parent.mkdir()
    path.write_text(json.dumps({bfloat16._machine(): "fails"}))
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    classifier = ContinualClassifier("photo", device="cpu", verbose=False)
    classifier.learn(list(images), list("abab"), validation=0)
    assert classifier.network.fabric.precision == "32-true"  # type: ignore[union-attr]
    classifier.save(tmp_path / "model")
    Image.fromarray(images[0]).save(tmp_path / "image.png")
    arguments = ("predict", str(tmp_path / "model"), str(tmp_path / "image.png"), "--json")
    probability = json.loads(coda(*arguments).stdout)[0]["probability"]
    assert probability == classifier(images[:1])[0].probability
    refused = coda(*arguments, "--precision", "bf16-mixed")
    assert refused.returncode == 2
    assert "bfloat16 does not work on this processor; use 32-true" in refused.stderr
    with pytest.raises(BadOption, match="bfloat16 does not work on this processor"):
        find_device("cpu", "bf16-mixed")
    with pytest.raises(BadOption, match="bfloat16 does not work on this processor"):
        Devices("cpu", precision="bf16-mixed").fabric()

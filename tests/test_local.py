"""Predictions without Fabric: the device they use, and what they import."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from lightning_fabric import Fabric
from small import PLAIN_VIEWS, tiny_vit

from coda_prompt import methods
from coda_prompt.errors import BadOption
from coda_prompt.training.devices import Devices
from coda_prompt.training.engine import Engine
from coda_prompt.training.local import LocalDevice, find_device


def test_a_prediction_imports_neither_fabric_nor_the_engine() -> None:
    check = (
        "import sys, coda_prompt.cli.predict, coda_prompt.learner.saving, "
        "coda_prompt.learner.feedback, coda_prompt.learner.classifier; "
        "slow = {'lightning_fabric', 'torch._dynamo', 'coda_prompt.training.engine'}; "
        "sys.exit(str(slow & sys.modules.keys()) if slow & sys.modules.keys() else 0)"
    )
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_device_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device(name) == LocalDevice(torch.device("cpu"))


def test_the_best_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto").device == torch.device("cuda", 0)
    assert find_device("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("find", [find_device, lambda name: Devices(name).fabric()])
def test_a_device_that_is_not_here_is_refused(
    find: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "there-is-none"):
        message = f"Option 'device': '{name}' cannot be used on this machine; use auto, cpu."
        with pytest.raises(BadOption) as refused:
            find(name)
        assert str(refused.value) == message


@pytest.mark.parametrize("supported", [True, False])
def test_fast_predictions_use_bfloat16_where_it_exists(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("coda_prompt.training.fast.multiplies_bfloat16", lambda: supported)
    for fast in (True, False):
        with find_device("auto", fast=fast).autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (torch.bfloat16 if fast and supported else torch.float32)


def test_a_fabric_prints_nothing_about_its_precision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Devices("cpu", precision="bf16-mixed").fabric()
    assert not caplog.records


def test_processes_of_torchrun_get_a_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(find_device("cpu"), Fabric)


def test_an_engine_takes_a_local_device() -> None:
    engine = Engine(PLAIN_VIEWS, fabric=LocalDevice(torch.device("cpu")))
    assert isinstance(engine.fabric, Fabric)
    assert engine.fabric.device == torch.device("cpu")
    engine._move_to_device(methods.make("ncm", tiny_vit()))

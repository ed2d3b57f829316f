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
from coda_prompt.model.catalog import load_backbone
from coda_prompt.training.devices import Devices
from coda_prompt.training.engine import Engine
from coda_prompt.training.local import LocalDevice, Precision, find_device


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
@pytest.mark.parametrize("precision", [None, "32-true", "bf16-mixed"])
def test_predictions_of_wide_backbones_use_bfloat16_where_it_is_faster(
    supported: bool, precision: Precision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("coda_prompt.training.fast.multiplies_bfloat16", lambda: supported)
    device = find_device("auto", precision)
    assert isinstance(device, LocalDevice)
    for backbone in ("photo", "pocket"):
        with device.for_backbone(load_backbone(backbone).vit.config.width).autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        fastest = "bf16-mixed" if supported and backbone == "photo" else "32-true"
        expected = (precision or fastest) == "bf16-mixed"
        assert product.dtype == (torch.bfloat16 if expected else torch.float32)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(BadOption, match="'bfloat16' is not one of 32-true, bf16-mixed"):
        find_device("cpu", "bfloat16")  # type: ignore[arg-type]


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

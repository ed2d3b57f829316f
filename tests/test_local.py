"""Predictions without Fabric: the device they use, and what they import."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from small import PLAIN_VIEWS, tiny_vit

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption
from coda_prompt.research import methods
from coda_prompt.research.training.devices import Devices
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.local import LocalDevice, PredictionPrecision, find_device
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.vit import ViT, ViTConfig
from coda_prompt.serve.learning import Teacher
from coda_prompt.serve.service import Service


def test_a_prediction_imports_neither_fabric_nor_the_engine() -> None:
    check = (
        "import sys, coda_prompt.cli.predict, coda_prompt.learner.saving, "
        "coda_prompt.learner.feedback, coda_prompt.learner.classifier; "
        "slow = {'lightning_fabric', 'torch._dynamo', 'coda_prompt.research.training.engine'}; "
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
    supported: bool, precision: PredictionPrecision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    answer = "faster" if supported else "slower"
    monkeypatch.setattr("coda_prompt.research.training.fast.bfloat16_products", lambda: answer)
    device = find_device("auto", precision)
    assert isinstance(device, LocalDevice)
    for backbone in ("photo", "pocket"):
        with device.for_backbone(load_backbone(backbone).vit).autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        fastest = "bf16-mixed" if supported and backbone == "photo" else "32-true"
        expected = (precision or fastest) == "bf16-mixed"
        assert product.dtype == (torch.bfloat16 if expected else torch.float32)


def test_classifiers_predict_in_the_fastest_precision_and_learn_in_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("coda_prompt.research.training.fast.bfloat16_products", lambda: "faster")
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    classifier = ContinualClassifier("photo", device="cpu", verbose=False)
    classifier.learn(list(images), list("abab"), validation=0)
    classifier.predict(images)
    layer = classifier.network.backbone.vit.blocks[0].mlp.fc1
    assert layer._cast is not None
    classifier.learn(list(images), list("cdcd"), validation=0)
    assert layer._cast is None
    classifier.undo()
    classifier.save(tmp_path / "model")
    exact = ContinualClassifier("photo", device="cpu", precision="32-true", verbose=False)
    exact.learn(list(images), list("abab"), validation=0)
    for name, tensor in exact.network.tensors().items():
        assert torch.equal(tensor, classifier.network.tensors()[name]), name
    for load in (ContinualClassifier.load, ContinualClassifier.from_pretrained):
        loaded = load(tmp_path / "model", device="cpu")
        assert loaded.network.fabric.precision == "bf16-mixed"
        loaded = load(tmp_path / "model", device="cpu", precision="32-true")
        assert loaded.network.fabric.precision == "32-true"


def test_the_service_and_its_learning_process_predict_in_the_same_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_prompt.research.training.fast.bfloat16_products", lambda: "faster")
    ContinualClassifier("photo", device="cpu").save(tmp_path)
    for asked, used in ((None, "bf16-mixed"), ("32-true", "32-true")):
        service = Service(tmp_path, batching=True, device="cpu", precision=asked)
        teacher = Teacher(tmp_path, json.loads(service.process._command[-1]))
        for classifier in (service.current.classifier, teacher._current()):
            assert classifier.network.fabric == LocalDevice(torch.device("cpu"), used)


def test_a_backbone_in_float64_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coda_prompt.research.training.fast.bfloat16_products", lambda: "faster")
    vit = ViT(ViTConfig(width=256, heads=4, mlp_width=64, depth=1))
    device = LocalDevice(torch.device("cpu"))
    assert device.for_backbone(vit).precision == "bf16-mixed"
    assert device.for_backbone(vit.double()).precision == "32-true"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(BadOption, match="'bfloat16' is not one of 32-true, bf16-mixed"):
        find_device("cpu", "bfloat16")  # type: ignore[arg-type]


def test_a_fabric_prints_nothing_about_its_precision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Devices("cpu", precision="bf16-mixed").fabric()
    assert not caplog.records


def test_processes_of_torchrun_get_a_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    for asked, used in ((None, "32-true"), ("bf16-mixed", "bf16-mixed")):
        fabric = find_device("cpu", asked)  # type: ignore[arg-type]
        assert isinstance(fabric, Fabric)
        assert fabric.strategy.precision.precision == used


def test_an_engine_takes_a_local_device() -> None:
    engine = Engine(PLAIN_VIEWS, fabric=LocalDevice(torch.device("cpu")))
    assert isinstance(engine.fabric, Fabric)
    assert engine.fabric.device == torch.device("cpu")
    engine._move_to_device(methods.make("ncm", tiny_vit()))

"""Accumulated and distributed steps are the steps of one process with the whole batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_run import two_tasks
from lightning_fabric import Fabric
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.methods import METHODS

NAMES = [
    "coda-p",
    "coda-p-s",
    "l2p++",
    "dualprompt",
    "ft++",
    "lwf-mc",
    "er-5000",
    "ncm",
    "ranpac",
    "coda-p-ranpac",
]
TRAINED = [name for name in NAMES if not METHODS[name].type.fits]
PRECISIONS = ["32-true", "64-true"]


def one_process(precision: str) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision=precision)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """What two processes with DDP over gloo learn, by precision and method."""
    found = {}
    for precision in PRECISIONS:
        out = tmp_path_factory.mktemp(precision)
        script = Path(__file__).parent / "distributed_run.py"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        subprocess.run(
            [sys.executable, str(script), "2", precision, ",".join(NAMES), str(out)],
            check=True,
            timeout=300,
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for name in NAMES:
            found[f"{precision}/{name}"] = load_file(out / f"{name}.safetensors")
    return found


def check(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    """Gradients to 1e-5 in float32, parameters after the steps to 1e-9 in float64."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        if precision == "64-true":
            assert_close(found[key], tensor, rtol=1e-9, atol=1e-9, equal_nan=True, msg=key)
        elif key.startswith("gradient.0"):
            assert_close(found[key], tensor, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TRAINED)
def test_accumulating_small_batches_equals_the_large_one(name: str, precision: str) -> None:
    whole = two_tasks(name, one_process(precision))
    parts = two_tasks(name, one_process(precision), micro_batch=4)
    check(parts, whole, precision)


def test_accumulating_4_x_32_equals_128() -> None:
    whole = two_tasks("coda-p", one_process("64-true"), batch_size=128, epochs=5)
    parts = two_tasks("coda-p", one_process("64-true"), batch_size=128, micro_batch=32, epochs=5)
    check(parts, whole, "64-true")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(
    name: str, precision: str, two_processes: dict[str, dict[str, Tensor]]
) -> None:
    one = two_tasks(name, one_process(precision))
    if name in TRAINED:
        assert any(key.startswith("gradient.1.") for key in one), "new parameters of task 2"
    check(two_processes[f"{precision}/{name}"], one, precision)

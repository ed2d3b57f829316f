"""What tests share: tiny ViTs, small real data, and no fight over the cores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny networks are fastest on one thread, and results do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden_tensors() -> dict[str, Tensor]:
    """Tensors made by running the released code; golden/README.md says what each is."""
    return load_file(GOLDEN / "released.safetensors")


@pytest.fixture(scope="session")
def golden_numbers() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((GOLDEN / "released.json").read_text())
    return numbers

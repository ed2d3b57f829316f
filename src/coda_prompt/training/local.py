"""One device for predictions, without Fabric: importing it takes longer than importing torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from coda_prompt.errors import BadOption, join_names
from coda_prompt.training.fast import fast_precision

if TYPE_CHECKING:
    from lightning_fabric import Fabric

EXTERNAL = frozenset({"WORLD_SIZE", "SLURM_STEP_ID"})
"""Environment variables of processes that torchrun or Slurm started."""


@dataclass(frozen=True)
class LocalDevice:
    """A device with the attributes of a `Fabric` of one process."""

    device: torch.device
    bfloat16: bool = False
    """Compute products in bfloat16 instead of float32."""
    global_rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        if not self.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def all_reduce(self, data: Tensor, reduce_op: str) -> Tensor:
        return data


def find_device(name: str, *, fast: bool = False) -> Fabric | LocalDevice:
    """Return a device of this machine.

    Args:
        name: `auto`, `cpu`, `cuda` or `mps`.
        fast: Compute in bfloat16 if the device has it.

    Raises:
        BadOption: There is no such device.
    """
    check_device(name)
    precision = fast_precision(name) if fast else "32-true"
    if EXTERNAL & os.environ.keys():
        from coda_prompt.training.devices import Devices

        return Devices(name, precision=precision).fabric()
    kind = _available()[0] if name == "auto" else name
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return LocalDevice(device, bfloat16=precision == "bf16-mixed")


def check_device(name: str) -> None:
    """Raise BadOption if `name` is no device of this machine."""
    available = _available()
    if name != "auto" and name not in available:
        names = join_names(["auto", *available])
        raise BadOption("", "device", f"'{name}' cannot be used on this machine; use {names}")


def _available() -> list[str]:
    """Return the kinds of devices that torch can use here, the fastest first."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind in usable if usable[kind]] + ["cpu"]

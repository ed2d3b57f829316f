"""One device for predictions, without Fabric: importing it takes longer than importing torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from coda_prompt.errors import BadOption, join_names
from coda_prompt.research.training.bfloat16 import bfloat16_products
from coda_prompt.research.training.fast import fast_precision

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from coda_prompt.research.vit.vit import ViT

PredictionPrecision = Literal["32-true", "bf16-mixed"]
"""Precision of the products in predictions: float32 or bfloat16."""
WIDE = 256
"""Width from which bfloat16 makes predictions faster, also for one image."""
EXTERNAL = frozenset({"WORLD_SIZE", "SLURM_STEP_ID"})
"""Environment variables of processes that torchrun or Slurm started."""


@dataclass(frozen=True)
class LocalDevice:
    """A device with the attributes of a `Fabric` of one process."""

    device: torch.device
    precision: PredictionPrecision | None = None
    """None if nobody asked for one: float32 until `for_backbone` chooses."""
    global_rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1

    def for_backbone(self, vit: ViT) -> LocalDevice:
        """Return this device with the fastest precision for a backbone, unless one was asked for.

        bfloat16 changes no accuracy beyond half a point (docs/lab/performance.md).
        """
        if self.precision is not None:
            return self
        gains = vit.config.width >= WIDE and vit.cls_token.dtype == torch.float32
        return replace(self, precision=fast_precision(self.device.type) if gains else "32-true")

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.precision != "bf16-mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def all_reduce(self, data: Tensor, reduce_op: str) -> Tensor:
        return data


def find_device(name: str, precision: PredictionPrecision | None = None) -> Fabric | LocalDevice:
    """Return a device of this machine; a Fabric in a process that torchrun or Slurm started.

    Args:
        name: `auto`, `cpu`, `cuda` or `mps`.
        precision: Of predictions; by default the fastest one for the backbone. That of a Fabric is
            also the precision of lessons, and is float32 by default.

    Raises:
        BadOption: There is no such device or precision.
    """
    if precision is not None and precision not in get_args(PredictionPrecision):
        names = join_names(get_args(PredictionPrecision))
        raise BadOption("", "precision", f"'{precision}' is not one of {names}")
    check_device(name, precision)
    if EXTERNAL & os.environ.keys():
        from coda_prompt.research.training.devices import Devices

        return Devices(name, precision or "32-true").fabric()
    kind = _available()[0] if name == "auto" else name
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return LocalDevice(device, precision)


def check_device(name: str, precision: str | None = None) -> None:
    """Raise BadOption if `name` is no device of this machine, or has no such precision."""
    available = _available()
    if name != "auto" and name not in available:
        names = join_names(["auto", *available])
        raise BadOption("", "device", f"'{name}' cannot be used on this machine; use {names}")
    on_cpu = name == "cpu" or (name == "auto" and available == ["cpu"])
    if on_cpu and precision == "bf16-mixed" and bfloat16_products() == "fails":
        raise BadOption("", "precision", "bfloat16 does not work on this processor; use 32-true")


def _available() -> list[str]:
    """Return the kinds of devices that torch can use here, the fastest first."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind in usable if usable[kind]] + ["cpu"]

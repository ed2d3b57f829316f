"""One device for predictions, without Fabric: importing it takes longer than importing torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from coda_prompt.errors import BadOption, join_names
from coda_prompt.training.fast import fast_precision

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Precision = Literal["32-true", "bf16-mixed"]
"""Of predictions."""
WIDE = 256
"""Width from which a backbone gains for every batch if its products are computed in bfloat16."""
EXTERNAL = frozenset({"WORLD_SIZE", "SLURM_STEP_ID"})
"""Environment variables of processes that torchrun or Slurm started."""


@dataclass(frozen=True)
class LocalDevice:
    """A device with the attributes of a `Fabric` of one process."""

    device: torch.device
    precision: Precision | None = None
    """Of products; None until `for_backbone` chooses it, which is float32."""
    global_rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1

    def for_backbone(self, width: int) -> LocalDevice:
        """Return this device with the fastest precision for a backbone, unless one was asked for.

        bfloat16 changes no accuracy beyond half a point (docs/lab/performance.md).
        """
        if self.precision is not None:
            return self
        fastest = fast_precision(self.device.type) if width >= WIDE else "32-true"
        return replace(self, precision=fastest)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.precision != "bf16-mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def all_reduce(self, data: Tensor, reduce_op: str) -> Tensor:
        return data


def find_device(name: str, precision: Precision | None = None) -> Fabric | LocalDevice:
    """Return a device of this machine.

    Args:
        name: `auto`, `cpu`, `cuda` or `mps`.
        precision: Of predictions; by default the fastest one for the backbone.

    Raises:
        BadOption: There is no such device or precision.
    """
    check_device(name)
    if precision is not None and precision not in get_args(Precision):
        names = join_names(get_args(Precision))
        raise BadOption("", "precision", f"'{precision}' is not one of {names}")
    if EXTERNAL & os.environ.keys():
        from coda_prompt.training.devices import Devices

        return Devices(name, precision=precision or "32-true").fabric()
    kind = _available()[0] if name == "auto" else name
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return LocalDevice(device, precision)


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

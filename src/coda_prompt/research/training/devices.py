"""The device of a training, or the ranks of one that torchrun or Slurm started.

Every rank runs the same command. Only rank 0 writes files and logs.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.plugins.precision.double import DoublePrecision
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from coda_prompt.errors import BadOption, CodaError, Interrupted, ProcessDied, join_names
from coda_prompt.research.methods import Method
from coda_prompt.research.training.bfloat16 import bfloat16_products

Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]
ERROR_KEY = "coda-problem"
"""Key under which a failing rank leaves its error message in the distributed store."""


class Double(DoublePrecision):
    """Float64 throughout: Fabric's own class rounds the outputs of a module to float32."""

    def convert_output(self, data: Any) -> Any:
        return data


class Replicated(DDPStrategy):
    """Every rank has the whole method; gradients are averaged.

    Frozen parameters and buffers are equal on all ranks from the start and are not broadcast.
    """

    def __init__(self, **settings: Any) -> None:
        options = inspect.signature(DistributedDataParallel).parameters
        new_name = "forward_sync_buffers"  # since torch 2.13
        settings[new_name if new_name in options else "broadcast_buffers"] = False
        super().__init__(**settings)
        # Strides differ in dimensions of size 1 only.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view", UserWarning)

    def prepare(self, method: Method) -> None:
        """Prepare a method that is on its device for training."""
        if method.frozen_backbone:
            names = [f"backbone.{name}" for name, _ in method.backbone.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(method, names)


@dataclass(frozen=True)
class Devices:
    """A device of this process; of each rank, if torchrun or Slurm started several."""

    accelerator: str = "auto"
    precision: Precision = "32-true"

    @property
    def distributed(self) -> bool:
        """Whether there is more than one rank."""
        devices, nodes = _started_ranks()
        return devices * nodes > 1

    def fabric(self) -> Fabric:
        """Return a Fabric for these devices; `connected` also connects its ranks.

        Raises:
            BadOption: They do not exist.
        """
        devices, nodes = _started_ranks()
        strategy = Replicated() if devices * nodes > 1 else "auto"
        check_device(self.accelerator, self.precision)
        precision: dict[str, Any] = {"precision": self.precision}
        if self.precision == "64-true":
            precision = {"plugins": Double()}
        try:
            with _without_info_logs():
                return Fabric(
                    accelerator=self.accelerator,
                    devices=devices,
                    num_nodes=nodes,
                    strategy=strategy,
                    **precision,
                )
        except Exception as error:  # Fabric's exceptions differ between accelerators
            problem = f"{devices} x '{self.accelerator}' cannot be used here ({error})"
            raise BadOption("", "devices", problem) from error

    @contextlib.contextmanager
    def connected(self) -> Iterator[Fabric]:
        """Connect all ranks and run the block on each; what follows it, rank 0 does alone.

        If another rank fails, rank 0 raises its error. All ranks leave the block together: one
        that exits while others communicate with it would make them fail.
        """
        fabric = self.fabric()
        if not isinstance(fabric.strategy, Replicated):
            yield fabric
            return
        try:
            with _without_info_logs():
                fabric.launch()
        except ValueError as error:  # Slurm's variables contradict each other
            raise BadOption("the training", "devices", str(error)) from error
        with _silent() if fabric.global_rank else contextlib.nullcontext():
            try:
                yield fabric
            except Interrupted:  # on all ranks at the same step
                fabric.barrier()
                if fabric.global_rank:
                    raise SystemExit from None
                raise
            except (CodaError, OSError) as error:
                if not fabric.global_rank:
                    raise
                _store().set(ERROR_KEY, str(error))
                raise SystemExit(CodaError.exit_code) from error
            except RuntimeError as error:
                if not _is_lost_connection(error):
                    raise
                if fabric.global_rank:
                    raise SystemExit(CodaError.exit_code) from error
                raise _peer_error() from error
            fabric.barrier()
            distributed.destroy_process_group()
            if fabric.global_rank:
                raise SystemExit


def any_rank(fabric: Fabric, flag: Callable[[], bool]) -> Callable[[], bool]:
    """Return a flag that is true on all ranks if `flag` is true on any.

    All ranks have to ask at the same point.
    """

    def reduced() -> bool:
        count = torch.tensor(float(flag()), device=fabric.device)
        return bool(fabric.all_reduce(count, reduce_op="sum"))

    return reduced


def _started_ranks() -> tuple[int, int]:
    """Ranks per node and nodes that torchrun or srun started; one of each by default."""
    if TorchElasticEnvironment.detect():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        return devices, int(os.environ["WORLD_SIZE"]) // devices
    if "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect():  # by srun
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            problem = f"Slurm started {tasks} processes on {nodes} nodes; start as many on each"
            raise BadOption("the training", "devices", problem)
        return tasks // nodes, nodes
    return 1, 1


@contextlib.contextmanager
def _without_info_logs() -> Iterator[None]:
    """Hide Fabric's messages about the ranks it connects and the precision it uses."""
    level = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard standard output and error."""
    with (
        open(os.devnull, "w") as devnull,
        contextlib.redirect_stdout(devnull),
        contextlib.redirect_stderr(devnull),
    ):
        yield


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def _peer_error() -> CodaError:
    """The error another rank left in the store; if it left none, it died."""
    if distributed.is_initialized() and (store := _store()).check([ERROR_KEY]):
        return CodaError(store.get(ERROR_KEY).decode())
    return ProcessDied("trains this model", "without an error message")


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

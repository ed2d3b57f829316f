"""Devices and processes of one training, on this machine or started by torchrun or Slurm.

Every rank runs the same command. Only rank 0 writes files and logs.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.plugins.precision.double import DoublePrecision
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from coda_prompt.console import escape_control_characters
from coda_prompt.errors import BadOption, CodaError, Interrupted, ProcessDied
from coda_prompt.methods import Method
from coda_prompt.shutdown import exit_with_parent
from coda_prompt.training.local import check_device

Strategy = Literal["auto", "ddp", "fsdp"]
Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]
PARENT = "CODA_PARENT"
"""Environment variable with the process id of rank 0 for the ranks it starts."""
GRACE_SECONDS = 10.0
"""How long rank 0 may take to notice a failed rank itself and report a better error."""
HARMLESS_WARNINGS = (
    "Grad strides do not match bucket view",  # only of dimensions of size 1
    "FSDP2-wrapped module",  # about in-place changes to a block's output, which we do not make
)
ERROR_KEY = "coda-problem"
"""Key under which a failing rank leaves its error message in the distributed store."""


class _Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks of this machine, which exit with this process.

    Fabric's launcher kills rank 0 as soon as another rank fails, before it can report why. The
    launcher of torchrun (`torch.distributed.launcher`) does not fit either: its agent is a further
    process, while rank 0 has to be the process the user started (terminal, output, exit code), and
    it terminates all ranks on a signal instead of letting them finish and checkpoint a step.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, daemon=True).start()
            atexit.register(self._kill)
        elif PARENT in os.environ:
            exit_with_parent(int(os.environ[PARENT]), CodaError.exit_code)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()
        del os.environ[PARENT]

    def _watch(self) -> None:
        """End all ranks when one has failed or died, with the error it left."""
        while True:
            time.sleep(1)
            if any(process.poll() for process in self.procs):
                time.sleep(GRACE_SECONDS)
                message = escape_control_characters(str(_peer_error()))
                print(f"coda: {message}", file=sys.stderr, flush=True)  # noqa: T201
                self._kill()
                os._exit(CodaError.exit_code)

    def _kill(self) -> None:
        for process in self.procs:
            process.kill()


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
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message, UserWarning)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def prepare(self, method: Method) -> None:
        """Prepare a method that is on its device for training."""
        if method.frozen_backbone:
            names = [f"backbone.{name}" for name, _ in method.backbone.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(method, names)


class Sharded(Replicated):
    """As `Replicated`, but the frozen backbone is sharded over the ranks (FSDP2, per block)."""

    def prepare(self, method: Method) -> None:
        super().prepare(method)
        check_shardable(type(method), method.name)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
        from torch.distributed.tensor import DTensor

        if any(isinstance(parameter, DTensor) for parameter in method.backbone.parameters()):
            return
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for block in method.backbone.blocks:
            fully_shard(block, mesh=mesh)
            register_fsdp_forward_method(block, "project")


def check_shardable(method_type: type[Method], name: str) -> None:
    """Raise BadOption if a method cannot be trained with a sharded backbone."""
    if not method_type.frozen_backbone:
        problem = f"{name} trains the backbone, which fsdp cannot shard; use ddp"
        raise BadOption("the training", "strategy", problem)


@dataclass(frozen=True)
class Devices:
    """The requested devices; by default what torchrun or Slurm started, or one device."""

    accelerator: str = "auto"
    devices: int | None = None
    """Devices per node."""
    nodes: int | None = None
    strategy: Strategy = "auto"
    precision: Precision = "32-true"

    def __post_init__(self) -> None:
        if self.strategy == "fsdp" and not self.distributed:
            raise BadOption("the training", "strategy", "fsdp needs more than one device")

    @property
    def distributed(self) -> bool:
        """Whether there is more than one rank."""
        devices, nodes = _started_externally() or (1, 1)
        return (self.devices or devices) * (self.nodes or nodes) > 1

    def fabric(self) -> Fabric:
        """Return a Fabric for these devices; `launch_processes` also starts its ranks.

        Raises:
            BadOption: They do not exist or are not what torchrun or Slurm started.
        """
        external = _started_externally()
        devices, nodes = external or (1, 1)
        for option, requested, started in (
            ("devices", self.devices, devices),
            ("nodes", self.nodes, nodes),
        ):
            if external and requested not in (None, started):
                problem = f"{requested} requested, but {started} were started; omit this option"
                raise BadOption("the training", option, problem)
        devices, nodes = self.devices or devices, self.nodes or nodes
        strategy: Any = "auto"
        if devices * nodes > 1:
            strategy_type = Sharded if self.strategy == "fsdp" else Replicated
            environment = None if external else LightningEnvironment()
            strategy = strategy_type(cluster_environment=environment)
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
    def launch_processes(self) -> Iterator[Fabric]:
        """Start all ranks and run the block on each; what follows it, rank 0 does alone.

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


def _started_externally() -> tuple[int, int] | None:
    """Devices per node and nodes if torchrun or srun started this process."""
    if TorchElasticEnvironment.detect():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        return devices, int(os.environ["WORLD_SIZE"]) // devices
    if "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect():  # by srun
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            problem = f"Slurm started {tasks} processes on {nodes} nodes; start as many on each"
            raise BadOption("the training", "devices", problem)
        return tasks // nodes, nodes
    return None


@contextlib.contextmanager
def _without_info_logs() -> Iterator[None]:
    """Hide Fabric's messages about the ranks it starts and the precision it uses."""
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

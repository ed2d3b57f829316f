"""Where one training runs: devices of this machine, or the processes torchrun or Slurm started.

Every process runs the same command; the first one alone writes files and speaks.
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

Strategy = Literal["auto", "ddp", "fsdp"]
Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]
PARENT = "CODA_PARENT"
"""The variable in which a process that is started here finds whose it is."""
PATIENCE = 10.0
"""Seconds a process has to notice that another one is gone."""
HARMLESS = (
    "Grad strides do not match bucket view",  # of a dimension of size 1, where they mean nothing
    "FSDP2-wrapped module",  # of in-place changes to what a block gives: there is none
)
"""Warnings of torch that are not about us."""
PROBLEM = "coda-problem"
"""Where a process that fails leaves the reason for the one that speaks."""


class _Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine, which end with this one.

    Fabric's own kills this process as soon as it sees another fail, before it can say why.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, daemon=True).start()
            atexit.register(self._end)
        elif PARENT in os.environ:
            exit_with_parent(int(os.environ[PARENT]), CodaError.exit_code)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()
        del os.environ[PARENT]

    def _watch(self) -> None:
        """A process that fails leaves its reason; one that dies leaves none. Both end all."""
        while True:
            time.sleep(1)
            codes = [process.poll() for process in self.procs]
            if any(codes):
                time.sleep(PATIENCE)  # this one may notice by itself, and say it better
                reason = escape_control_characters(str(_peer_error()))
                print(f"coda: {reason}", file=sys.stderr, flush=True)  # noqa: T201
                self._end()
                os._exit(CodaError.exit_code)

    def _end(self) -> None:
        for process in self.procs:
            process.kill()


class Double(DoublePrecision):
    """Float64 to the end: Fabric's own rounds what a module gives, also a loss, to float32."""

    def convert_output(self, data: Any) -> Any:
        return data


class Replicated(DDPStrategy):
    """Every device has all of the method; gradients are averaged.

    What does not train is the same everywhere from the start and stays so: it is not sent around.
    """

    def __init__(self, **settings: Any) -> None:
        known = inspect.signature(DistributedDataParallel).parameters
        older = "forward_sync_buffers" not in known  # before torch 2.13
        settings["broadcast_buffers" if older else "forward_sync_buffers"] = False
        super().__init__(**settings)
        for words in HARMLESS:
            warnings.filterwarnings("ignore", words, UserWarning)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def place(self, method: Method) -> None:
        """Once the method is on its device."""
        if method.frozen_backbone:
            names = [f"backbone.{name}" for name, _ in method.backbone.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(method, names)


class Sharded(Replicated):
    """The frozen backbone lies in parts on all devices, put together block by block when needed."""

    def place(self, method: Method) -> None:
        super().place(method)
        check_shardable(type(method), method.name)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
        from torch.distributed.tensor import DTensor

        if any(isinstance(own, DTensor) for own in method.backbone.parameters()):
            return
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for block in method.backbone.blocks:
            fully_shard(block, mesh=mesh)
            register_fsdp_forward_method(block, "project")


def check_shardable(kind: type[Method], name: str) -> None:
    if not kind.frozen_backbone:
        problem = f"{name} trains the backbone that fsdp spreads; use ddp"
        raise BadOption("the training", "strategy", problem)


@dataclass(frozen=True)
class Devices:
    """As asked for; what is not said is what torchrun or Slurm started, or else one device."""

    accelerator: str = "auto"
    devices: int | None = None
    """Of each node."""
    nodes: int | None = None
    strategy: Strategy = "auto"
    precision: Precision = "32-true"

    def __post_init__(self) -> None:
        if self.strategy == "fsdp" and not self.several:
            raise BadOption("the training", "strategy", "fsdp needs more than one device")

    @property
    def several(self) -> bool:
        """Whether more than one process is to work together."""
        devices, nodes = _started_outside() or (1, 1)
        return (self.devices or devices) * (self.nodes or nodes) > 1

    def fabric(self) -> Fabric:
        outside = _started_outside()
        devices, nodes = outside or (1, 1)
        for field, asked, given in (
            ("devices", self.devices, devices),
            ("nodes", self.nodes, nodes),
        ):
            if outside and asked not in (None, given):
                problem = f"{asked} are asked for, but {given} were started; leave it out"
                raise BadOption("the training", field, problem)
        devices, nodes = self.devices or devices, self.nodes or nodes
        strategy: Any = "auto"
        if self.several:
            kind = Sharded if self.strategy == "fsdp" else Replicated
            strategy = kind(cluster_environment=None if outside else LightningEnvironment())
        arithmetic: dict[str, Any] = {"precision": self.precision}
        if self.precision == "64-true":
            arithmetic = {"plugins": Double()}
        try:
            return Fabric(
                accelerator=self.accelerator,
                devices=devices,
                num_nodes=nodes,
                strategy=strategy,
                **arithmetic,
            )
        except Exception as error:  # what Fabric raises differs from device to device
            problem = f"{devices} of '{self.accelerator}' cannot be used here ({error})"
            raise BadOption("the training", "device", problem) from error

    @contextlib.contextmanager
    def launch_processes(self) -> Iterator[Fabric]:
        """In all processes; what follows, the first one does alone.

        Where another one fails, the first one says why. A process that leaves while others still
        talk to it would take them down, so all leave together.
        """
        fabric = self.fabric()
        if not isinstance(fabric.strategy, Replicated):
            yield fabric
            return
        try:
            with _quiet():
                fabric.launch()
        except ValueError as error:  # what Slurm says of itself does not fit
            raise BadOption("the training", "devices", str(error)) from error
        with contextlib.ExitStack() as stack:
            if fabric.global_rank:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
                stack.enter_context(contextlib.redirect_stderr(silence))
            try:
                yield fabric
            except Interrupted:  # agreed on by all
                fabric.barrier()
                if fabric.global_rank:
                    raise SystemExit from None
                raise
            except (CodaError, OSError) as error:
                if not fabric.global_rank:
                    raise
                _store().set(PROBLEM, str(error))
                raise SystemExit(CodaError.exit_code) from error
            except RuntimeError as error:
                if not _of_a_lost_process(error):
                    raise
                if fabric.global_rank:
                    raise SystemExit(CodaError.exit_code) from error
                raise _peer_error() from error
            fabric.barrier()
            distributed.destroy_process_group()
            if fabric.global_rank:
                raise SystemExit


def agreed(fabric: Fabric, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Whether any process was asked to stop: the same answer in all, which have to ask together."""
    if fabric.world_size == 1:
        return stop

    def asked() -> bool:
        votes = torch.tensor(float(stop()), device=fabric.device)
        return bool(fabric.all_reduce(votes, reduce_op="sum"))

    return asked


def _started_outside() -> tuple[int, int] | None:
    """Devices of a node, and nodes, where something else started the processes."""
    if TorchElasticEnvironment.detect():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return here, int(os.environ["WORLD_SIZE"]) // here
    if "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect():  # by srun
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            problem = f"Slurm started {tasks} processes on {nodes} nodes; start as many on each"
            raise BadOption("the training", "devices", problem)
        return tasks // nodes, nodes
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Fabric's words at the start."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _of_a_lost_process(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def _peer_error() -> CodaError:
    """The error another rank left in the store; if it left none, it died."""
    if distributed.is_initialized() and (store := _store()).check([PROBLEM]):
        return CodaError(store.get(PROBLEM).decode())
    return ProcessDied("trains this model", "without an error message")

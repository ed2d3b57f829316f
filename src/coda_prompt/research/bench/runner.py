"""Execute runs: train, evaluate, checkpoint, and write the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
from lightning_fabric import Fabric
from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger

from coda_prompt.errors import CorruptRun, FolderBusy, Interrupted, MissingExtra, RunConfigChanged
from coda_prompt.research import methods
from coda_prompt.research.bench import report
from coda_prompt.research.bench.cost import multiply_adds
from coda_prompt.research.bench.environment import PeakMemory, describe_environment, input_hashes
from coda_prompt.research.bench.inputs import InputCache, load_stream
from coda_prompt.research.bench.runs import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    RESULT,
    Run,
    write_json,
)
from coda_prompt.research.methods import Method
from coda_prompt.research.streams.stream import Stream
from coda_prompt.research.tensors import as_arrays
from coda_prompt.research.training.checkpointing import Checkpoint, Checkpointer
from coda_prompt.research.training.devices import Devices, any_rank
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import Views
from coda_prompt.research.training.settings import Event, Result
from coda_prompt.research.vit.vit import ViT
from coda_prompt.shutdown import ShutdownFlag
from coda_prompt.storage.files import as_json, exclusive_lock
from coda_prompt.storage.tensors import tensors_sha256, write_tensors

log = logging.getLogger(__name__)

EVENTS, LEARNED = "events.jsonl", "learned.safetensors"

OnEvent = Callable[[Run, Event], None]


def run_sequentially(
    runs: Sequence[Run], on_event: OnEvent, fabric: Fabric | None = None
) -> Iterator[Run]:
    """Execute runs one after another and yield each one when it is finished.

    Args:
        fabric: The processes that train each run together; by default each run uses one process.
    """
    inputs, shutdown = InputCache(), ShutdownFlag()
    should_stop = shutdown if fabric is None else any_rank(fabric, shutdown)
    with shutdown.handling_signals():
        for run in runs:
            execute(run, inputs, on_event, shutdown, fabric)
            yield run
            if should_stop():
                raise Interrupted


def execute(
    run: Run,
    inputs: InputCache,
    on_event: OnEvent,
    should_stop: Callable[[], bool] = lambda: False,
    fabric: Fabric | None = None,
) -> None:
    """Train and evaluate one run and write its folder.

    An interrupted run resumes from its last checkpoint and ends bit-identical. With several
    processes, only rank 0 writes files and reports events.

    Raises:
        Interrupted: `should_stop` returned true; the last step is checkpointed.
        RunConfigChanged: Other rows of the same table were measured on other data or weights.
        FolderBusy: Another process is executing this run.
    """
    fabric = fabric or Devices(run.device, run.benchmark.precision).fabric()
    writes = fabric.global_rank == 0
    job = _prepare(run, inputs, fabric)
    loggers = _tensorboard_loggers(run) if writes else []
    memory = PeakMemory()
    with _open_folder(job) if writes else contextlib.nullcontext() as event_log:
        recorder = Recorder(job, event_log, loggers, on_event)
        checkpointer = Checkpointer(
            run.folder / CHECKPOINTS,
            {"config": as_json(run.config), "inputs": input_hashes(job.environment)},
            writes=writes,
            notes=recorder.progress,
        )
        recorder.restore(checkpointer.latest)
        training = run.benchmark.method_training(run.method, run.seed)
        engine = Engine(
            job.views, training, fabric=fabric, on_event=recorder.record, should_stop=should_stop
        )
        engine.run(
            job.method,
            job.stream,
            checkpointer=checkpointer,
            result=recorder.result,
            measure_every=run.benchmark.measure_every,
        )
        if writes:
            _write_result(job, recorder, memory)
        checkpointer.remove()


@dataclass(frozen=True)
class Job:
    """A run with everything it needs loaded."""

    run: Run
    environment: dict[str, Any]
    backbone: ViT
    stream: Stream
    views: Views
    method: Method


def _prepare(run: Run, inputs: InputCache, fabric: Fabric) -> Job:
    """Load data and backbone and create the method."""
    benchmark = run.benchmark
    backbone, source = inputs.load(benchmark)
    environment = describe_environment(backbone, source, fabric)
    if run.point is None:
        _check_same_inputs(run, environment)
    preprocessing = backbone.preprocessing
    if benchmark.preprocess == "paper":
        preprocessing = preprocessing.unnormalised()
    options = dataclasses.asdict(benchmark.method_config(run.method))
    return Job(
        run,
        environment,
        backbone.vit,
        load_stream(benchmark, source, run.seed),
        Views(preprocessing, benchmark.augmentation, benchmark.resize),
        methods.make(benchmark.method_of(run.method), backbone.vit, **options),
    )


def _check_same_inputs(run: Run, environment: dict[str, Any]) -> None:
    """Check that finished rows of this table used the same stream, data and weights."""
    config, inputs = as_json(run.config), input_hashes(environment)
    for path in sorted(run.folder.parent.parent.glob(f"*/trial-*/{RESULT}")):
        if changed := report.differences(report.read_run(path.parent), config, inputs):
            raise RunConfigChanged(path.parent, changed)


@contextlib.contextmanager
def _open_folder(job: Job) -> Iterator[TextIO]:
    """Lock the run folder, write what describes the run, and open its event log."""
    folder = job.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / EVENTS
    if path.is_symlink():
        raise CorruptRun(path, "is a symbolic link")
    # Checkpoints record the length of the log in bytes, so its line ends have one on all systems.
    with (
        exclusive_lock(folder, FolderBusy),
        path.open("a+", encoding="utf-8", newline="\n") as event_log,
    ):
        write_json(folder / CONFIG, job.run.config)
        write_json(folder / ENVIRONMENT, job.environment)
        yield event_log


class Recorder:
    """Results, elapsed time and event log of a run, which its checkpoints save and restore."""

    def __init__(
        self, job: Job, event_log: TextIO | None, loggers: list[Logger], on_event: OnEvent
    ) -> None:
        """Start recording.

        Args:
            event_log: None on ranks that do not write.
            loggers: TensorBoard loggers, if any.
        """
        self.result = Result.empty(job.stream.test_images, len(job.stream.tasks))
        self._run, self._event_log = job.run, event_log
        self._loggers, self._on_event = loggers, on_event
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Elapsed time of the run, including earlier sessions that it resumed."""
        return time.perf_counter() - self._started

    def record(self, event: Event) -> None:
        """Log an event of the engine and pass it on; steps and batches are not logged."""
        if self._event_log is None or event.kind == "pass":
            return
        if event.kind != "step":
            self._event_log.write(json.dumps(_event_fields(event)) + "\n")
            self._event_log.flush()
            for logger in self._loggers:
                logger.log_metrics(*_curves(event))
        self._on_event(self._run, event)

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint stores: results, seconds and the length of the log."""
        assert self._event_log is not None, "only the rank that writes makes checkpoints"
        self._event_log.flush()
        os.fsync(self._event_log.fileno())
        length = os.path.getsize(self._event_log.fileno())
        return {**_measurements(self.result), "seconds": self.seconds, "log": length}

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint; later events are removed from the log."""
        length = 0
        if checkpoint is not None:
            length, seconds = _restore_result(self.result, checkpoint)
            self._started -= seconds
        if self._event_log is not None:
            size = os.path.getsize(self._event_log.fileno())
            if size < length:
                log.warning("%s lost lines that the checkpoint counts", self._run.folder / EVENTS)
            self._event_log.truncate(min(size, length))

    def finish(self) -> None:
        """Close the TensorBoard files."""
        for logger in self._loggers:
            logger.finalize("success")


def _restore_result(result: Result, checkpoint: Checkpoint) -> tuple[int, float]:
    """Fill `result` from a checkpoint; return the length of its log and its elapsed seconds."""
    progress = checkpoint.notes
    try:
        result.matrix[:], result.own_classes[:] = (
            np.array(progress[name], dtype=float) for name in ("matrix", "own_classes")
        )
        result.losses[:] = [[float(loss) for loss in task] for task in progress["losses"]]
        result.anytime[:] = np.array(progress["anytime"], dtype=float)
        length, seconds = progress["log"], progress["seconds"]
        if not isinstance(length, int) or not isinstance(seconds, int | float):
            raise TypeError
        if length < 0 or not seconds >= 0 or len(result.losses) != checkpoint.task:
            raise ValueError
        return length, float(seconds)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CorruptRun(CHECKPOINTS, "its progress is not that of a run") from error


def _write_result(job: Job, recorder: Recorder, memory: PeakMemory) -> None:
    """Write the result, which marks the run as finished."""
    seconds = recorder.seconds
    recorder.finish()
    state = job.method.learned_state()
    if job.run.save_learned:
        write_tensors(job.run.folder / LEARNED, as_arrays(state), {"method": job.run.method})
    names, tasks, groups = job.stream.class_names, job.stream.tasks, job.stream.groups
    result = {
        **_measurements(recorder.result),
        "tasks": [len(task.classes) for task in tasks],
        "train_images": [len(task.train) for task in tasks],
        "groups": [
            {"name": group.name, "first": group.first, "last": group.last} for group in groups
        ],
        "class_names": names,
        "untrained": [names[label] for task in tasks for label in task.untrained],
        "notes": job.stream.notes,
        "learned_sha256": tensors_sha256(as_arrays(state)),
        "learned_bytes": sum(tensor.nbytes for tensor in state.values()),
        "parameters": parameter_counts(job.method, job.backbone),
        "multiply_adds": _count_operations(job),
        "seconds": seconds,
        "peak_memory_bytes": memory.peak(),
    }
    write_json(job.run.folder / RESULT, result)


def parameter_counts(method: Method, backbone: ViT) -> dict[str, Any]:
    """Count parameters as the paper does.

    Returns:
        Parameters of the backbone, of the method without its head, and of the head; `frozen` says
        whether the learned parameters are stored in addition to the backbone's.
    """
    count = method.parameter_count()
    return {
        "backbone": sum(parameter.numel() for parameter in backbone.parameters()),
        "body": count.body,
        "head": count.head_weights,
        "frozen": method.frozen_backbone,
    }


def _count_operations(job: Job) -> dict[str, float] | None:
    run, classes = job.run, [task.classes for task in job.stream.tasks]
    try:
        return multiply_adds(run.benchmark, run.method, job.method.vit_config, classes)._asdict()
    except Exception as error:  # noqa: BLE001 (a user's method may raise anything; keep its result)
        log.warning("The operations of %s cannot be counted: %s", run.method, error)
        return None


def _tensorboard_loggers(run: Run) -> list[Logger]:
    if not run.tensorboard:
        return []
    try:
        return [TensorBoardLogger(run.folder, name="tensorboard", version="")]
    except ModuleNotFoundError as error:
        raise MissingExtra("--tensorboard", "tensorboard") from error


def _curves(event: Event) -> tuple[dict[str, float], int]:
    """Return an event's TensorBoard scalars and their step: epochs over all tasks, or tasks."""
    if event.kind == "epoch":
        scalars = {"loss": event.loss, "learning rate": event.learning_rate}
        return scalars, event.task * event.epochs + event.epoch
    accuracies = {f"accuracy/task {j + 1}": a for j, a in enumerate(event.accuracies)}
    if accuracies:
        accuracies["accuracy/mean"] = sum(accuracies.values()) / len(accuracies)
    return accuracies, event.task


def _event_fields(event: Event) -> dict[str, Any]:
    """Return an event as JSON values, without fields that do not apply to it (NaN)."""
    fields = dataclasses.asdict(event)
    return {name: value for name, value in fields.items() if value == value}  # NaN != NaN


def _measurements(result: Result) -> dict[str, Any]:
    """Return a result as JSON values: null for accuracies that were not measured."""
    matrix, own_classes, (anytime,) = (
        [[None if math.isnan(value) else float(value) for value in row] for row in values]
        for values in (result.matrix, result.own_classes, [result.anytime])
    )
    return {
        "matrix": matrix,
        "own_classes": own_classes,
        "test_images": result.test_images,
        "losses": result.losses,
        "anytime": anytime,
        **({"domains": result.domains} if result.domains else {}),
    }

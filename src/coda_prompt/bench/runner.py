"""Trials x methods -> run folders. Every number of a report is in one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from lightning_fabric import Fabric
from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger

from coda_prompt import methods
from coda_prompt.bench.config import Benchmark
from coda_prompt.bench.cost import multiply_adds
from coda_prompt.bench.environment import PeakMemory, environment, hashes
from coda_prompt.bench.inputs import Inputs, stream_of
from coda_prompt.data.pocket import STRENGTH
from coda_prompt.errors import CorruptRun, FolderBusy, Interrupted, MissingExtra, RunConfigChanged
from coda_prompt.methods import Method
from coda_prompt.model.vit import ViT
from coda_prompt.shutdown import ShutdownFlag
from coda_prompt.storage.files import as_json, exclusive_lock, write_atomically
from coda_prompt.storage.remote import Mirror
from coda_prompt.storage.tensors import tensors_sha256, write_tensors
from coda_prompt.training.checkpointing import Checkpoint, Checkpointer, heed
from coda_prompt.training.devices import Devices, any_rank
from coda_prompt.training.engine import Engine
from coda_prompt.training.loading import Views
from coda_prompt.training.settings import Event, Result

log = logging.getLogger(__name__)

CONFIG, ENVIRONMENT, RESULT, LOG = "config.json", "environment.json", "result.json", "events.jsonl"
CHECKPOINTS, LEARNED = "checkpoints", "learned.safetensors"
# Resolved elsewhere in a run's configuration, or without a say in its numbers.
NOT_IN_A_RUN = {
    "methods", "training", "trials", "first_seed", "demo", "data", "lists", "classes", "protocol",
    "one_stage",
}  # fmt: skip
OnEvent = Callable[["Run", Event], None]


@dataclass(frozen=True)
class Point:
    """Where a run stands in a sweep."""

    sweep: str
    axis: str
    """What the picture's axis says."""
    field: str
    value: Any


@dataclass(frozen=True)
class Run:
    """One method in one trial."""

    benchmark: Benchmark
    method: str
    """The row of the table."""
    seed: int
    folder: Path
    point: Point | None = None
    tensorboard: bool = False
    """Whether losses and accuracies go to TensorBoard files, too."""
    keep: bool = False
    """Whether what was learned stays in the folder."""
    device: str = "auto"
    """What it runs on, where it runs in one process."""
    home: str | None = None
    """The address its folder is a copy of."""

    @property
    def config(self) -> dict[str, Any]:
        """Everything that decides the run's numbers, resolved."""
        training = self.benchmark.method_training(self.method, self.seed)
        shared = self.benchmark.model_dump(mode="json", exclude=NOT_IN_A_RUN)
        return {
            **shared,
            "strength": STRENGTH if shared["strength"] is None else shared["strength"],
            "method": self.method,
            "implementation": self.benchmark.method_of(self.method),
            "sweep": None if self.point is None else dataclasses.asdict(self.point),
            "options": _jsonable(self.benchmark.method_config(self.method)),
            "training": _jsonable(training),
        }

    def finished(self) -> bool:
        """Whether its result is there; a folder with another configuration is refused."""
        held = self.folder / CONFIG
        if not held.exists():
            return False
        before = read_json(held)
        if before != (now := as_json(self.config)):
            raise RunConfigChanged(self.folder, difference(before, now))
        done = (self.folder / RESULT).exists()
        if done:  # a kill between the result and the tidying up leaves them
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        return done


def runs_of(benchmark: Benchmark, names: Sequence[str], out: Path) -> list[Run]:
    """Trial by trial, so that a table fills up for all methods together."""
    return [
        Run(benchmark, name, seed, out / benchmark.name / row_folder(name) / f"trial-{seed}")
        for seed in seeds_of(benchmark)
        for name in names
    ]


def seeds_of(benchmark: Benchmark) -> range:
    return range(benchmark.first_seed, benchmark.first_seed + benchmark.trials)


def run_in_turn(
    runs: Sequence[Run], on_event: OnEvent, fabric: Fabric | None = None
) -> Iterator[Run]:
    """One after another, each over the processes of `fabric`; yielded when its result is there."""
    inputs, stop = Inputs(), ShutdownFlag()
    asked = stop if fabric is None else any_rank(fabric, stop)
    with stop.handling_signals():
        for run in runs:
            execute(run, inputs, on_event, stop, fabric)
            yield run
            if asked():
                raise Interrupted


def execute(
    run: Run,
    inputs: Inputs,
    on_event: OnEvent,
    stop: Callable[[], bool] = lambda: False,
    fabric: Fabric | None = None,
) -> None:
    """Learn and measure; the result is written when all of it is there.

    A run that was stopped goes on, and ends as if it had not been. Of several processes the first
    one writes.
    """
    benchmark = run.benchmark
    mirror = None if run.home is None else Mirror(run.folder, run.home)
    fabric = fabric or Devices(run.device, precision=benchmark.precision).fabric()
    first = fabric.global_rank == 0
    stop = any_rank(fabric, stop)
    backbone, source = inputs.of(benchmark)
    surroundings = environment(backbone, source, fabric)
    if run.point is None:
        _refuse_other_inputs(run, surroundings)
    stream = stream_of(benchmark, source, run.seed)
    pixels = (
        backbone.preprocessing
        if benchmark.preprocess == "weights"
        else backbone.preprocessing.unnormalised()
    )
    views = Views(pixels, benchmark.augmentation, benchmark.resize)
    method = methods.make(
        benchmark.method_of(run.method),
        backbone.vit,
        **dataclasses.asdict(benchmark.method_config(run.method)),
    )
    training = benchmark.method_training(run.method, run.seed)
    if first and mirror is not None:
        mirror.pull()
    loggers = _loggers(run) if first else []
    memory = PeakMemory()
    with _writing(run, first) as events:
        if first:
            write_json(run.folder / CONFIG, run.config)
            write_json(run.folder / ENVIRONMENT, surroundings)
        result = Result.empty([len(task.test) for task in stream.tasks])
        clock = time.perf_counter
        started = clock()

        def notes() -> dict[str, Any]:
            events.flush()
            os.fsync(events.fileno())
            return {
                **_measured(result),
                "seconds": clock() - started,
                "log": events.tell(),
            }

        identity = {"config": as_json(run.config), "inputs": hashes(surroundings)}
        place = run.folder / CHECKPOINTS
        kept = _nothing if mirror is None else mirror.push
        checkpointer = Checkpointer(
            place, identity, writes=first, stop=stop, notes=notes, on_checkpoint=kept
        )
        length = 0
        if checkpointer.latest is not None:
            length, seconds = _restored(result, checkpointer.latest)
            started -= seconds
            if first and (there := os.path.getsize(events.fileno())) < length:
                log.warning("%s has lost lines, which are not told again", run.folder / LOG)
                length = there
        if first:
            events.truncate(length)

        def tell(event: Event) -> None:
            heed(stop, event)
            if event.kind == "pass" or not first:
                return
            if event.kind != "step":
                events.write(json.dumps(_told(event)) + "\n")
                events.flush()
                for logger in loggers:
                    logger.log_metrics(*_curves(event))
            on_event(run, event)

        engine = Engine(views, training, fabric=fabric, on_event=tell)
        every = benchmark.measure_every
        engine.run(method, stream, checkpointer=checkpointer, result=result, measure_every=every)
        if not first:
            return
        for logger in loggers:
            logger.finalize("success")
        seconds = clock() - started
        if run.keep:
            write_tensors(run.folder / LEARNED, method.learned_state(), {"method": run.method})
        sizes = [len(task.classes) for task in stream.tasks]
        write_json(
            run.folder / RESULT,
            {
                **_measured(result),
                "tasks": sizes,
                "class_names": stream.class_names,
                "untrained": [
                    stream.class_names[row] for task in stream.tasks for row in task.untrained
                ],
                "notes": stream.notes,
                "learned_sha256": tensors_sha256(method.learned_state()),
                "parameters": parameters(method, backbone.vit),
                "multiply_adds": _counted(run, method, sizes),
                "seconds": seconds,
                "peak_memory_bytes": memory.peak(),
            },
        )
        checkpointer.remove()
        kept()


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _writing(run: Run, first: bool) -> Iterator[TextIO]:
    """The run's log, with the folder to itself; in other processes than the first, nothing."""
    if not first:
        with open(os.devnull, "a+", encoding="utf-8") as nothing:
            yield nothing
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    log_file = run.folder / LOG
    if log_file.is_symlink():
        raise CorruptRun(log_file, "is a link to elsewhere")
    with exclusive_lock(run.folder, FolderBusy), log_file.open("a+", encoding="utf-8") as events:
        yield events


def _restored(result: Result, found: Checkpoint) -> tuple[int, float]:
    """Fill in what had been measured; bytes of the log and seconds that belong to it come back."""
    held = found.notes
    try:
        result.matrix[:], result.own_classes[:] = (
            np.array(held[name], dtype=float) for name in ("matrix", "own_classes")
        )
        result.losses[:] = [[float(loss) for loss in task] for task in held["losses"]]
        length, seconds = held["log"], held["seconds"]
        if not isinstance(length, int) or not isinstance(seconds, int | float):
            raise TypeError
        if length < 0 or not seconds >= 0 or len(result.losses) != found.task:
            raise ValueError
        return length, float(seconds)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CorruptRun(CHECKPOINTS, "its notes are not those of a run") from error


def _refuse_other_inputs(run: Run, surroundings: dict[str, Any]) -> None:
    """Rows of one table are measured on the same stream, data and weights."""
    own = shared_config(as_json(run.config))
    for result in sorted(run.folder.parent.parent.glob(f"*/trial-*/{RESULT}")):
        place = result.with_name(ENVIRONMENT)
        try:
            before = hashes(read_json(place))
        except (LookupError, TypeError) as error:
            raise CorruptRun(place, "does not say the hashes of its inputs") from error
        changed = difference(shared_config(read_json(result.with_name(CONFIG))), own)
        changed += [
            f"{name} sha256: {before[name]} -> {now}"
            for name, now in hashes(surroundings).items()
            if before[name] != now
        ]
        if changed:
            raise RunConfigChanged(result.parent, changed)


def parameters(method: Method, backbone: ViT) -> dict[str, Any]:
    """As the paper counts them; `frozen`: the backbone stays beside what was learned."""
    count = method.parameter_count()
    return {
        "backbone": sum(parameter.numel() for parameter in backbone.parameters()),
        "body": count.body,
        "head": count.head_weights,
        "frozen": method.frozen_backbone,
    }


def _counted(run: Run, method: Method, sizes: Sequence[int]) -> dict[str, float] | None:
    try:
        return multiply_adds(run.benchmark, run.method, method.vit_config, sizes)._asdict()
    except Exception as error:  # noqa: BLE001 (a method of others may do anything; its run counts)
        log.warning("The operations of %s cannot be counted: %s", run.method, error)
        return None


def _loggers(run: Run) -> list[Logger]:
    if not run.tensorboard:
        return []
    try:
        return [TensorBoardLogger(run.folder, name="tensorboard", version="")]
    except ModuleNotFoundError as error:
        raise MissingExtra("--tensorboard", "tensorboard") from error


def _curves(event: Event) -> tuple[dict[str, float], int]:
    """What TensorBoard draws of an event, and at which step: epochs over all tasks, or tasks."""
    if event.kind == "epoch":
        curves = {"loss": event.loss, "learning rate": event.learning_rate}
        return curves, event.task * event.epochs + event.epoch
    accuracies = {f"accuracy/task {j + 1}": a for j, a in enumerate(event.accuracies)}
    if accuracies:
        accuracies["accuracy/mean"] = sum(accuracies.values()) / len(accuracies)
    return accuracies, event.task


def _measured(result: Result) -> dict[str, Any]:
    return {
        "matrix": _without_nan(result.matrix),
        "own_classes": _without_nan(result.own_classes),
        "test_images": result.test_images,
        "losses": result.losses,
    }


def _told(event: Event) -> dict[str, Any]:
    """What the event says, without the fields that do not apply to it."""
    return {
        name: value
        for name, value in dataclasses.asdict(event).items()
        if not (isinstance(value, float) and np.isnan(value))
    }


def _without_nan(matrix: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def shared_config(config: dict[str, Any]) -> dict[str, Any]:
    """What all rows of a table have to have in common."""
    own = ("method", "implementation", "options", "training", "sweep", "description")
    return {key: value for key, value in config.items() if key not in own}


def difference(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += difference(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: {old} -> {new}")
    return lines


def row_folder(method: str) -> str:
    """A row's folder has its name; of a method from a file, that of its class."""
    return method.rpartition(":")[2] if ".py:" in method else method


def _jsonable(config: Any) -> Any:
    return as_json(dataclasses.asdict(config))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that a run left behind."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CorruptRun(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CorruptRun(path, "is not JSON") from error
    if not isinstance(content, dict):
        raise CorruptRun(path, "is not a JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")

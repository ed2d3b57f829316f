"""Trials x methods -> run folders. Every number of a report is in one of them."""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from coda_prompt import __version__, methods
from coda_prompt.bench.config import Benchmark
from coda_prompt.data import hub
from coda_prompt.data.paper import PUBLISHED, published_source
from coda_prompt.data.pocket import STRENGTH, pocket_source
from coda_prompt.data.sources import Source, folder_source
from coda_prompt.data.stream import Stream, cut
from coda_prompt.errors import ChangedRun, CorruptFile, MissingData, UnknownName
from coda_prompt.files import write_atomically
from coda_prompt.model.catalog import LoadedBackbone, load_backbone
from coda_prompt.training.engine import Engine, Event, Result
from coda_prompt.training.loading import Views

CONFIG, ENVIRONMENT, RESULT, LOG = "config.json", "environment.json", "result.json", "events.jsonl"
# Resolved elsewhere in a run's configuration, or without a say in its numbers.
NOT_IN_A_RUN = {"methods", "training", "demo", "data", "lists", "classes", "protocol"}
OnEvent = Callable[["Run", Event], None]


@dataclass(frozen=True)
class Run:
    """One method in one trial."""

    benchmark: Benchmark
    method: str
    seed: int
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """Everything that decides the run's numbers, resolved."""
        training = self.benchmark.method_training(self.method, self.seed)
        shared = self.benchmark.model_dump(mode="json", exclude=NOT_IN_A_RUN)
        return {
            **shared,
            "strength": STRENGTH if shared["strength"] is None else shared["strength"],
            "method": self.method,
            "options": _jsonable(self.benchmark.method_config(self.method)),
            "training": _jsonable(training),
        }

    def finished(self) -> bool:
        """Whether its result is there; a folder with another configuration is refused."""
        held = self.folder / CONFIG
        if not held.exists():
            return False
        try:
            before = json.loads(held.read_text("utf-8"))
        except ValueError as error:
            raise CorruptFile(held, "is not JSON") from error
        now = {**self.config, "trials": before.get("trials")}
        if before != now:
            raise ChangedRun(self.folder, _difference(before, now))
        return (self.folder / RESULT).exists()


def runs_of(benchmark: Benchmark, names: Sequence[str], out: Path) -> list[Run]:
    """Trial by trial, so that a table fills up for all methods together."""
    return [
        Run(benchmark, name, seed, out / benchmark.name / _folder_name(name) / f"trial-{seed}")
        for seed in range(benchmark.trials)
        for name in names
    ]


def run_in_turn(runs: Sequence[Run], on_event: OnEvent) -> Iterator[Run]:
    """One after another; each is yielded when its result is there."""
    if runs:
        backbone, source = load_inputs(runs[0].benchmark)
    for run in runs:
        execute(run, backbone, source, on_event)
        yield run


def load_inputs(benchmark: Benchmark) -> tuple[LoadedBackbone, Source]:
    """What all runs of a benchmark share; missing data are told before a backbone is fetched."""
    source = load_source(benchmark)
    return load_backbone(benchmark.backbone), source


def load_source(benchmark: Benchmark) -> Source:
    """The benchmark's data, with as many classes as it has to have."""
    source = _find_source(benchmark)
    if benchmark.classes not in (None, len(source.class_names)):
        raise MissingData(
            benchmark.source,
            f"it has {len(source.class_names)} classes, but {benchmark.name} is made for "
            f"{benchmark.classes}",
            "Look for a part that was not extracted. To run on a part of it on purpose, set "
            f"classes={len(source.class_names)}.",
        )
    return source


def _find_source(benchmark: Benchmark) -> Source:
    name = benchmark.source
    if name == "pocket":
        strength = STRENGTH if benchmark.strength is None else benchmark.strength
        return pocket_source(strength)
    if name in PUBLISHED:
        return published_source(name, benchmark.data, benchmark.lists)
    if name.startswith(hub.PREFIX):
        return hub.hub_source(name.removeprefix(hub.PREFIX))
    if Path(name).name == name and not Path(name).exists():
        raise UnknownName("source or folder", name, ("pocket", *PUBLISHED))
    return folder_source(name)


def stream_of(benchmark: Benchmark, source: Source, seed: int) -> Stream:
    return cut(source, seed=seed, **benchmark.stream.model_dump())


def execute(run: Run, backbone: LoadedBackbone, source: Source, on_event: OnEvent) -> None:
    """Learn and measure; the result is written when all of it is there."""
    benchmark = run.benchmark
    run.folder.mkdir(parents=True, exist_ok=True)
    _write(run.folder / CONFIG, run.config)
    _write(run.folder / ENVIRONMENT, environment(backbone, source))
    stream = stream_of(benchmark, source, run.seed)
    pixels = (
        backbone.pixels if benchmark.preprocess == "weights" else backbone.pixels.unnormalised()
    )
    views = Views(pixels, benchmark.augmentation, benchmark.resize)
    method = methods.make(
        run.method, backbone.vit, **dataclasses.asdict(benchmark.method_config(run.method))
    )
    training = benchmark.method_training(run.method, run.seed)
    with (run.folder / LOG).open("w", encoding="utf-8") as log:

        def tell(event: Event) -> None:
            if event.kind != "step":
                log.write(json.dumps(_told(event)) + "\n")
                log.flush()
            on_event(run, event)

        fabric = Fabric(accelerator="auto", devices=1)
        engine = Engine(views, training, fabric=fabric, on_event=tell)
        started = time.perf_counter()
        result = engine.run(method, stream)
        seconds = time.perf_counter() - started
    count = method.parameter_count()
    base = sum(parameter.numel() for parameter in backbone.vit.parameters())
    _write(
        run.folder / RESULT,
        {
            **_measured(result),
            "tasks": [len(task.classes) for task in stream.tasks],
            "class_names": stream.class_names,
            "untrained": [
                stream.class_names[row] for task in stream.tasks for row in task.untrained
            ],
            "notes": stream.notes,
            "parameters": {"backbone": base, "body": count.body, "head": count.head_weights},
            "seconds": seconds,
            "peak_memory_bytes": peak_memory(),
        },
    )


def environment(backbone: LoadedBackbone, source: Source) -> dict[str, Any]:
    """What else the numbers may depend on."""
    packages = ("torch", "lightning-fabric", "numpy", "pillow", "safetensors")
    return {
        "coda_prompt": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "backbone": {
            "name": backbone.name,
            "sha256": backbone.sha256,
            "revision": backbone.revision,
        },
        "data": {"name": source.name, "sha256": source.fingerprint(), "notes": source.notes},
    }


def peak_memory() -> int:
    """Of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


def _commit() -> str | None:
    """Of the checkout this package runs from, if it is one."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _difference(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _difference(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: {old} -> {new}")
    return lines


def _folder_name(method: str) -> str:
    return method.rpartition(":")[2] if ".py:" in method else method


def _jsonable(config: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")

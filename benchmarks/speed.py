"""Measure speedups over CODA-P as written in the paper, on this machine.

    python benchmarks/speed.py [--quick] [--only PART,...] [--out FILE]

Both implementations use the same threads, weights, images and precision and are measured
alternately; medians are reported. `--quick` uses smaller networks, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from textbook import TextbookCoda
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from coda_prompt.console import stdout_console, table
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.images.reading import open_image
from coda_prompt.images.sources import FileSplit
from coda_prompt.research import methods
from coda_prompt.research.bench.environment import PeakMemory
from coda_prompt.research.methods import TaskBrief, TrainingBatch
from coda_prompt.research.methods.coda import CodaPrompt, component_weights
from coda_prompt.research.streams.stream import Samples
from coda_prompt.research.training.cores import Cores, images_per_part, parts_of
from coda_prompt.research.training.devices import Devices
from coda_prompt.research.training.fast import fast_precision, fast_views
from coda_prompt.research.training.gradients import Gradients
from coda_prompt.research.training.loading import Batch, Epoch, Views, batches
from coda_prompt.research.training.queries import Queries
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.linear import Linear
from coda_prompt.research.vit.vit import ViT, ViTConfig
from coda_prompt.storage.files import write_atomically

VITS = {
    "ViT-B/16": ViTConfig(),
    "ViT-S/16": ViTConfig(width=384, heads=6, mlp_width=1536),
    "ViT-S/14, 112 px": load_backbone("photo-vit").vit.config,
    "pocket": load_backbone("pocket").vit.config,
}
TRAINED = (
    ("pocket", 16),  # first: its short operations suffer most from a large heap
    ("ViT-S/14, 112 px", 16),
    ("ViT-S/14, 112 px", 64),
    ("ViT-S/14, 112 px", 128),  # the paper's batch
    ("ViT-S/16", 16),
    ("ViT-B/16", 16),
)
"""Backbones and batch sizes of measured training steps."""
CLASSES = 20
"""Classes per task."""
Step = Callable[[], object]


# -- what is measured


def in_task(name: str, tasks: int, components: int, per_task: int) -> CodaPrompt:
    """Return CODA-P at the start of a task, with `components` components in total."""
    vit = ViT(VITS[name]).initialise(torch.Generator().manual_seed(0))
    method = methods.make("coda-p", vit, components_per_task=per_task)
    assert isinstance(method, CodaPrompt)
    labels = torch.arange(CLASSES)
    for task in range(tasks):
        rows = tuple(range(task * CLASSES, (task + 1) * CLASSES))
        method.begin_task(TaskBrief(task, 0, rows, labels + task * CLASSES))
        if task < tasks - 1:
            method.end_task()
    missing = components - len(method.components.frozen[0]) - per_task
    for bank in method.prompt_banks.values():  # as if learned before
        shape = bank.frozen.shape
        more = torch.randn(shape[0], max(0, missing), *shape[2:])
        bank.append(more / bank.frozen[0, :1].numel() ** 0.5)
    return method


def batch_for(name: str, size: int, method: CodaPrompt) -> tuple[Tensor, Tensor]:
    """Return random images, and labels of the current task."""
    config = VITS[name]
    generator = torch.Generator().manual_seed(1)
    shape = (size, config.channels, config.image_size, config.image_size)
    first = method.classes_seen - CLASSES
    labels = first + torch.randint(CLASSES, (size,), generator=generator)
    return torch.randn(shape, generator=generator), labels


def product_step(
    method: CodaPrompt,
    images: Tensor,
    labels: Tensor,
    cached: bool,
    bfloat16: bool = False,
    micro_batch: int | None = None,
) -> Step:
    """Return a training step that computes one part of the batch after the other.

    Cached queries are in memory.
    """
    known, size = method.queries(images), micro_batch or len(images)

    def batch(part: slice) -> TrainingBatch:
        if cached:
            return TrainingBatch(images[part], labels[part], known[part])
        started = method.backbone.start(images[part], method.first_block)
        return TrainingBatch(started, labels[part], method.queries(started))

    def step() -> None:
        method.zero_grad(set_to_none=True)
        for first in range(0, len(images), size):
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = method.loss(batch(slice(first, first + size)))
            total = loss.mean.sum() / len(images)
            (total if first else total + loss.penalty).backward()

    return step


class EngineStep:
    """A training step as the engine does it, with a part of the batch on every core.

    Queries are computed, or `cached` queries are used.
    """

    observer: TorchDispatchMode | None = None
    """Sees the operations of all threads."""

    def __init__(
        self,
        method: CodaPrompt,
        images: Tensor,
        labels: Tensor,
        cached: Tensor | None = None,
        bfloat16: bool = False,
        workers: int | None = None,
    ) -> None:
        self.method, self.images, self.labels = method, images, labels
        self.bfloat16 = bfloat16
        self.view = None if cached is None else 0  # a view that recurs
        config, count = method.backbone.config, len(images)
        workers = workers or min(torch.get_num_threads(), parts_of(count, config))
        cores = None
        if workers > 1:
            cores = _ObservedCores(self, workers)
            cores.__enter__()
        fabric = Devices("cpu", precision="bf16-mixed" if bfloat16 else "32-true").fabric()
        queries = Queries("exact", lambda *_: torch.empty(0))
        self.size = images_per_part(count, config, workers)
        self.samples = Samples(FileSplit([], np.zeros(0, np.int64)), *np.zeros((2, count), int))
        self.gradients = Gradients(
            method,
            fabric.setup_module(method),
            "train",
            method.trainable_parameters(),
            fabric,
            queries,
            cores,
        )
        table = queries.table_for(method, self._batch(0, count), self.samples)
        if table is not None and cached is not None:
            table.write(range(count), cached)

    def _batch(self, first: int, last: int) -> Batch:
        positions = list(range(first, min(last, len(self.images))))
        return Batch(self.images[first:last], self.labels[first:last], positions, self.view)

    def on_one_thread(self) -> None:
        """Compute the parts of the batch one after the other."""
        gradients = self.gradients
        self.gradients = dataclasses.replace(gradients, cores=None)
        self()
        self.gradients = gradients

    def __call__(self) -> None:
        self.method.zero_grad(set_to_none=True)
        starts = range(0, len(self.images), self.size)
        batches = (self._batch(first, first + self.size) for first in starts)
        if self.bfloat16:
            with self.gradients.fabric.autocast():
                self.method.backbone.cast_weights()
        self.gradients.add(batches, self.samples, len(self.images), len(starts))


class _ObservedCores(Cores):
    """Cores whose threads show their operations to the observer of a step."""

    def __init__(self, step: EngineStep, workers: int) -> None:
        super().__init__(workers)
        self.step = step

    def map(self, items: Any, compute: Any) -> Any:
        def observed(item: Any) -> Any:
            with self.step.observer or contextlib.nullcontext():
                return compute(item)

        return super().map(items, observed)


def textbook_step(book: TextbookCoda, images: Tensor, labels: Tensor) -> Step:
    def step() -> None:
        book.zero_grad(set_to_none=True)
        book.loss(images, labels).backward()

    return step


def steps_of(name: str, size: int) -> dict[str, Step]:
    """Return variants of a training step in task 5 of 10 with 100 components."""
    method = in_task(name, 5, 50, 10)
    images, labels = batch_for(name, size, method)
    known = method.queries(images)
    return {
        "textbook": textbook_step(TextbookCoda(method), images, labels),
        "exact": EngineStep(method, images, labels),
        "cached": EngineStep(method, images, labels, known),
        "exact, whole batch": product_step(method, images, labels, cached=False),
        "cached, whole batch": product_step(method, images, labels, cached=True),
        "exact, bfloat16": EngineStep(method, images, labels, bfloat16=True),
        "cached, bfloat16": EngineStep(method, images, labels, known, bfloat16=True),
    }


# -- how


def interleaved(steps: dict[str, Step], repetitions: int) -> dict[str, float]:
    """Return the median seconds of steps that are measured alternately, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if repetition:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def multiply_adds(step: Step) -> float:
    """Count the multiply-adds of a step on one thread."""
    formulas = {  # of operations that torch does not know
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
        ),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(
                grad, query, key, value
            )
        ),
        torch.ops.mkldnn._linear_pointwise: (
            lambda inputs, weight, *_, **__: 2 * math.prod(inputs) * weight[0]
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step.on_one_thread() if isinstance(step, EngineStep) else step()
    return counter.get_total_flops() / 2


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside it while they exist.

    Unlike resident memory this is the same in every run: it has no fragmentation of the heap, no
    buffers of libraries, and no pages that were freed before and are used again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # a storage may be freed while it is held

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = _tensors((args, kwargs))
        given = {each.untyped_storage()._cdata for each in arguments}
        results = operation(*args, **(kwargs or {}))
        with self._lock:
            for tensor in _tensors(results):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in given and key not in self._alive:
                    freed = functools.partial(self._freed, key, size)
                    self._alive[key] = weakref.ref(storage, freed)
                    self.now += size
            self.peak = max(self.peak, self.now)
        return results

    def _freed(self, key: int, size: int, _: object) -> None:
        with self._lock:
            del self._alive[key]
            self.now -= size


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def peak_of_tensors(step: Step) -> float:
    """Return the MiB of the tensors that a step makes and that exist at the same time, at most."""
    memory = TensorMemory()
    if isinstance(step, EngineStep):
        step.observer = memory  # sees the operations of all threads
    with memory:
        step()
    if isinstance(step, EngineStep):
        step.observer = None
    return memory.peak / 2**20


def peak_above(build: Callable[[], Step]) -> float:
    """Return the MiB that a step needs in addition to what was in memory before (Linux)."""
    step = build()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: return freed memory to the system
    memory = PeakMemory()
    before = memory.peak()
    step()
    return (memory.peak() - before) / 2**20


def memory_in_subprocess(part: str, *arguments: str) -> float:
    """Measure memory in a new process, because a process does not return all memory."""
    command = [sys.executable, __file__, "--memory", part, *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_memory(part: str, arguments: list[str]) -> float:
    if part == "step":
        name, size, variant = arguments
        return peak_above(lambda: steps_of(name, int(size))[variant])
    if part == "components":
        name, size, components = arguments
        return peak_above(lambda: _step_with(name, int(size), int(components)))
    (variant,) = arguments
    return peak_above(lambda: weight_steps()[variant])


# -- parts


def training(quick: bool) -> list[dict[str, Any]]:
    """Measure training steps against the textbook: time, operations and memory."""
    rows: list[dict[str, Any]] = []
    for name, size in TRAINED:
        if quick and name == "ViT-B/16":
            continue
        steps = steps_of(name, size)
        forward = multiply_adds(_one_forward(name, size))
        seconds = interleaved(steps, 5 if name != "pocket" else 40)
        measured = {
            variant: {
                "backbone": name,
                "batch": size,
                "step": variant,
                "seconds": seconds[variant],
                "forwards": multiply_adds(step) / forward,
                "MiB": memory_in_subprocess("step", name, str(size), variant),
                "MiB of tensors": peak_of_tensors(step),
            }
            for variant, step in steps.items()
        }
        base = measured["textbook"]
        for row in (*measured.values(), _fast(measured)):
            row["times faster"] = base["seconds"] / row["seconds"]
            row["counted"] = base["forwards"] / row["forwards"]
            row["memory"] = row["MiB"] / base["MiB"]
            row["tensors"] = row["MiB of tensors"] / base["MiB of tensors"]
            rows.append(row)
    return rows


def _fast(measured: dict[str, dict[str, Any]], epochs: int = 20) -> dict[str, Any]:
    """Return the mean step of `--fast` on this processor: first exact queries, then cached."""
    precision = ", bfloat16" if fast_precision("cpu") == "bf16-mixed" else ""
    exact, cached = measured[f"exact{precision}"], measured[f"cached{precision}"]
    share = fast_views(epochs) / epochs
    means = {
        name: share * exact[name] + (1 - share) * cached[name] for name in ("seconds", "forwards")
    }
    step = f"fast, {epochs} epochs"
    most = {name: max(exact[name], cached[name]) for name in ("MiB", "MiB of tensors")}
    return {**cached, "step": step, **means, **most}


def _one_forward(name: str, size: int) -> Step:
    """Return a forward pass over all tokens, the unit of counted operations."""
    method = in_task(name, 1, 10, 10)
    book = TextbookCoda(method)
    images, _ = batch_for(name, size, method)
    return torch.no_grad()(lambda: book.vit(images))


def limit(quick: bool) -> list[dict[str, Any]]:
    """Compare the exact step in float32 with its operations at the highest rate of the machine.

    The rate is that of the fastest of many products of large square matrices. `times faster at
    most` is the speed of the exact step over the textbook if all its operations ran at that rate
    and everything else took no time.
    """
    peak = _highest_rate()
    rows: list[dict[str, Any]] = []
    for name in ("ViT-S/14, 112 px",) if quick else ("ViT-B/16", "ViT-S/14, 112 px"):
        steps = {variant: steps_of(name, 16)[variant] for variant in ("textbook", "exact")}
        seconds = interleaved(steps, 5)
        operations = {variant: 2 * multiply_adds(step) for variant, step in steps.items()}
        share = {each: operations[each] / seconds[each] / peak for each in steps}
        rows.append(
            {
                "backbone": name,
                "highest GFLOP/s": peak / 1e9,
                "textbook, % of it": 100 * share["textbook"],
                "exact, % of it": 100 * share["exact"],
                "times faster": seconds["textbook"] / seconds["exact"],
                "times faster at most": seconds["textbook"] * peak / operations["exact"],
            }
        )
    return rows


@torch.no_grad()
def _highest_rate() -> float:
    """Return the most float32 operations a second of a product of square matrices."""
    rates = []
    for size in (512, 1024, 2048, 4096):
        layer = Linear(size, size).requires_grad_(False)  # oneDNN
        inputs = torch.randn(size, size)
        for product in (layer, functools.partial(torch.mm, layer.weight)):
            for _ in range(3 + 20 * 1024 // size):
                started = time.perf_counter()
                product(inputs)
                rates.append(2 * size**3 / (time.perf_counter() - started))
    return max(rates)


def evaluation(quick: bool) -> list[dict[str, Any]]:
    """Measure the evaluation of a 10-task stream: after each task all test images so far."""
    rows = []
    for name, size, repetitions in (("ViT-B/16", 2, 1), ("ViT-S/16", 4, 3), ("pocket", 100, 3)):
        if quick and name == "ViT-B/16":
            continue
        method = in_task(name, 10, 100, 10)
        book = TextbookCoda(method)
        method.end_task()
        method.eval()
        tests = [batch_for(name, size, method)[0] + 0.01 * task for task in range(10)]

        @torch.no_grad()
        def textbook(book: TextbookCoda = book, tests: list[Tensor] = tests) -> None:
            for after in range(10):
                for images in tests[: after + 1]:
                    book.logits(images)

        @torch.no_grad()
        def product(method: CodaPrompt = method, tests: list[Tensor] = tests) -> None:
            known: dict[int, Tensor] = {}
            for after in range(10):
                for task, images in enumerate(tests[: after + 1]):
                    seen: Any = images
                    if task not in known:
                        seen = method.backbone.start(images, method.first_block)
                        known[task] = method.queries(seen)
                    method.logits(seen, known[task])

        seconds = interleaved({"textbook": textbook, "product": product}, repetitions)
        counts = multiply_adds(textbook) / multiply_adds(product)
        rows.append(
            {
                "backbone": name,
                "images a task": size,
                "textbook": seconds["textbook"],
                "product": seconds["product"],
                "times faster": seconds["textbook"] / seconds["product"],
                "counted": counts,
            }
        )
    return rows


def weight_steps(batch: int = 128, components: int = 1000, width: int = 768) -> dict[str, Step]:
    """Return two ways to compute the prompts of one block from its components."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, width, generator=generator)
    keys, attention = torch.randn(2, 1, components, width, generator=generator)
    values = torch.randn(1, components, 8 * width, generator=generator)

    def einsum() -> Tensor:
        attended = F.normalize(torch.einsum("bd,md->bmd", query, attention[0]), dim=2)
        weights = torch.einsum("bmd,md->bm", attended, F.normalize(keys[0], dim=1))
        return torch.einsum("bm,mv->bv", weights, values[0])

    def product() -> Tensor:
        return (component_weights(query, keys, attention) @ values)[0]

    torch.testing.assert_close(einsum(), product(), rtol=1e-4, atol=1e-4)
    return {"einsum": einsum, "product": product}


def components_alone(_: bool) -> list[dict[str, Any]]:
    """Measure the computation of prompts from 1000 components."""
    seconds = interleaved(weight_steps(), 20)
    memory = {variant: memory_in_subprocess("weights", variant) for variant in seconds}
    return [
        {
            "batch": 128,
            "components": 1000,
            "times faster": seconds["einsum"] / seconds["product"],
            "einsum ms": 1e3 * seconds["einsum"],
            "product ms": 1e3 * seconds["product"],
            "einsum MiB": memory["einsum"],
            "product MiB": memory["product"],
            "times less memory": memory["einsum"] / max(memory["product"], 0.5),
        }
    ]


def _step_with(name: str, size: int, components: int) -> Step:
    method = in_task(name, 2, components, 10)
    return product_step(method, *batch_for(name, size, method), cached=True)


def growth(quick: bool) -> list[dict[str, Any]]:
    """Measure a training step against the number of components learned before."""
    rows = []
    for name, size, counts in (
        ("ViT-B/16", 16, (100, 5000)),
        ("pocket", 16, (20, 100, 1000, 5000)),
    ):
        if quick and name == "ViT-B/16":
            continue
        steps = {str(count): _step_with(name, size, count) for count in counts}
        seconds = interleaved(steps, 5 if name != "pocket" else 40)
        for count in counts:
            rows.append(
                {
                    "backbone": name,
                    "components": count,
                    "seconds": seconds[str(count)],
                    "MiB": memory_in_subprocess("components", name, str(size), str(count)),
                    "to 100": seconds[str(count)] / seconds["100"],
                }
            )
    return rows


def profile(quick: bool) -> list[dict[str, Any]]:
    """Profile a step and compare it with the time of its matrix products alone."""
    rows = []
    products = (
        *("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution"),
        "mkldnn::_linear_pointwise",
    )
    attention = ("aten::_scaled_dot_product_flash_attention",)
    for name, size in (("ViT-B/16", 16), ("pocket", 16)):
        if quick and name == "ViT-B/16":
            continue
        method = in_task(name, 5, 50, 10)
        step = product_step(method, *batch_for(name, size, method), cached=True)
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            step()
        events = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        total = sum(events.values())
        shares = {
            "matrix products %": _share(events, products, total),
            "attention %": _share(events, attention, total, prefix=True),
            "gelu %": _share(events, ("aten::gelu",), total, prefix=True),
            "layer norm %": _share(events, ("aten::native_layer_norm",), total, prefix=True),
        }
        seconds = interleaved({"step": step}, 3)["step"]
        ideal = _gemm_seconds(name, size) * multiply_adds(step) / multiply_adds(_gemms(name, size))
        rest = 100 - sum(shares.values())
        rows.append({"backbone": name, **shares, "rest %": rest, "step / ideal": seconds / ideal})
    return rows


def _share(
    events: dict[str, float], keys: tuple[str, ...], total: float, prefix: bool = False
) -> float:
    selected = [
        value for key, value in events.items() if (key.startswith(keys) if prefix else key in keys)
    ]
    return 100 * sum(selected) / total


def _gemms(name: str, size: int) -> Step:
    """Return the four matrix products of a block."""
    config = VITS[name]
    tokens, width, hidden = config.grid**2 + 1, config.width, config.mlp_width
    shapes = ((width, 3 * width), (width, width), (width, hidden))
    layers = [Linear(*shape).requires_grad_(False) for shape in shapes]
    inputs = torch.randn(size * tokens, width)
    wide, down = torch.randn(size * tokens, hidden), Linear(hidden, width).requires_grad_(False)

    @torch.no_grad()
    def run() -> None:
        for layer in layers:
            layer(inputs)
        down(wide)

    return run


def _gemm_seconds(name: str, size: int) -> float:
    return interleaved({"gemm": _gemms(name, size)}, 10)["gemm"]


def pipeline(quick: bool) -> list[dict[str, Any]]:
    """Measure loading of JPEG files as training views against what the model consumes."""
    rows: list[dict[str, Any]] = []
    name = "ViT-S/16" if quick else "ViT-B/16"
    method = in_task(name, 5, 50, 10)
    step = product_step(method, *batch_for(name, 16, method), cached=True)
    demand = 16 / interleaved({"step": step}, 3)["step"]
    views = Views(Preprocessing(224, 3, (0.5,) * 3, (0.5,) * 3))
    with tempfile.TemporaryDirectory() as folder:
        smooth = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)
        photograph = Image.fromarray(smooth).resize((4000, 3000), Image.Resampling.BICUBIC)
        paths = [Path(folder) / f"{number}.jpg" for number in range(32)]
        for path in paths:
            photograph.save(path, quality=90)
        split = FileSplit([str(path) for path in paths], np.zeros(len(paths), np.int64))
        whole = FileSplit(split.paths, split.labels)
        whole.image = lambda index, min_side=None: open_image(split.paths[index])  # type: ignore[method-assign]
        order = [list(range(first, first + 16)) for first in range(0, len(paths), 16)]
        for what, source, workers in (
            ("decoded in full", whole, 0),
            ("no larger than needed", split, 0),
            ("no larger than needed", split, 1),
        ):
            samples = Samples(source, np.arange(len(paths)), split.labels)

            def run(samples: Samples = samples, workers: int = workers) -> None:
                for _ in batches(samples, views, order, epoch=Epoch(0, 0, 0), workers=workers):
                    pass

            rate = len(paths) / interleaved({"run": run}, 3)["run"]
            rows.append(
                {
                    "JPEG of 4000 x 3000": what,
                    "loader processes": workers,
                    "images a second": rate,
                    f"times what a cached step of {name} asks for": rate / demand,
                }
            )
    return rows


PARTS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "training": training,
    "limit": limit,
    "evaluation": evaluation,
    "components": components_alone,
    "growth": growth,
    "pipeline": pipeline,
    "profile": profile,
}


def machine() -> dict[str, Any]:
    """Describe this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print rows as a table."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    stdout_console().print(table(list(rows[0]), cells, title))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/speed.json"))
    parser.add_argument("--memory", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        stdout_console().print(measure_memory(options.memory[0], options.memory[1:]))
        return
    results: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # keep parts that are not measured now
        results = {**json.loads(options.out.read_text("utf-8")), **results}
    stdout_console().print(results["machine"])
    for part in options.only.split(","):
        rows = results[part] = PARTS[part](options.quick)
        show(rows, part)
        write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()

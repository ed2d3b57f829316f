"""Count the operations of a method without computing anything, on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coda_prompt.research import methods
from coda_prompt.research.bench.config import Benchmark
from coda_prompt.research.methods import Method, TaskBrief, TrainingBatch
from coda_prompt.research.vit.vit import ViT, ViTConfig

BATCH = 4
Tasks = Sequence[int | tuple[int, ...]]


class MultiplyAdds(NamedTuple):
    """Multiply-adds of matrix products and convolutions for one image."""

    training: float
    """One training step in the last task: query, forward and backward pass."""
    inference: float
    """One prediction: query and forward pass."""


def method_after(
    benchmark: Benchmark, row: str, vit: ViTConfig, tasks: Tasks, *, finish: bool = True
) -> Method:
    """Create a row's method as it is after learning tasks, on the meta device.

    Args:
        tasks: Rows of the classes of each task, or the number of its new classes.
        finish: Whether the last task is finished, or about to be trained.
    """
    options = asdict(benchmark.method_config(row))
    with torch.device("meta"):
        method = methods.make(benchmark.method_of(row), ViT(vit), **options)
    for module in method.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point():  # begin_task reads these values: keep them real
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    for index, task in enumerate(tasks):
        seen = method.classes_seen
        rows = range(seen, seen + task) if isinstance(task, int) else task
        means = partial(torch.zeros, len(rows), vit.width, device="meta")
        method.begin_task(TaskBrief(index, 0, tuple(rows), torch.tensor(rows), means))
        if finish or index < len(tasks) - 1:
            method.end_task()
    return method


def multiply_adds(benchmark: Benchmark, row: str, vit: ViTConfig, tasks: Tasks) -> MultiplyAdds:
    """Count the multiply-adds of a row's method after tasks with these classes.

    Cached queries are computed once per task, so each epoch is charged a share of them.
    """
    training = benchmark.method_training(row, 0)
    method = method_after(benchmark, row, vit, tasks, finish=False)
    images = torch.zeros(BATCH, vit.channels, vit.image_size, vit.image_size, device="meta")
    with FlopCounterMode(display=False) as counter:
        queries = method.queries(images) if method.needs_queries else None
    query_cost = _per_image(counter)
    if method.trainable_parameters():
        training_cost = _step_cost(method, images, queries)
        training_cost += query_cost / (training.epochs if training.queries == "cached" else 1)
    else:  # closed form: one pass over the images for their features
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            method.features(images, queries)
        training_cost = query_cost + _per_image(counter)
    method.end_task()
    method.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        method.logits(images, queries)
    return MultiplyAdds(training_cost, query_cost + _per_image(counter))


def _step_cost(method: Method, images: Tensor, queries: Tensor | None) -> float:
    method.train()
    labels = torch.zeros(BATCH, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss = method.loss(TrainingBatch(images, labels, queries))
        (loss.mean.sum() + loss.total.sum() + loss.penalty).backward()
    return _per_image(counter)


def _per_image(counter: FlopCounterMode) -> float:
    return counter.get_total_flops() / 2 / BATCH

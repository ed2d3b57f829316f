"""What a method costs, counted without computing anything: the same classes on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coda_prompt import methods
from coda_prompt.bench.config import Benchmark
from coda_prompt.methods import Method, TaskBrief
from coda_prompt.model.vit import ViT, ViTConfig

BATCH = 4


class MultiplyAdds(NamedTuple):
    """For one image, of matrix products and convolutions."""

    training: float
    """A step in the last task: query, forward and backward pass."""
    inference: float


def grown(
    benchmark: Benchmark, row: str, vit: ViTConfig, tasks: Sequence[int], *, finish: bool = True
) -> Method:
    """A row's method as it is after tasks of these many classes, or in the midst of the last."""
    options = asdict(benchmark.method_config(row))
    with torch.device("meta"):
        method = methods.make(benchmark.method_of(row), ViT(vit), **options)
    for module in method.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point():  # read as numbers while it grows, so they are real
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    for index, last_row in enumerate(accumulate(tasks)):
        rows = range(last_row - tasks[index], last_row)
        means = torch.zeros(len(rows), vit.width, device="meta")
        method.begin_task(TaskBrief(index, 0, tuple(rows), torch.tensor(rows), means))
        if finish or index < len(tasks) - 1:
            method.end_task()
    return method


def multiply_adds(
    benchmark: Benchmark, row: str, vit: ViTConfig, tasks: Sequence[int]
) -> MultiplyAdds:
    """Cached queries are computed once a task, so each epoch bears its share of them."""
    training = benchmark.method_training(row, 0)
    method = grown(benchmark, row, vit, tasks, finish=False)
    images = torch.zeros(BATCH, vit.channels, vit.image_size, vit.image_size, device="meta")
    with _counting() as counter:
        queries = method.queries(images) if method.needs_queries else None
    query = _each(counter)
    if method.trainable_parameters():
        training_cost = _step(method, images, queries)
        training_cost += query / (training.epochs if training.queries == "cached" else 1)
    else:  # one pass over the images for their features
        with _counting() as counter, torch.no_grad():
            method.features(images, queries)
        training_cost = query + _each(counter)
    method.end_task()
    method.eval()
    with _counting() as counter, torch.no_grad():
        method.logits(images, queries)
    return MultiplyAdds(training_cost, query + _each(counter))


def _step(method: Method, images: Tensor, queries: Tensor | None) -> float:
    method.train()
    labels = torch.zeros(BATCH, dtype=torch.int64, device="meta")
    with _counting() as counter:
        loss = method.loss(images, labels, queries)
        (loss.mean.sum() + loss.total.sum() + loss.penalty).backward()
    return _each(counter)


def _counting() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def _each(counter: FlopCounterMode) -> float:
    return counter.get_total_flops() / 2 / BATCH

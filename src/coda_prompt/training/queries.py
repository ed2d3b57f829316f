"""Queries of images: computed by the frozen backbone, or read from a cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from coda_prompt.data.stream import Samples
from coda_prompt.methods import Method
from coda_prompt.model.vit import Images, ViT
from coda_prompt.training.loading import PLAIN_VIEW, TEST_VIEW, Batch

QueryMode = Literal["exact", "cached"]
Compute = Callable[[Method, Samples], Tensor]


class Queries:
    """Queries of one method over one stream; none is computed twice.

    With `exact`, a query is computed from the view of the image that the method sees. With
    `cached`, queries of the un-augmented training images are computed once per task and cached in
    half precision (in full precision for closed-form methods, which learn from them). Both modes
    cache the queries of views that recur: test views and a finite number of training views.

    Args:
        mode: `exact` or `cached`.
        memory: Bytes of queries to cache in memory; the rest goes to temporary files.
        compute: Computes the queries of all samples, un-augmented and in order.
        in_any: Whether a condition is true in any process that must run the same passes.
    """

    def __init__(
        self,
        mode: QueryMode,
        memory: int,
        compute: Compute,
        in_any: Callable[[bool], bool] = lambda here: here,
    ) -> None:
        self.mode, self.memory = mode, memory
        self._compute, self._in_any = compute, in_any
        self._tables: dict[tuple[int, int, int], tuple[Samples, ViT, QueryTable]] = {}

    def see(self, method: Method, batch: Batch, samples: Samples) -> tuple[Images, Tensor | None]:
        """Return the images for the method and their queries, B x D (None if it needs none)."""
        if not method.needs_queries:
            return batch.images, None
        view = batch.view
        if view == PLAIN_VIEW or (self.mode == "cached" and view != TEST_VIEW):
            # In one pass and in order: rounding must depend neither on shuffling nor on resuming.
            view = TEST_VIEW
            self._complete(method, samples)
        table = None if view is None else self._table(method, samples, view)
        if table is not None and not self._in_any(not table.contains(batch.positions)):
            return batch.images, table.rows(batch.positions, method)
        images = method.opened(batch.images)
        queries = method.queries(images)
        if table is None:
            return images, queries
        table.write(batch.positions, queries)
        return images, table.rows(batch.positions, method)

    def forget(self, samples: Samples) -> None:
        """Drop the cached queries of `samples`."""
        self._tables = {key: entry for key, entry in self._tables.items() if key[0] != id(samples)}

    def _complete(self, method: Method, samples: Samples) -> None:
        table = self._table(method, samples, TEST_VIEW)
        if not table.complete:  # called at every step
            table.write(torch.arange(len(samples)), self._compute(method, samples))

    def _table(self, method: Method, samples: Samples, view: int) -> QueryTable:
        key = (id(samples), id(method.backbone), view)
        if key not in self._tables:
            width = method.vit_config.width
            dtype = next(method.backbone.parameters()).dtype
            if self.mode == "cached" and not method.closed_form and dtype != torch.float64:
                dtype = torch.float16
            used = sum(table.memory for _, _, table in self._tables.values())
            table = QueryTable(len(samples), width, dtype, self.memory - used)
            # References to samples and backbone prevent reuse of their ids.
            self._tables[key] = (samples, method.backbone, table)
        return self._tables[key][2]


class QueryTable:
    """One query per image, written as images are seen; a temporary file if memory is short."""

    @torch.inference_mode(False)  # a table made in evaluation may be used in training
    def __init__(self, images: int, width: int, dtype: torch.dtype, memory: int) -> None:
        size = images * width * dtype.itemsize
        self.memory = size if size <= memory else 0
        """Bytes used of the given memory; 0 if the table is a file."""
        if self.memory == size:
            self._rows = torch.empty(images, width, dtype=dtype)
        else:
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            path = str(Path(self._folder.name) / "queries")
            flat = torch.from_file(path, shared=True, size=images * width, dtype=dtype)
            self._rows = flat.view(images, width)
        self._filled = torch.zeros(images, dtype=torch.bool)

    @property
    def complete(self) -> bool:
        return bool(self._filled.all())

    def contains(self, positions: Tensor) -> bool:
        return bool(self._filled[positions.cpu()].all())

    def write(self, positions: Tensor, queries: Tensor) -> None:
        positions = positions.cpu()
        self._rows[positions] = queries.detach().to(self._rows)
        self._filled[positions] = True

    def rows(self, positions: Tensor, like: Method) -> Tensor:
        """Return queries, B x D, on the device and in the precision of the method."""
        weight = next(like.backbone.parameters())
        return self._rows[positions.cpu()].to(weight)

"""Where the query of an image comes from: the one place that decides how the frozen pass runs."""

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
    """Queries of one method over one stream, none computed twice.

    `exact`: of each image as it is seen, augmented or not. `cached`: of the un-augmented image,
    computed once for a training task, and kept in half precision (where it is what a closed form
    learns from, as it is). Views that come again, those of tests and a finite number of training
    views, are remembered in both modes.
    """

    def __init__(
        self,
        mode: QueryMode,
        memory: int,
        compute: Compute,
        in_any: Callable[[bool], bool] = lambda here: here,
    ) -> None:
        """`memory`: bytes of queries held in memory; more go to temporary files. `in_any`: whether
        something is so in any process that has to make the same passes."""
        self.mode, self.memory = mode, memory
        self._compute, self._in_any = compute, in_any
        self._tables: dict[tuple[int, int, int], tuple[Samples, ViT, QueryTable]] = {}

    def see(self, method: Method, batch: Batch, samples: Samples) -> tuple[Images, Tensor | None]:
        """What the method is to look at, and its queries, B x D (None where it needs none)."""
        if not method.needs_queries:
            return batch.images, None
        view = batch.view
        if view == PLAIN_VIEW or (self.mode == "cached" and view != TEST_VIEW):
            # In one pass, in order: rounding does not hang on how a training was shuffled or cut.
            view = TEST_VIEW
            self._complete(method, samples)
        table = None if view is None else self._table(method, samples, view)
        if table is not None and not self._in_any(not table.holds(batch.positions)):
            return batch.images, table.rows(batch.positions, method)
        images = method.opened(batch.images)
        queries = method.queries(images)
        if table is None:
            return images, queries
        table.take(batch.positions, queries)
        return images, table.rows(batch.positions, method)

    def forget(self, samples: Samples) -> None:
        """A task's training images are not seen again."""
        self._tables = {key: held for key, held in self._tables.items() if key[0] != id(samples)}

    def _complete(self, method: Method, samples: Samples) -> None:
        table = self._table(method, samples, TEST_VIEW)
        if not table.complete:  # asked at every step
            table.take(torch.arange(len(samples)), self._compute(method, samples))

    def _table(self, method: Method, samples: Samples, view: int) -> QueryTable:
        key = (id(samples), id(method.backbone), view)
        if key not in self._tables:
            width = method.vit_config.width
            dtype = next(method.backbone.parameters()).dtype
            if self.mode == "cached" and not method.closed_form and dtype != torch.float64:
                dtype = torch.float16
            held = sum(table.memory for _, _, table in self._tables.values())
            table = QueryTable(len(samples), width, dtype, self.memory - held)
            # The objects are held too, so that no other one can have their ids.
            self._tables[key] = (samples, method.backbone, table)
        return self._tables[key][2]


class QueryTable:
    """A row for each image, filled as they are seen; in a file where memory does not suffice."""

    @torch.inference_mode(False)  # what is made while testing may serve training later
    def __init__(self, images: int, width: int, dtype: torch.dtype, memory: int) -> None:
        size = images * width * dtype.itemsize
        self.memory = size if size <= memory else 0
        """Bytes it takes of it."""
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

    def holds(self, positions: Tensor) -> bool:
        return bool(self._filled[positions.cpu()].all())

    def take(self, positions: Tensor, queries: Tensor) -> None:
        positions = positions.cpu()
        self._rows[positions] = queries.detach().to(self._rows)
        self._filled[positions] = True

    def rows(self, positions: Tensor, like: Method) -> Tensor:
        """B x D, where the method is and as exact."""
        weight = next(like.backbone.parameters())
        return self._rows[positions.cpu()].to(weight)

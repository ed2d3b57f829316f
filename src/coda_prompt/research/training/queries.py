"""Queries of images: computed by the frozen backbone, or read from a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from coda_prompt.research.methods import Method
from coda_prompt.research.streams.samples import Samples
from coda_prompt.research.training.loading import PLAIN_VIEW, TEST_VIEW, Batch
from coda_prompt.research.training.settings import QueryMode
from coda_prompt.research.vit.vit import Images


@dataclass
class Queries:
    """Queries of one method over one stream; none is computed twice.

    With `exact`, a query is computed from the view of the image that the method sees. With
    `cached`, queries of the un-augmented training images are computed once per task and cached in
    half precision (in full precision for closed-form methods, which learn from them). Both modes
    cache the queries of views that recur: test views and a finite number of training views.
    """

    mode: QueryMode
    compute: Callable[[Method, Samples], Tensor]
    """Computes the queries of all samples, un-augmented and in order."""
    tables: dict[Samples, dict[tuple[nn.Module, int], QueryTable]] = field(default_factory=dict)
    """Cached queries of samples by backbone and view, and fixed features by method; remove those
    no longer needed."""

    def images_and_queries(
        self, method: Method, batch: Batch, samples: Samples, *, cache: bool = True
    ) -> tuple[Images, Tensor | None]:
        """Return the images for the method and their queries, B x D (None if it needs none).

        Args:
            cache: Cache the queries of un-augmented images. Without it they are computed for this
                batch, unless they are cached or the method trains on cached queries.
        """
        if not method.needs_queries:
            return batch.images, None
        table = self.table_for(method, batch, samples, cache=cache)
        if table is not None and table.filled[batch.positions].all():
            return batch.images, table.rows(batch.positions, method)
        images: Images = batch.images
        if method.first_block is not None:
            images = method.backbone.start(images, method.first_block)
        queries = method.queries(images)
        if table is not None:
            table.write(batch.positions, queries)
            queries = table.rows(batch.positions, method)
        return images, queries

    def table_for(
        self, method: Method, batch: Batch, samples: Samples, *, cache: bool = True
    ) -> QueryTable | None:
        """Return the table of the queries of a batch, made and filled if need be.

        None if they are not cached. For `cache`, see `images_and_queries`, which several threads
        may call at the same time once the table exists.
        """
        view = batch.view
        rounded = self.mode == "cached" and not method.closed_form
        if not (cache or rounded or self.cached(method.backbone, samples)):
            view = None
        elif view == PLAIN_VIEW or (self.mode == "cached" and view != TEST_VIEW):
            view = TEST_VIEW
            self.fill(method, samples)
        return None if view is None else self._table(method, samples, view)

    def features(self, method: Method, batch: Batch, samples: Samples) -> Tensor:
        """Return the features of test images, B x D, of a method whose features are fixed."""
        tables = self.tables.setdefault(samples, {})
        key: tuple[nn.Module, int] = (method, TEST_VIEW)
        if key not in tables or not tables[key].filled[batch.positions].all():
            images, queries = self.images_and_queries(method, batch, samples, cache=False)
            features = method.features(images, queries)
            if key not in tables:
                tables[key] = QueryTable(len(samples), features.shape[1], features.dtype)
            tables[key].write(batch.positions, features)
        return tables[key].rows(batch.positions, method)

    def cached(self, owner: nn.Module, samples: Samples) -> QueryTable | None:
        """Return the features of a method, or the queries of a backbone, of un-augmented images."""
        return self.tables.get(samples, {}).get((owner, TEST_VIEW))

    def fill(self, method: Method, samples: Samples, queries: Tensor | None = None) -> None:
        """Cache the queries of all un-augmented images; they are computed unless they are given."""
        table = self._table(method, samples, TEST_VIEW)
        if not table.filled.all():
            # In one pass and in order: rounding must depend neither on shuffling nor resuming.
            queries = self.compute(method, samples) if queries is None else queries
            table.write(range(len(samples)), queries)

    def _table(self, method: Method, samples: Samples, view: int) -> QueryTable:
        tables = self.tables.setdefault(samples, {})
        key: tuple[nn.Module, int] = (method.backbone, view)
        if key not in tables:
            dtype = next(method.backbone.parameters()).dtype
            if self.mode == "cached" and not method.closed_form and dtype != torch.float64:
                dtype = torch.float16
            tables[key] = QueryTable(len(samples), method.vit_config.width, dtype)
        return tables[key]


class QueryTable:
    """One query per image, written as images are seen."""

    @torch.inference_mode(False)  # a table made in evaluation may be used in training
    def __init__(self, images: int, width: int, dtype: torch.dtype) -> None:
        self._rows = torch.empty(images, width, dtype=dtype)
        self.filled = np.zeros(images, dtype=np.bool_)

    def write(self, positions: Sequence[int], queries: Tensor) -> None:
        self._rows[positions] = queries.detach().to(self._rows)
        self.filled[positions] = True

    def rows(self, positions: Sequence[int], like: Method) -> Tensor:
        """Return queries, B x D, on the device and in the precision of the method."""
        weight = next(like.backbone.parameters())
        rows = self._rows[positions]
        if weight.is_cuda:
            rows = rows.pin_memory()  # the copy does not wait for the device
        return rows.to(weight.device, weight.dtype, non_blocking=True)

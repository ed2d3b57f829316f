"""Where the query of an image comes from: the one place that decides how the frozen pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from coda_prompt.data.stream import Samples
from coda_prompt.methods import Method
from coda_prompt.model.vit import ViT
from coda_prompt.training.loading import Batch

QueryMode = Literal["exact", "cached"]
Compute = Callable[[Method, Samples], Tensor]


class Queries:
    """Queries of one method over one stream.

    `exact`: of each image as it is seen, augmented or not. `cached`: of the un-augmented image,
    computed once for a training task and once for each set of test images.
    """

    def __init__(self, mode: QueryMode, compute: Compute) -> None:
        self.mode = mode
        self._compute = compute
        self._tables: dict[tuple[int, int], tuple[Samples, ViT, Tensor]] = {}

    def of(self, method: Method, batch: Batch, samples: Samples) -> Tensor | None:
        """B x D, or None for a method that needs none."""
        if not method.needs_queries:
            return None
        if self.mode == "exact":
            return method.queries(batch.images)
        return self.table(method, samples)[batch.positions]

    def table(self, method: Method, samples: Samples) -> Tensor:
        """The queries of all these images, un-augmented; remembered in mode `cached`."""
        if self.mode == "exact":
            return self._compute(method, samples)
        key = (id(samples), id(method.backbone))
        if key not in self._tables:
            # The objects are held too, so that no other one can have their ids.
            self._tables[key] = (samples, method.backbone, self._compute(method, samples))
        return self._tables[key][2]

    def forget(self, samples: Samples) -> None:
        """A task's training images are not seen again."""
        self._tables = {key: held for key, held in self._tables.items() if key[0] != id(samples)}

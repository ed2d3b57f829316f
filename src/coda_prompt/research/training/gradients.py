"""The gradients of a training step, computed part by part: the only backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor, nn

from coda_prompt import errors
from coda_prompt.research.methods import Loss, Method
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.streams.samples import Samples
from coda_prompt.research.training.cores import Cores
from coda_prompt.research.training.loading import Batch
from coda_prompt.research.training.queries import Queries


@dataclass(frozen=True)
class Gradients:
    """Computes the gradients of the batches of a stage."""

    method: Method
    module: _FabricModule
    """The method, wrapped for several processes."""
    stage: str
    parameters: list[nn.Parameter]
    fabric: Fabric
    queries: Queries
    cores: Cores | None
    """Computes parts of a batch at the same time; None: they are computed one after the other."""

    def add(
        self, loaded: Iterator[Batch], samples: Samples | None, images: int, parts: int
    ) -> Tensor:
        """Add the gradients of this process's share of a batch to the parameters.

        Args:
            loaded: The next `parts` of it are the share.
            samples: Of which these are images; None for features and generated samples.
            images: Of the whole batch, over all processes.

        Returns:
            The loss of the share, on the device.
        """
        if self.cores is None or samples is None or parts == 1:
            return self._one_by_one(loaded, samples, images, parts)
        return self._on_cores(self.cores, loaded, samples, images, parts)

    def cache_queries(self, loaded: Iterator[Batch], samples: Samples, parts: int) -> None:
        """Compute the queries of a share with the rounding of `add`, for the same arguments."""
        if self.cores is None or parts == 1:
            for _ in range(parts):
                self._with_queries(self.fabric.to_device(next(loaded)), samples)
            return

        def compute(part: tuple[int, list[Batch]]) -> None:
            self._with_queries(part[1].pop(), samples)

        for _ in self.cores.map(self._parts(loaded, samples, parts), compute):
            pass

    def _one_by_one(
        self, loaded: Iterator[Batch], samples: Samples | None, images: int, parts: int
    ) -> Tensor:
        shares = []
        for number in range(parts):
            with self.fabric.no_backward_sync(self.module, enabled=number < parts - 1):
                # No variable refers to the batch: its memory is free in the backward pass.
                loss = self.module(self._with_queries(self.fabric.to_device(next(loaded)), samples))
                share = self._share(loss, images, first=number == 0)
                self.fabric.backward(share)
            shares.append(share.detach())
        return torch.stack(shares).sum()

    def _on_cores(
        self, cores: Cores, loaded: Iterator[Batch], samples: Samples, images: int, parts: int
    ) -> Tensor:
        """Add gradients in the order of the parts: the sum does not depend on the threads."""

        def gradients(part: tuple[int, list[Batch]]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            number, batch = part
            with self.fabric.autocast():  # no variable refers to the batch, as above
                loss = self.method(self._with_queries(batch.pop(), samples))
            share = self._share(loss, images, first=number == 0)
            return share.detach(), torch.autograd.grad(share, self.parameters, allow_unused=True)

        shares = []
        for _, (share, of_part) in cores.map(self._parts(loaded, samples, parts), gradients):
            shares.append(share)
            for parameter, gradient in zip(self.parameters, of_part, strict=True):
                if gradient is None:
                    continue
                if parameter.grad is None:  # several parameters may have got the same tensor
                    parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
                else:
                    parameter.grad += gradient
        return torch.stack(shares).sum()

    def _parts(
        self, loaded: Iterator[Batch], samples: Samples, parts: int
    ) -> Iterator[tuple[int, list[Batch]]]:
        """Yield numbered batches, each in a list so that a thread can release it."""
        for number in range(parts):
            batch = next(loaded)
            if self.method.needs_queries:
                self.queries.table_for(self.method, batch, samples)  # threads find it
            yield number, [batch]

    def _with_queries(self, batch: Batch, samples: Samples | None) -> TrainingBatch:
        if samples is None:
            return TrainingBatch(None, batch.labels, None, batch.images, self.stage)
        with self.fabric.autocast():
            images, queries = self.queries.images_and_queries(self.method, batch, samples)
        return TrainingBatch(images, batch.labels, queries, None, self.stage)

    def _share(self, loss: object, images: int, *, first: bool) -> Tensor:
        """Return what a part contributes to the loss of a batch.

        Processes average their gradients, so sums are multiplied by the number of processes; the
        penalty is the same everywhere and is added once.
        """
        if not isinstance(loss, Loss):
            problem = f"its loss returns {type(loss).__name__}, not Loss"
            raise errors.BadMethod(self.method.name, f"{problem}; use Loss.of(per_image)")
        share = (loss.mean.sum() / images + loss.total.sum()) * self.fabric.world_size
        return share + loss.penalty if first else share

"""Passes over images without training: evaluation, logits, features and queries.

Each process computes its share of the images; every process gets all results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import get_args

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from coda_prompt.errors import BadOption, Interrupted, NotLearned
from coda_prompt.research.methods import Method
from coda_prompt.research.methods.sums import TaskSums
from coda_prompt.research.streams.stream import Samples
from coda_prompt.research.training.chunks import Chunks
from coda_prompt.research.training.cores import Cores
from coda_prompt.research.training.devices import Devices, Precision, Replicated, any_rank
from coda_prompt.research.training.loading import TEST_VIEW, Batch, Views, batches
from coda_prompt.research.training.queries import Queries, QueryTable
from coda_prompt.research.training.settings import Event, Training
from coda_prompt.research.vit.vit import Images

PRECISIONS = get_args(Precision)
PARALLEL_BATCHES = 16
"""Batches from which a pass computes one batch a core; fewer would leave cores idle at the end."""
STEPS_WITHOUT_WAITING = 10
"""Steps after which the host waits for the losses of an accelerator; on CPUs nothing waits."""
Booleans = NDArray[np.bool_]


def share(flags: Booleans) -> float:
    """Return the share of true values; NaN without values."""
    return int(flags.sum()) / len(flags) if len(flags) else math.nan


class Passes:
    """Runs methods over images.

    A method and its backbone are moved to Fabric's device and stay there, in float64 if the
    precision is `64-true` and in float32 otherwise: mixed precisions do not change weights.

    Args:
        views: How images become tensors.
        training: Training settings.
        fabric: Devices and precision; the default is one process on the best device.
        on_event: Called with every `Event`, for progress and logs.
        should_stop: Polled between steps and batches; once true on any process, `Interrupted` is
            raised on all of them, after a checkpoint if there is a checkpointer.
    """

    def __init__(
        self,
        views: Views,
        training: Training | None = None,
        *,
        fabric: Fabric | None = None,
        on_event: Callable[[Event], object] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.views = views
        self.training = training or Training()
        self.fabric: Fabric = fabric or Devices().fabric()
        self.precision = str(self.fabric.strategy.precision.precision)
        if self.precision not in PRECISIONS:
            problem = f"'{self.precision}' would round the backbone itself; use one of {PRECISIONS}"
            raise BadOption("the engine", "precision", problem)
        self.dtype = torch.float64 if self.precision == "64-true" else torch.float32
        self.wait_every = 1 if self.fabric.device.type == "cpu" else STEPS_WITHOUT_WAITING
        self.on_event, self.should_stop = on_event, should_stop
        if self.fabric.world_size > 1:
            self.should_stop = any_rank(self.fabric, should_stop)
        self.pass_size = self.training.micro_batch or self.training.batch_size
        self.queries = Queries(self.training.queries, self._query_table)

    def evaluate(
        self, method: Method, samples: Samples, classes: Iterable[int]
    ) -> tuple[float, float]:
        """Compute the accuracy over all classes seen, and among `classes` only.

        Returns:
            Both accuracies; NaN without images.
        """
        correct = self.correct(method, samples, classes)
        over_all, restricted = (share(each) for each in correct)
        return over_all, restricted

    def correct(
        self, method: Method, samples: Samples, classes: Iterable[int]
    ) -> tuple[Booleans, Booleans]:
        """Return which images are classified correctly over all classes seen, and among `classes`.

        Every image is classified on its own; neither its task nor its batch is known.
        """
        rows = sorted(classes)
        unknown = [row for row in rows if row >= method.classes_seen]
        if unknown:
            raise NotLearned(unknown, [], method.name)
        self._move_to_device(method)
        method.eval()
        correct = torch.zeros(2, len(samples), dtype=torch.int64, device=self.fabric.device)
        task_rows = torch.tensor(rows, device=self.fabric.device)
        fixed = method.fixed_features
        for batch in self._pass_over(samples, self.queries.cached(method, samples)):
            with torch.inference_mode(), self.fabric.autocast():
                if fixed:
                    logits = method.scores(self.queries.features(method, batch, samples))
                else:
                    logits = method.logits(*self.queries.images_and_queries(method, batch, samples))
                restricted = task_rows[logits[:, task_rows].argmax(dim=1)]
                correct[0, batch.positions] = (logits.argmax(dim=1) == batch.labels).long()
                correct[1, batch.positions] = (restricted == batch.labels).long()
        over_all, own = self._reduced(correct, "sum").bool().cpu().numpy()
        return over_all, own

    def logits(self, method: Method, samples: Samples) -> Tensor:
        """Compute the logits of all samples in order, N x classes seen in float64 on the CPU."""
        self._move_to_device(method)
        method.eval()
        table = self._table(samples, lambda images, _: method.logits(images), parallel=True)
        return table.double().cpu()

    def _class_means(self, method: Method, samples: Samples, classes: tuple[int, ...]) -> Tensor:
        sums, rows = None, torch.tensor(classes, device=self.fabric.device)
        for batch, features in self._rows(samples, method.features, method):
            if sums is None:
                sums = features.new_zeros(len(classes), features.shape[1])
            sums.index_add_(0, torch.searchsorted(rows, batch.labels), features)
        assert sums is not None  # every process gets a batch, which may be empty
        labels = torch.from_numpy(np.asarray(samples.labels)).to(rows.device)
        counts = torch.bincount(torch.searchsorted(rows, labels), minlength=len(classes))
        return self._reduced(sums, "sum") / counts.clamp_min(1)[:, None]

    def add_to_sums(self, sums: TaskSums, method: Method, samples: Samples) -> None:
        """Add the features of all samples to the sums of a task, a chunk at a time.

        The sums are reduced over processes in the end.
        """
        chunks = Chunks(sums)
        for batch, features in self._rows(samples, method.features, method):
            chunks.add(features, batch, self.pass_size)
        chunks.flush()
        sums.reduce(self._reduced)

    def features_and_queries(
        self, method: Method, samples: Samples
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the features of all samples, and their queries if the method needs them."""
        if method.closed_form or not method.needs_queries:
            features = self._table(samples, method.features, method)
            return features, features if method.closed_form else None

        def both(images: Images, queries: Tensor | None) -> Tensor:
            assert queries is not None
            return torch.cat([method.features(images, queries), queries], dim=1)

        table = self._table(samples, both, method)
        width = method.vit_config.width
        features, queries = table.split([table.shape[1] - width, width], dim=1)
        return features.contiguous(), queries.contiguous()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _query_table(self, method: Method, samples: Samples) -> Tensor:
        return self._table(samples, lambda images, queries: method.queries(images))

    @torch.inference_mode(False)  # a table made in evaluation may be used in training
    @torch.no_grad()
    def _table(
        self,
        samples: Samples,
        compute: Callable[[Images, Tensor | None], Tensor],
        method: Method | None = None,
        *,
        parallel: bool = False,
    ) -> Tensor:
        """Compute one row per un-augmented sample, in order, from its image and its query.

        Without a method, no query is passed. `parallel`: see `_rows`.
        """
        table: Tensor | None = None
        for batch, rows in self._rows(samples, compute, method, cache=True, parallel=parallel):
            if table is None:
                table = rows.new_zeros(len(samples), rows.shape[1])
            table[batch.positions] = rows
        assert table is not None  # every process gets a batch, which may be empty
        return self._reduced(table, "sum")

    @torch.inference_mode(False)
    @torch.no_grad()
    def _rows(
        self,
        samples: Samples,
        compute: Callable[[Images, Tensor | None], Tensor],
        method: Method | None,
        *,
        cache: bool = False,
        parallel: bool = False,
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Compute one row per un-augmented sample of this process; yield them with their batch.

        Args:
            compute: Gets the images and their queries; without a method, no queries.
            cache: Cache the queries of all samples, because they are needed again.
            parallel: Several threads may call `compute` at the same time; a `Meter` would not
                count them.
        """
        done = 0

        @torch.no_grad()  # for the thread that runs it
        def rows_of(batch: Batch) -> Tensor:
            with self.fabric.autocast():
                seen: tuple[Images, Tensor | None] = (batch.images, None)
                if method is not None:
                    seen = self.queries.images_and_queries(method, batch, samples, cache=cache)
                return compute(*seen)

        on_cores = parallel and self.fabric.device.type == "cpu" and self.fabric.world_size == 1
        enough = len(samples) >= PARALLEL_BATCHES * self.pass_size
        threads = torch.get_num_threads() if on_cores and enough else 1
        known = None
        if method is not None and method.closed_form and method.plain_queries:
            known = self.queries.cached(method.backbone, samples)
        passed = self._pass_over(samples, known)
        with Cores(threads) if threads > 1 else nullcontext() as cores:
            for batch, rows in (
                ((batch, rows_of(batch)) for batch in passed)
                if cores is None
                else cores.map(passed, rows_of)
            ):
                done += len(batch.positions) * self.fabric.world_size
                self.on_event(Event("pass", 0, 0, step=min(done, len(samples)), steps=len(samples)))
                yield batch, rows

    def _pass_over(self, samples: Samples, known: QueryTable | None = None) -> Iterator[Batch]:
        """Yield this process's share of all samples, un-augmented.

        All processes get the same number of batches, some of them empty: they ask one another
        before every batch whether to stop.

        Args:
            known: What is needed of each image. If it is complete, images are not read and have no
                pixels.
        """
        processes = self.fabric.world_size
        share, size = range(self.fabric.global_rank, len(samples), processes), self.pass_size
        starts = range(0, max(1, math.ceil(len(samples) / processes)), size)
        order = [list(share[first : first + size]) for first in starts]
        workers = self.training.workers
        for batch in (
            _without_images(samples, order)
            if known is not None and known.filled[share].all()
            else batches(
                samples, self.views, order, workers=workers, dtype=self.dtype, read_ahead=True
            )
        ):
            if self.should_stop():
                raise Interrupted
            yield self.fabric.to_device(batch)

    def _reduced(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum, mean or maximum over processes."""
        if self.fabric.world_size == 1:
            return tensor
        reduced = self.fabric.all_reduce(tensor.to(self.fabric.device), reduce_op=operation)
        assert isinstance(reduced, Tensor)
        return reduced.to(tensor.device)

    def _move_to_device(self, method: Method) -> None:
        """Move the method to the device, after checking that the preprocessing fits it."""
        config, preprocessing = method.vit_config, self.views.preprocessing
        size, channels = preprocessing.size, preprocessing.channels
        if (config.image_size, config.channels) != (size, channels):
            raise BadOption(
                "the views",
                "pixels",
                f"{size} px x {channels} channels do not fit the backbone, which "
                f"takes {config.image_size} px x {config.channels}",
            )
        method.to(self.fabric.device, self.dtype)
        if isinstance(self.fabric.strategy, Replicated):
            self.fabric.strategy.prepare(method)


def _without_images(samples: Samples, order: list[list[int]]) -> Iterator[Batch]:
    """Yield batches of evaluation images whose pixels are not needed."""
    for positions in order:
        labels = torch.tensor(samples.labels[positions], dtype=torch.int64)
        yield Batch(torch.empty(len(positions), 0), labels, positions, TEST_VIEW)

"""The training loop of every method: the only backward pass and the only optimizer.

Devices, precision and several processes come from Fabric. A batch is global: each process takes
its share, and the parts of the loss are reduced so that the step is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor

from coda_prompt.data.stream import Samples, Stream, Task
from coda_prompt.errors import (
    BadOption,
    ClassInTwoTasks,
    CorruptFile,
    EmptyTask,
    InvalidLabels,
    NonFiniteLoss,
    NotLearned,
    UnfinishedTask,
)
from coda_prompt.methods import Loss, Method, TaskBrief
from coda_prompt.model.vit import ViT
from coda_prompt.seeding import keyed_generator
from coda_prompt.training.checkpointing import Checkpointer, TrainingPosition
from coda_prompt.training.devices import Devices, Precision, Replicated, Sharded, any_rank
from coda_prompt.training.loading import Batch, Epoch, Views, batches
from coda_prompt.training.queries import Queries
from coda_prompt.training.schedule import learning_rate
from coda_prompt.training.settings import Event, Result, Training
from coda_prompt.training.snapshot import Snapshot

PRECISIONS = get_args(Precision)


def _ignore(event: Event) -> None:
    pass


class Engine:
    """Drives any method through tasks.

    A method and its backbone are moved to Fabric's device and stay there, in float64 where the
    precision is `64-true` and in float32 otherwise: mixed precisions leave weights as they are.
    """

    def __init__(
        self,
        views: Views,
        training: Training | None = None,
        *,
        fabric: Fabric | None = None,
        on_event: Callable[[Event], None] = _ignore,
    ) -> None:
        self.views = views
        self.training = training or Training()
        self.fabric = fabric or Devices().fabric()
        self.precision = str(self.fabric.strategy.precision.precision)
        if self.precision not in PRECISIONS:
            raise BadOption(
                "the engine",
                "precision",
                f"'{self.precision}' would round the backbone itself; use one of {PRECISIONS}",
            )
        self.on_event = on_event
        memory = self.training.query_memory * 2**20
        self.queries = Queries(self.training.queries, memory, self._query_table, self._in_any)

    # -- a stream

    def run(
        self,
        method: Method,
        stream: Stream,
        *,
        checkpointer: Checkpointer | None = None,
        result: Result | None = None,
        measure_every: int = 1,
    ) -> Result:
        """Learn the stream's tasks in order, and after each (or every so many, and the last)
        measure all learned so far.

        If the checkpointer has an earlier run, it is resumed with its `result`.
        """
        _check_classes(stream)
        if method.classes_seen:
            raise BadOption("run", "method", f"{method.name} has learned before; make a new one")
        result = result or Result.empty([len(task.test) for task in stream.tasks])
        together = method.trains_on == "all"
        tasks = [_everything(stream.tasks)] if together else stream.tasks
        done = 0
        if checkpointer is not None and checkpointer.latest is not None:
            done = checkpointer.latest.task
            if done > len(tasks):
                raise CorruptFile(checkpointer.folder, f"it counts {done} tasks of {len(tasks)}")
            self._place(method)
            checkpointer.restore_learned(method)
        for task in tasks[done:]:
            past = tasks[: task.index]
            losses = self.learn(
                method, task, past=past, tasks=len(tasks), checkpointer=checkpointer
            )
            result.losses.append(losses)
            after = len(stream.tasks) - 1 if together else task.index
            if not (after + 1) % measure_every or after == len(stream.tasks) - 1:
                self._measure(method, stream, after, result)
            if checkpointer is not None:
                checkpointer.save_after_task(method, task.index)
        return result

    def _measure(self, method: Method, stream: Stream, after: int, result: Result) -> None:
        for task in stream.tasks[: after + 1]:
            accuracies = self.evaluate(method, task.test, task.classes)
            result.matrix[after, task.index], result.own_classes[after, task.index] = accuracies
        row = tuple(float(value) for value in result.matrix[after, : after + 1])
        self.on_event(Event("evaluation", after, len(stream.tasks), accuracies=row))

    # -- a task

    def learn(
        self,
        method: Method,
        task: Task,
        *,
        past: Sequence[Task] = (),
        tasks: int = 0,
        checkpointer: Checkpointer | None = None,
    ) -> list[float]:
        """Learn one task and return the mean loss of each epoch.

        A checkpointer saves the training; a training that it has saved before is resumed.

        Where it cannot be learned to its end (a loss that is not finite, an unreadable image, an
        interrupt), the method is left as it was before.
        """
        if not len(task.train):
            raise EmptyTask(task.index)
        if method.in_task:
            raise UnfinishedTask(method.name)
        self._place(method)
        index = len(method.task_sizes)
        classes = tuple(sorted(task.classes))
        labels = torch.from_numpy(np.asarray(task.train.labels, dtype=np.int64))
        strange = sorted(set(labels.tolist()) - set(classes))
        if strange:
            raise InvalidLabels(index, f"images of rows {strange} are not of its classes {classes}")
        before = Snapshot(method)
        try:
            if checkpointer is None or checkpointer.position is None:
                self.on_event(Event("task", index, tasks or index + 1))
            means = None
            if method.wants_class_means(classes):
                means = self._class_means(method, task.train, classes)
            method.begin_task(TaskBrief(index, self.training.seed, classes, labels, means))
            losses: list[float] = []
            if method.trainable_parameters():
                losses = self._train(
                    method, task.train, past, index, tasks or index + 1, checkpointer
                )
            if method.fits:
                table = self._feature_table(method, task.train)
                method.fit(table, labels.to(table.device))
            method.end_task()
        except BaseException:
            before.restore()
            raise
        finally:
            self.queries.forget(task.train)
        return losses

    def _train(
        self,
        method: Method,
        own: Samples,
        past: Sequence[Task],
        index: int,
        tasks: int,
        checkpointer: Checkpointer | None,
    ) -> list[float]:
        training = self.training
        start = training.learning_rate or method.learning_rate
        optimizer = torch.optim.Adam(
            method.trainable_parameters(),
            lr=start,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        module, wrapped = self.fabric.setup(method, optimizer)
        method.train()
        for network in method.modules():
            if isinstance(network, ViT):
                network.recompute = training.recompute
        resumed = checkpointer and checkpointer.restore_training(method, optimizer)
        position = resumed or TrainingPosition(index)
        if position.epoch > training.epochs:
            raise CorruptFile("the checkpoint", f"it counts {position.epoch} epochs")
        for epoch in range(position.epoch, training.epochs):
            rate = learning_rate(training.schedule, start, epoch, training.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            samples = self._epoch_samples(method, own, past, index, epoch)
            order = self._shuffled(len(samples), index, epoch)
            if position.step > len(order):
                raise CorruptFile(
                    "the checkpoint", f"it counts {position.step} steps of {len(order)}"
                )
            left = order[position.step :]
            shares = [batch[self.fabric.global_rank :: self.fabric.world_size] for batch in left]
            key = Epoch(training.seed, index, epoch, training.views)
            loader = batches(samples, self.views, shares, epoch=key, workers=training.workers)
            for step, (batch, whole) in enumerate(zip(loader, left, strict=True), position.step):
                wrapped.zero_grad()
                loss = self._backward(method, module, self._on_device(batch), samples, len(whole))
                if not (math.isfinite(loss) and self._gradients_are_finite(method)):
                    raise NonFiniteLoss(index, epoch, step)
                wrapped.step()
                position.sum_of_losses += loss * len(whole)
                position.step = step + 1
                progress = (index, tasks, epoch, training.epochs, step, len(order), loss, rate)
                self.on_event(Event("step", *progress))
                if checkpointer is not None and position.step < len(order):
                    checkpointer.save_after_step(method, optimizer, position)
            mean = position.sum_of_losses / len(samples)
            position = TrainingPosition(index, 0, epoch + 1, 0, [*position.losses, mean])
            done = (index, tasks, epoch, training.epochs, len(order), len(order), mean, rate)
            self.on_event(Event("epoch", *done))
            if checkpointer is not None:
                checkpointer.save_after_step(method, optimizer, position)
        method.eval()
        return position.losses

    def _backward(
        self, method: Method, module: _FabricModule, batch: Batch, samples: Samples, whole: int
    ) -> float:
        """Add the gradients of this process's share of a batch of `whole` images.

        Processes average their gradients, so a share's sums count as many times as there are
        processes; the penalty is the same everywhere and counts once.
        """
        processes = self.fabric.world_size
        largest = self._largest_share(whole)
        size = self.training.micro_batch or largest
        starts = range(0, largest, size)
        value = torch.zeros((), device=self.fabric.device, dtype=self._dtype)
        for start in starts:
            part = batch.part(slice(start, start + size))
            with self.fabric.autocast():
                images, queries = self.queries.see(method, part, samples)
            last = start == starts[-1]
            with self.fabric.no_backward_sync(module, enabled=not last):
                loss: Loss = module(images, part.labels, queries)
                share = (loss.mean.sum() / whole + loss.total.sum()) * processes
                if start == 0:
                    share = share + loss.penalty
                self.fabric.backward(share)
            value += share.detach()
        return float(self._reduced(value, "mean"))

    def _gradients_are_finite(self, method: Method) -> bool:
        if self.precision == "16-mixed":
            return True  # the scaler meets overflows on purpose and skips those steps
        gradients = [p.grad for p in method.trainable_parameters() if p.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _epoch_samples(
        self, method: Method, own: Samples, past: Sequence[Task], index: int, epoch: int
    ) -> Samples:
        """The task's images, and those of past tasks a method asks to see again."""
        generator = keyed_generator(self.training.seed, index, epoch, "replay")
        wanted = method.replay(len(own), generator).numpy()
        if len(wanted) and wanted[:, 0].max() >= len(past):
            problem = f"{method.name} sees images of past tasks again; give all {index} of them"
            raise BadOption("learn", "past", problem)
        again = [
            past[number].train.subset(wanted[wanted[:, 0] == number, 1])
            for number in sorted(set(wanted[:, 0].tolist()))
        ]
        return Samples.concat([own, *again]) if again else own

    def _shuffled(self, count: int, index: int, epoch: int) -> list[list[int]]:
        generator = keyed_generator(self.training.seed, index, epoch, "order")
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        size = self.training.batch_size
        return [order[first : first + size] for first in range(0, count, size)]

    # -- passes without training

    def evaluate(
        self, method: Method, samples: Samples, classes: Iterable[int]
    ) -> tuple[float, float]:
        """Accuracy over all classes seen, and among `classes` only. NaN without images."""
        rows = sorted(classes)
        unknown = [row for row in rows if row >= method.classes_seen]
        if unknown:
            raise NotLearned(unknown, [], method.name)
        self._place(method)
        method.eval()
        right = torch.zeros(2, dtype=torch.int64, device=self.fabric.device)
        own = torch.tensor(rows, device=self.fabric.device)
        for batch in self._pass_over(samples):
            with torch.inference_mode(), self.fabric.autocast():
                logits = method.logits(*self.queries.see(method, batch, samples))
                right[0] += (logits.argmax(dim=1) == batch.labels).sum()
                right[1] += (own[logits[:, own].argmax(dim=1)] == batch.labels).sum()
        over_all, among_own = self._reduced(right, "sum").tolist()
        if not len(samples):
            return math.nan, math.nan
        return over_all / len(samples), among_own / len(samples)

    def logits(self, method: Method, samples: Samples) -> Tensor:
        """Of every sample in order, N x classes seen."""
        self._place(method)
        method.eval()

        def compute(batch: Batch) -> Tensor:
            return method.logits(*self.queries.see(method, batch, samples))

        return self._table(samples, compute)

    def _class_means(self, method: Method, samples: Samples, classes: tuple[int, ...]) -> Tensor:
        table = self._feature_table(method, samples)
        labels = torch.from_numpy(np.asarray(samples.labels)).to(table.device)
        rows = torch.searchsorted(torch.tensor(classes, device=table.device), labels)
        sums = table.new_zeros(len(classes), table.shape[1]).index_add(0, rows, table)
        counts = torch.bincount(rows, minlength=len(classes)).clamp_min(1)
        return sums / counts[:, None]

    def _feature_table(self, method: Method, samples: Samples) -> Tensor:
        def features(batch: Batch) -> Tensor:
            return method.features(*self.queries.see(method, batch, samples))

        return self._table(samples, features)

    def _query_table(self, method: Method, samples: Samples) -> Tensor:
        return self._table(samples, lambda batch: method.queries(batch.images))

    @torch.inference_mode(False)  # asked for while testing, a table may serve training later
    @torch.no_grad()
    def _table(self, samples: Samples, compute: Callable[[Batch], Tensor]) -> Tensor:
        """One row for each sample, in order, un-augmented, in every process."""
        parts, places, done = [], [], 0
        for batch in self._pass_over(samples):
            with self.fabric.autocast():
                parts.append(compute(batch))
            places.append(batch.positions)
            done += len(batch.positions) * self.fabric.world_size
            self.on_event(Event("pass", 0, 0, step=min(done, len(samples)), steps=len(samples)))
        own = torch.cat(parts)
        table = own.new_zeros(len(samples), own.shape[1])
        table[torch.cat(places)] = own
        return self._reduced(table, "sum")

    def _pass_over(self, samples: Samples) -> Iterable[Batch]:
        """This process's share of all samples, un-augmented, in as many batches as others have.

        They talk to each other in every batch where the backbone is spread: some may be empty.
        """
        share = range(self.fabric.global_rank, len(samples), self.fabric.world_size)
        size = self.training.micro_batch or self.training.batch_size
        starts = range(0, self._largest_share(len(samples)), size)
        order = [list(share[first : first + size]) for first in starts]
        loader = batches(samples, self.views, order, workers=self.training.workers)
        return (self._on_device(batch) for batch in loader)

    def _largest_share(self, count: int) -> int:
        """Of so many images, in any process; where there is none, one empty batch is made."""
        return max(1, -(-count // self.fabric.world_size))

    def _reduced(self, tensor: Tensor, how: str) -> Tensor:
        """The sum or mean over processes."""
        if self.fabric.world_size == 1:
            return tensor
        reduced = self.fabric.all_reduce(tensor, reduce_op=how)
        assert isinstance(reduced, Tensor)
        return reduced

    def _in_any(self, here: bool) -> bool:
        """Whether it is so in any process, where all have to do the same."""
        if not isinstance(self.fabric.strategy, Sharded):
            return here
        return any_rank(self.fabric, lambda: here)()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "64-true" else torch.float32

    def _place(self, method: Method) -> None:
        config, pixels = method.vit_config, self.views.preprocessing
        if (config.image_size, config.channels) != (pixels.size, pixels.channels):
            raise BadOption(
                "the views",
                "pixels",
                f"{pixels.size} px x {pixels.channels} channels do not fit the backbone, which "
                f"takes {config.image_size} px x {config.channels}",
            )
        method.to(self.fabric.device, self._dtype)
        if isinstance(self.fabric.strategy, Replicated):
            self.fabric.strategy.prepare(method)

    def _on_device(self, batch: Batch) -> Batch:
        images, labels, positions = (self.fabric.to_device(tensor) for tensor in batch[:3])
        return Batch(images.to(self._dtype), labels, positions, batch.view)


def _check_classes(stream: Stream) -> None:
    task_of: dict[int, int] = {}
    for task in stream.tasks:
        for row in task.classes:
            if row in task_of:
                raise ClassInTwoTasks(stream.class_names[row], task_of[row], task.index)
            task_of[row] = task.index


def _everything(tasks: Sequence[Task]) -> Task:
    """All tasks as one."""
    return Task(
        index=0,
        classes=tuple(row for task in tasks for row in task.classes),
        train=Samples.concat([task.train for task in tasks]),
        test=Samples.concat([task.test for task in tasks]),
        untrained=tuple(row for task in tasks for row in task.untrained),
    )

"""The engine: trains and evaluates any method; the only backward pass and optimizers.

Fabric provides devices, precision and several processes. Batches are global: each process trains on
its share, and losses and gradients are reduced so that a step equals that of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor
from torch.optim import Optimizer

from coda_prompt.data.stream import Samples, Stream, Task
from coda_prompt.errors import (
    BadOption,
    ClassInTwoTasks,
    CorruptFile,
    EmptyTask,
    Interrupted,
    InvalidLabels,
    NonFiniteLoss,
    NotLearned,
    UnfinishedTask,
)
from coda_prompt.methods import Loss, Method, ParameterGroup, Stage, TaskBrief, TrainingBatch
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


@dataclass(frozen=True)
class _TaskRun:
    """The task being learned."""

    method: Method
    train: Samples
    past: Sequence[Task]
    index: int
    tasks: int
    """Number of tasks of the stream, for progress."""
    checkpointer: Checkpointer | None


@dataclass(frozen=True)
class _EpochData:
    """The remaining batches of an epoch."""

    samples: Samples | None
    """None for features and generated samples."""
    count: int
    """Number of samples of the whole epoch."""
    order: list[list[int]]
    """Positions of every batch of the epoch, over all processes."""
    batches: Iterator[Batch]
    """This process's share of each remaining batch."""


class Engine:
    """Trains and evaluates methods.

    A method and its backbone are moved to Fabric's device and stay there, in float64 if the
    precision is `64-true` and in float32 otherwise: mixed precisions do not change weights.

    Args:
        views: How images become tensors.
        training: Training settings.
        fabric: Devices and precision; the default is one process on the best device.
        on_event: Called with every `Event`, for progress and logs.
        should_stop: Polled between steps and batches; once true, the engine raises `Interrupted`,
            after a checkpoint if there is a checkpointer.

    Example:
        >>> engine = Engine(Views(preprocessing), Training(epochs=5))
        >>> result = engine.run(method, stream)
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
        self.fabric = fabric or Devices().fabric()
        self.precision = str(self.fabric.strategy.precision.precision)
        if self.precision not in PRECISIONS:
            raise BadOption(
                "the engine",
                "precision",
                f"'{self.precision}' would round the backbone itself; use one of {PRECISIONS}",
            )
        self.on_event, self.should_stop = on_event, should_stop
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
        """Learn the tasks of a stream in order and evaluate all tasks learned so far.

        Args:
            checkpointer: Saves the run; a run that it has saved before is resumed.
            result: The result of the resumed run so far, which is extended.
            measure_every: Evaluate after every so many tasks, and after the last.
        """
        _check_classes(stream)
        if method.classes_seen:
            raise BadOption("run", "method", f"{method.name} has learned before; make a new one")
        result = result or Result.empty([len(task.test) for task in stream.tasks])
        joint = method.trains_on == "all"
        tasks = [_join_tasks(stream.tasks)] if joint else stream.tasks
        done = 0
        if checkpointer is not None and checkpointer.latest is not None:
            done = checkpointer.latest.task
            if done > len(tasks):
                raise CorruptFile(checkpointer.folder, f"it counts {done} tasks of {len(tasks)}")
            self._place(method)
            checkpointer.restore_learned(method)
        for task in tasks[done:]:
            losses = self.learn(
                method,
                task,
                past=tasks[: task.index],
                tasks=len(tasks),
                checkpointer=checkpointer,
            )
            result.losses.append(losses)
            last = len(stream.tasks) - 1
            after = last if joint else task.index
            if not (after + 1) % measure_every or after == last:
                self._measure(method, stream, after, result)
            if checkpointer is not None:
                checkpointer.save_after_task(method, task.index)
        return result

    def _measure(self, method: Method, stream: Stream, after: int, result: Result) -> None:
        """Evaluate all tasks up to `after` and write a row of the result."""
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
        """Learn one task.

        If that fails (a loss that is not finite, an unreadable image, an interrupt), the method is
        left as it was before.

        Args:
            past: Earlier tasks, for methods that train on their images again.
            tasks: Number of tasks of the stream, for progress.
            checkpointer: Saves the training; a training that it has saved before is resumed.

        Returns:
            The mean loss of each epoch.
        """
        if not len(task.train):
            raise EmptyTask(task.index)
        if method.in_task:
            raise UnfinishedTask(method.name)
        self._place(method)
        index = len(method.task_sizes)
        classes = tuple(sorted(task.classes))
        labels = torch.from_numpy(np.asarray(task.train.labels, dtype=np.int64))
        if invalid := sorted(set(labels.tolist()) - set(classes)):
            raise InvalidLabels(index, f"images of rows {invalid} are not of its classes {classes}")
        run = _TaskRun(method, task.train, past, index, tasks or index + 1, checkpointer)
        before = Snapshot(method)
        try:
            if checkpointer is None or checkpointer.position is None:
                self.on_event(Event("task", index, run.tasks))
            self._check_stop()
            means = None
            if method.wants_class_means(classes):
                means = self._class_means(method, task.train, classes)
            method.begin_task(TaskBrief(index, self.training.seed, classes, labels, means))
            if method.prepares_on is not None:
                with torch.no_grad():
                    method.prepare(self._all_batches(run))
            losses = self._train(run)
            if method.fits:
                features, queries = self._features_and_queries(method, task.train)
                method.fit(features, queries, labels.to(features.device))
            method.end_task()
        except BaseException:
            before.restore()
            raise
        finally:
            self.queries.forget(task.train)
        return losses

    def _all_batches(self, run: _TaskRun) -> Iterator[TrainingBatch]:
        """Yield all images of the task in order, in every process."""
        training = self.training
        size = training.micro_batch or training.batch_size
        positions = range(len(run.train))
        order = [list(positions[first : first + size]) for first in positions[::size]]
        augmented = run.method.prepares_on == "augmented"
        epoch = Epoch(training.seed, run.index, 0, training.views) if augmented else None
        for batch in batches(run.train, self.views, order, epoch=epoch, workers=training.workers):
            self._check_stop()
            with self.fabric.autocast():
                yield self._training_batch(run.method, self._on_device(batch), run.train, "prepare")

    # -- stages

    def _train(self, run: _TaskRun) -> list[float]:
        """Train the stages of a task; return the mean loss of each epoch of all stages."""
        stages = run.method.stages()
        resumed = None if run.checkpointer is None else run.checkpointer.position
        first = 0 if resumed is None else resumed.stage
        if resumed is not None and first >= len(stages):
            raise CorruptFile("the checkpoint", f"it counts {first} stages of {len(stages)}")
        losses: list[float] = []
        epochs_before = sum(stage.epochs or self.training.epochs for stage in stages[:first])
        for number, stage in enumerate(stages[first:], first):
            position = TrainingPosition(run.index, number, losses=losses)
            losses = self._train_stage(run, stage, position, epochs_before)
            epochs_before += stage.epochs or self.training.epochs
            run.method.end_stage(stage)
        return losses

    def _train_stage(
        self, run: _TaskRun, stage: Stage, position: TrainingPosition, epochs_before: int
    ) -> list[float]:
        method, epochs = run.method, stage.epochs or self.training.epochs
        groups = stage.groups or [ParameterGroup(method.trainable_parameters())]
        trained = {id(parameter) for group in groups for parameter in group.parameters}
        paused = [each for each in method.trainable_parameters() if id(each) not in trained]
        for parameter in paused:
            parameter.requires_grad_(False)
        optimizer = self._optimizer(method, stage, groups)
        rates = [group["lr"] for group in optimizer.param_groups]
        module, wrapped = self.fabric.setup(method, optimizer)
        method.train()
        for network in method.modules():
            if isinstance(network, ViT):
                network.recompute = self.training.recompute
        if run.checkpointer is not None:
            position = run.checkpointer.restore_training(method, optimizer) or position
        if position.epoch > epochs:
            raise CorruptFile("the checkpoint", f"it counts {position.epoch} epochs of {epochs}")
        table = self._feature_table(method, run.train) if stage.data == "features" else None
        for epoch in range(position.epoch, epochs):
            data = self._epoch_data(run, stage, epochs_before + epoch, position.step, table)
            steps = len(data.order)
            for step, batch in enumerate(data.batches, position.step):
                at = epoch + step / steps if stage.per_iteration else epoch
                for group, start in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = self._rate(stage, start, at, epochs)
                whole = len(data.order[step])
                loss = self._step(run, stage, module, wrapped, batch, data.samples, whole)
                if loss is None:
                    raise NonFiniteLoss(run.index, epoch, step)
                position.sum_of_losses += loss * whole
                position.step = step + 1
                rate = optimizer.param_groups[0]["lr"]
                progress = (run.index, run.tasks, epoch, epochs, step, steps, loss, rate)
                self.on_event(Event("step", *progress))
                if position.step < steps:
                    self._checkpoint(run, optimizer, position)
            mean = position.sum_of_losses / data.count
            losses = [*position.losses, mean]
            position = TrainingPosition(run.index, position.stage, epoch + 1, 0, losses)
            rate = optimizer.param_groups[0]["lr"]
            finished = (run.index, run.tasks, epoch, epochs, steps, steps, mean, rate)
            self.on_event(Event("epoch", *finished))
            self._checkpoint(run, optimizer, position)
        for parameter in paused:
            parameter.requires_grad_(True)
        method.eval()
        return position.losses

    def _optimizer(
        self, method: Method, stage: Stage, groups: Sequence[ParameterGroup]
    ) -> Optimizer:
        training = self.training
        rate = stage.learning_rate or training.learning_rate or method.learning_rate
        decay = training.weight_decay if stage.weight_decay is None else stage.weight_decay
        options = [
            {
                "params": list(group.parameters),
                "lr": (group.learning_rate or rate) * group.factor,
                "weight_decay": decay if group.weight_decay is None else group.weight_decay,
            }
            for group in groups
        ]
        if stage.optimizer == "sgd":
            return torch.optim.SGD(options, momentum=stage.momentum)
        kind = torch.optim.Adam if stage.optimizer == "adam" else torch.optim.AdamW
        return kind(options, betas=training.betas)

    def _rate(self, stage: Stage, start: float, epoch: float, epochs: int) -> float:
        schedule = stage.schedule or self.training.schedule
        return learning_rate(schedule, start, epoch, epochs, stage.final_factor)

    def _epoch_data(
        self, run: _TaskRun, stage: Stage, epoch: int, done: int, table: Tensor | None
    ) -> _EpochData:
        """Return the batches of an epoch after `done` steps; `epoch` counts over all stages."""
        training, world = self.training, self.fabric.world_size
        seed = training.seed
        samples: Samples | None = None
        if stage.data == "generated":
            generator = keyed_generator(seed, run.index, epoch, "generated")
            table, labels = run.method.generate(stage, generator)
        elif table is not None:
            labels = torch.from_numpy(np.asarray(run.train.labels, dtype=np.int64))
        else:
            samples = self._epoch_samples(run, epoch)
        count = len(table) if samples is None and table is not None else len(samples or ())
        shuffled = torch.randperm(
            count, generator=keyed_generator(seed, run.index, epoch, "order")
        ).tolist()
        size = stage.batch_size or training.batch_size
        order = [shuffled[first : first + size] for first in range(0, count, size)]
        if done > len(order):
            raise CorruptFile("the checkpoint", f"it counts {done} steps of {len(order)}")
        shares = [batch[self.fabric.global_rank :: world] for batch in order[done:]]
        if samples is None:
            assert table is not None
            rows, targets = table.cpu(), labels.cpu()
            feature_batches = (
                Batch(rows[share], targets[share], torch.tensor(share), None) for share in shares
            )
            return _EpochData(None, count, order, feature_batches)
        key = Epoch(seed, run.index, epoch, training.views) if stage.data == "augmented" else None
        loader = batches(samples, self.views, shares, epoch=key, workers=training.workers)
        return _EpochData(samples, count, order, loader)

    def _epoch_samples(self, run: _TaskRun, epoch: int) -> Samples:
        """Return the images of the task and the past images that the method replays."""
        generator = keyed_generator(self.training.seed, run.index, epoch, "replay")
        replay_rows = run.method.replay(len(run.train), generator).numpy()
        if len(replay_rows) and replay_rows[:, 0].max() >= len(run.past):
            problem = (
                f"{run.method.name} replays images of past tasks; give all {run.index} of them"
            )
            raise BadOption("learn", "past", problem)
        replayed = [
            run.past[number].train.subset(replay_rows[replay_rows[:, 0] == number, 1])
            for number in sorted(set(replay_rows[:, 0].tolist()))
        ]
        return Samples.concat([run.train, *replayed]) if replayed else run.train

    # -- a step

    def _step(
        self,
        run: _TaskRun,
        stage: Stage,
        module: _FabricModule,
        optimizer: _FabricOptimizer,
        batch: Batch,
        samples: Samples | None,
        whole: int,
    ) -> float | None:
        """Train on this process's share of a batch of `whole` images.

        Returns:
            The loss, or None, without an optimizer step, if it or a gradient is not finite.
        """
        optimizer.zero_grad()
        loss = self._backward(run.method, stage, module, self._on_device(batch), samples, whole)
        if not math.isfinite(loss):
            return None
        gradients = [parameter.grad for parameter in run.method.trainable_parameters()]
        # The gradient scaler of 16-mixed provokes overflows and skips those steps itself.
        if self.precision != "16-mixed" and not all(
            bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None
        ):
            return None
        if stage.clip_norm is not None:
            self.fabric.clip_gradients(module, optimizer, max_norm=stage.clip_norm)
        optimizer.step()
        return loss

    def _backward(
        self,
        method: Method,
        stage: Stage,
        module: _FabricModule,
        batch: Batch,
        samples: Samples | None,
        whole: int,
    ) -> float:
        """Accumulate the gradients of micro-batches and return the loss over all processes.

        Processes average their gradients, so a share's sums are multiplied by the number of
        processes; the penalty is the same everywhere and is added once.
        """
        processes = self.fabric.world_size
        largest = self._largest_share(whole)
        size = self.training.micro_batch or largest
        starts = range(0, largest, size)
        value = torch.zeros((), device=self.fabric.device, dtype=self._dtype)
        for start in starts:
            part = batch.part(slice(start, start + size))
            with self.fabric.autocast():
                inputs = self._training_batch(method, part, samples, stage.name)
            last = start == starts[-1]
            with self.fabric.no_backward_sync(module, enabled=not last):
                loss: Loss = module(inputs)
                share = (loss.mean.sum() / whole + loss.total.sum()) * processes
                if start == 0:
                    share = share + loss.penalty
                self.fabric.backward(share)
            value += share.detach()
        return float(self._reduced(value, "mean"))

    def _training_batch(
        self, method: Method, batch: Batch, samples: Samples | None, stage: str
    ) -> TrainingBatch:
        """Build the input of the method's loss; without samples, the batch contains features."""
        if samples is None:
            return TrainingBatch(None, batch.labels, None, batch.images, stage)
        images, queries = self.queries.see(method, batch, samples)
        return TrainingBatch(images, batch.labels, queries, None, stage)

    def _checkpoint(self, run: _TaskRun, optimizer: Optimizer, position: TrainingPosition) -> None:
        stopping = self.should_stop()
        if run.checkpointer is not None:
            run.checkpointer.save_after_step(run.method, optimizer, position, stopping=stopping)
        if stopping:
            raise Interrupted

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Interrupted

    # -- passes without training

    def evaluate(
        self, method: Method, samples: Samples, classes: Iterable[int]
    ) -> tuple[float, float]:
        """Compute the accuracy over all classes seen, and among `classes` only.

        Returns:
            Both accuracies; NaN without images.
        """
        rows = sorted(classes)
        unknown = [row for row in rows if row >= method.classes_seen]
        if unknown:
            raise NotLearned(unknown, [], method.name)
        self._place(method)
        method.eval()
        correct = torch.zeros(2, dtype=torch.int64, device=self.fabric.device)
        task_rows = torch.tensor(rows, device=self.fabric.device)
        for batch in self._pass_over(samples):
            with torch.inference_mode(), self.fabric.autocast():
                logits = method.logits(*self.queries.see(method, batch, samples))
                correct[0] += (logits.argmax(dim=1) == batch.labels).sum()
                restricted = task_rows[logits[:, task_rows].argmax(dim=1)]
                correct[1] += (restricted == batch.labels).sum()
        correct_overall, correct_restricted = self._reduced(correct, "sum").tolist()
        if not len(samples):
            return math.nan, math.nan
        return correct_overall / len(samples), correct_restricted / len(samples)

    def logits(self, method: Method, samples: Samples) -> Tensor:
        """Compute the logits of all samples in order, N x classes seen."""
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

    def _features_and_queries(
        self, method: Method, samples: Samples
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the features of all samples, and their queries if the method needs them."""
        if method.closed_form or not method.needs_queries:
            features = self._feature_table(method, samples)
            return features, features if method.closed_form else None

        def both(batch: Batch) -> Tensor:
            images, queries = self.queries.see(method, batch, samples)
            assert queries is not None
            return torch.cat([method.features(images, queries), queries], dim=1)

        features, queries = self._table(samples, both).split(method.vit_config.width, dim=1)
        return features.contiguous(), queries.contiguous()

    def _query_table(self, method: Method, samples: Samples) -> Tensor:
        return self._table(samples, lambda batch: method.queries(batch.images))

    @torch.inference_mode(False)  # a table made in evaluation may be used in training
    @torch.no_grad()
    def _table(self, samples: Samples, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Compute one row per un-augmented sample, in order; every process gets all rows."""
        parts, positions, done = [], [], 0
        for batch in self._pass_over(samples):
            with self.fabric.autocast():
                parts.append(compute(batch))
            positions.append(batch.positions)
            done += len(batch.positions) * self.fabric.world_size
            self.on_event(Event("pass", 0, 0, step=min(done, len(samples)), steps=len(samples)))
        rows = torch.cat(parts)  # of this process
        table = rows.new_zeros(len(samples), rows.shape[1])
        table[torch.cat(positions)] = rows
        return self._reduced(table, "sum")

    def _pass_over(self, samples: Samples) -> Iterator[Batch]:
        """Yield this process's share of all samples, un-augmented.

        All processes get the same number of batches, some of them empty: with a sharded backbone
        they communicate in every batch.
        """
        share = range(self.fabric.global_rank, len(samples), self.fabric.world_size)
        size = self.training.micro_batch or self.training.batch_size
        starts = range(0, self._largest_share(len(samples)), size)
        order = [list(share[first : first + size]) for first in starts]
        loader = batches(samples, self.views, order, workers=self.training.workers)
        for batch in loader:
            self._check_stop()
            yield self._on_device(batch)

    def _largest_share(self, count: int) -> int:
        """Return the largest share of any process; at least 1, so there is one (empty) batch."""
        return max(1, -(-count // self.fabric.world_size))

    def _reduced(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum or mean over processes."""
        if self.fabric.world_size == 1:
            return tensor
        reduced = self.fabric.all_reduce(tensor, reduce_op=operation)
        assert isinstance(reduced, Tensor)
        return reduced

    def _in_any(self, condition: bool) -> bool:
        """Whether the condition is true in any process that must run the same passes."""
        if not isinstance(self.fabric.strategy, Sharded):
            return condition
        return any_rank(self.fabric, lambda: condition)()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "64-true" else torch.float32

    def _place(self, method: Method) -> None:
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


def _join_tasks(tasks: Sequence[Task]) -> Task:
    """Join all tasks into one."""
    return Task(
        index=0,
        classes=tuple(row for task in tasks for row in task.classes),
        train=Samples.concat([task.train for task in tasks]),
        test=Samples.concat([task.test for task in tasks]),
        untrained=tuple(row for task in tasks for row in task.untrained),
    )

"""The engine: trains and evaluates any method; the only backward pass and optimizers.

Fabric provides devices, precision and several processes. Batches are global: each process trains on
its share, and losses and gradients are reduced so that a step equals that of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor
from torch.optim import Optimizer

from coda_prompt import errors
from coda_prompt.data.stream import Samples, Stream, Task
from coda_prompt.methods import Loss, Method, TaskBrief
from coda_prompt.methods.stages import ParameterGroup, Stage, TrainingBatch
from coda_prompt.model.vit import ViT
from coda_prompt.seeding import keyed_generator
from coda_prompt.training.budget import Meter
from coda_prompt.training.checkpointing import Checkpointer, TrainingPosition
from coda_prompt.training.loading import Batch, Epoch, batches
from coda_prompt.training.passes import Passes, share
from coda_prompt.training.schedule import learning_rate
from coda_prompt.training.settings import Event, Result
from coda_prompt.training.snapshot import restored_on_error


@dataclass(frozen=True)
class _TaskRun:
    """The task being learned."""

    method: Method
    train: Samples
    labels: Tensor
    past: Sequence[Task]
    index: int
    tasks: int
    """Number of tasks of the stream, for progress."""
    checkpointer: Checkpointer | None
    meter: Meter
    observe: Callable[[Tensor], None] | None = None
    """Called with the class tokens of all training images; see `Engine.learn`."""

    def out_of_budget(self, position: TrainingPosition) -> bool:
        """Whether the budget is spent; the first step of a task is always taken."""
        started = position.stage or position.epoch or position.step
        return bool(started) and position.spent >= self.meter.limit


@dataclass(frozen=True)
class _StageRun:
    """The stage being trained."""

    stage: Stage
    epochs: int
    optimizer: Optimizer
    rates: list[float]
    """Initial learning rate of each parameter group."""
    module: _FabricModule
    wrapped: _FabricOptimizer

    def set_rates(self, schedule: str, epoch: int, progress: float, spent: float) -> float:
        """Set the learning rates of a step and return the first.

        Args:
            schedule: Of the training settings, unless the stage has its own.
            epoch: Finished epochs.
            progress: Finished share of the epoch.
            spent: Share of the budget that is spent. The schedule follows it where it is ahead of
                the epochs, so that the learning rate falls before the budget ends.
        """
        stage = self.stage
        at = max(epoch + (progress if stage.per_iteration else 0), spent * (self.epochs - 1))
        for group, start in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = learning_rate(
                stage.schedule or schedule,
                start,
                at,
                self.epochs,
                stage.final_factor,
                stage.drop_at,
            )
        return float(self.optimizer.param_groups[0]["lr"])


@dataclass(frozen=True)
class _EpochData:
    """The remaining batches of an epoch."""

    samples: Samples | None
    """None for features and generated samples."""
    sizes: list[int]
    """Number of samples of every batch of the epoch, over all processes."""
    parts: list[int]
    """Number of micro-batches of every batch, the same on all processes."""
    loaded: Iterator[Batch]
    """This process's share of the remaining batches, in micro-batches."""


class Engine(Passes):
    """Trains and evaluates methods; see `Passes` for its arguments.

    Example:
        >>> engine = Engine(Views(preprocessing), Training(epochs=5))
        >>> result = engine.run(method, stream)
    """

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
        """Learn the tasks of a stream in order and evaluate all classes learned so far.

        Args:
            checkpointer: Saves the run; a run that it has saved before is resumed.
            result: The result of the resumed run so far, which is extended.
            measure_every: Evaluate after every so many tasks and after the last; tasks in chunks
                also after their last chunk.
        """
        if method.classes_seen:
            raise errors.BadOption(
                "run", "method", f"{method.name} has learned before; make a new one"
            )
        result = result or Result.empty(stream.test_images, len(stream.tasks))
        joint = method.trains_on == "all"
        tasks = [_join_tasks(stream)] if joint else stream.tasks
        done, last = 0, len(stream.tasks) - 1
        measured = {last, *range(measure_every - 1, last, measure_every), *stream.ends_of_chunks}
        if checkpointer is not None and checkpointer.latest is not None:
            done = checkpointer.latest.task
            if done > len(tasks):
                raise errors.CorruptFile(
                    checkpointer.folder, f"it counts {done} tasks of {len(tasks)}"
                )
            self._place(method)
            checkpointer.restore_learned(method)
        for task in tasks[done:]:
            meter = self._meter(stream, len(stream.tasks) if joint else 1)
            losses = self.learn(
                method,
                task,
                past=tasks[: task.index],
                tasks=len(tasks),
                checkpointer=checkpointer,
                meter=meter,
            )
            result.losses.append(losses)
            if meter.active:
                result.spent.append(meter.spent)
            after = last if joint else task.index
            if after in measured:
                self._measure(method, stream, after, result)
            if checkpointer is not None:
                checkpointer.save_after_task(method, task.index)
        return result

    def _measure(self, method: Method, stream: Stream, after: int, result: Result) -> None:
        """Evaluate all classes seen so far and write a row of the result."""
        seen, parts, row = method.classes_seen, [], []
        for number, group in enumerate(stream.groups):
            known = [label for label in group.classes if label < seen]
            if not known:
                continue
            of_seen = group.samples.labels < seen
            correct, own = self.correct(method, group.samples, known)
            result.matrix[after, number] = share(correct[of_seen])
            result.own_classes[after, number] = share(own[of_seen])
            row.append(float(result.matrix[after, number]))
            parts.append((group.samples.subset(of_seen), correct[of_seen]))
        all_correct = np.concatenate([correct for _, correct in parts])
        result.anytime[after] = share(all_correct)
        if stream.domain_names:
            domains = np.concatenate([np.asarray(samples.domains) for samples, _ in parts])
            result.domains = {
                name: share(all_correct[domains == domain])
                for domain, name in enumerate(stream.domain_names)
                if (domains == domain).any()
            }
        self.on_event(Event("evaluation", after, len(stream.tasks), accuracies=tuple(row)))

    # -- a task

    def learn(
        self,
        method: Method,
        task: Task,
        *,
        past: Sequence[Task] = (),
        tasks: int = 0,
        checkpointer: Checkpointer | None = None,
        observe: Callable[[Tensor], None] | None = None,
        meter: Meter | None = None,
    ) -> list[float]:
        """Learn one task.

        If that fails (a loss that is not finite, an unreadable image, an interrupt), the method is
        left as it was before.

        Args:
            past: Earlier tasks, for methods that train on their images again.
            tasks: Number of tasks of the stream, for progress.
            checkpointer: Saves the training; a training that it has saved before is resumed.
            observe: Called with `ViT.plain_tokens` of all training images.
            meter: Ends the training when its budget is spent. The first step and what is fitted
                in closed form are never left out.

        Returns:
            The mean loss of each epoch of all stages.
        """
        if not len(task.train):
            raise errors.EmptyTask(task.index)
        if method.in_task:
            raise errors.UnfinishedTask(method.name)
        self._place(method)
        index, classes = len(method.task_sizes), tuple(sorted(task.classes))
        labels = torch.from_numpy(np.asarray(task.train.labels, dtype=np.int64))
        if invalid := sorted(set(labels.tolist()) - set(classes)):
            raise errors.InvalidLabels(
                index, f"images of rows {invalid} are not of its classes {classes}"
            )
        meter, tasks = meter or Meter(), tasks or index + 1
        run = _TaskRun(method, task.train, labels, past, index, tasks, checkpointer, meter, observe)
        try:
            with restored_on_error(method), meter:
                resumed = None if checkpointer is None else checkpointer.position
                if resumed is None:
                    self.on_event(Event("task", index, run.tasks))
                if self.should_stop():
                    raise errors.Interrupted
                means = partial(self._class_means, method, task.train, classes)
                method.begin_task(TaskBrief(index, self.training.seed, classes, labels, means))
                losses = self._train(run, resumed)
                if observe is not None and not (method.closed_form and method.plain_queries):
                    plain = method.backbone.plain_tokens
                    observe(self._table(task.train, lambda images, _: plain(images)))
                method.end_task()
        finally:
            self.queries.tables.pop(task.train, None)
        return losses

    def _train(self, run: _TaskRun, resumed: TrainingPosition | None) -> list[float]:
        """Run the passes and the remaining stages of a task; return the losses of all epochs."""
        method, first = run.method, 0 if resumed is None else resumed.stage
        if method.prepares_on is not None:
            with torch.no_grad():
                method.prepare(self._all_batches(run, method.prepares_on))
        stages, epochs_before, losses = method.stages(), 0, list[float]()
        if resumed is not None and first >= len(stages):
            problem = f"it counts {first} stages of {len(stages)}"
            raise errors.CorruptFile("the checkpoint", problem)
        fitted = not method.fits
        for number, stage in enumerate(stages):
            if stage.data == "generated" and not fitted:
                # Checkpoints within a later stage contain what was fitted.
                if number > first or number == first == 0:
                    self._fit(run)
                fitted = True
            if number >= first:
                position = TrainingPosition(run.index, number, losses=losses)
                losses = self._train_stage(run, stage, position, epochs_before)
                method.end_stage(stage)
            epochs_before += stage.epochs or self.training.epochs
        if method.concludes_on is not None:
            with torch.no_grad():
                method.conclude(self._all_batches(run, method.concludes_on))
        if not fitted:
            self._fit(run)
        return losses

    def _meter(self, stream: Stream, tasks: int) -> Meter:
        """Return a meter with the budget of so many tasks of a stream."""
        budget = stream.budget
        if budget is None:
            return Meter()
        if self.training.views is not None and budget.multiply_adds is not None:
            problem = "views that recur make the cost of a step depend on earlier steps"
            raise errors.BadOption("the stream", "budget", f"{problem}; leave out training.views")
        limits = {name: limit and limit * tasks for name, limit in budget.model_dump().items()}

        def reduce(value: float, operation: str) -> float:
            tensor = torch.tensor(value, dtype=torch.float64, device=self.fabric.device)
            return float(self._reduced(tensor, operation))

        return Meter(budget.model_copy(update=limits), reduce)

    def _fit(self, run: _TaskRun) -> None:
        method = run.method
        if run.observe is not None and method.closed_form and method.plain_queries:
            # One pass for both.
            tokens, features = self._plain_tokens(method, run.train)
            run.observe(tokens)
            queries: Tensor | None = features
        else:
            features, queries = self._features_and_queries(method, run.train)
        method.fit(features, queries, run.labels.to(features.device))

    def _all_batches(self, run: _TaskRun, view: str) -> Iterator[TrainingBatch]:
        """Yield all images of the task, augmented or plain, in order, in every process."""
        training = self.training
        size = training.micro_batch or training.batch_size
        positions = range(len(run.train))
        order = [list(positions[first : first + size]) for first in positions[::size]]
        epoch = Epoch(training.seed, run.index, 0, training.views) if view == "augmented" else None
        workers = training.workers
        for batch in batches(
            run.train, self.views, order, epoch=epoch, workers=workers, dtype=self.dtype
        ):
            if self.should_stop():
                raise errors.Interrupted
            batch = self.fabric.to_device(batch)
            with self.fabric.autocast():
                images, queries = self.queries.see(run.method, batch, run.train)
                yield TrainingBatch(images, batch.labels, queries, None, "statistics")

    # -- stages

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
        restored = None
        if run.checkpointer is not None:
            restored = run.checkpointer.restore_training(method, optimizer)
        position = restored or position
        if position.epoch > epochs:
            raise errors.CorruptFile(
                "the checkpoint", f"it counts {position.epoch} epochs of {epochs}"
            )
        features = stage.data == "features"
        table = self._table(run.train, method.features, method) if features else None
        if run.meter.active:
            self._start_meter(run, stage, position, resumed=restored is not None)
        training = _StageRun(stage, epochs, optimizer, rates, module, wrapped)
        while position.epoch < epochs and (position.step or not run.out_of_budget(position)):
            epoch = epochs_before + position.epoch
            data = self._epoch_data(run, stage, epoch, position.step, table)
            position = self._train_epoch(run, training, data, position)
        for parameter in paused:
            parameter.requires_grad_(True)
        method.eval()
        return position.losses

    def _start_meter(
        self, run: _TaskRun, stage: Stage, position: TrainingPosition, *, resumed: bool
    ) -> None:
        """Count from what was spent before the stage, or before it was interrupted.

        Queries that are computed once are computed now: a resumed stage computes them again.
        """
        plain = stage.data == "plain" or self.views.augmentation is None
        cached = plain or self.training.queries == "cached"
        if cached and stage.data in ("plain", "augmented") and run.method.needs_queries:
            self.queries.fill(run.method, run.train)
        if resumed:
            run.meter.restore(position.spent)
        position.spent = run.meter.spent

    def _train_epoch(
        self, run: _TaskRun, training: _StageRun, data: _EpochData, position: TrainingPosition
    ) -> TrainingPosition:
        """Train the remaining steps of an epoch, or until the budget is spent.

        Returns:
            The position after the epoch.
        """
        epoch, steps = position.epoch, len(data.sizes)
        progress = (run.index, run.tasks, epoch, training.epochs)
        for step in range(position.step, steps):
            if run.out_of_budget(position):
                break
            rate = training.set_rates(
                self.training.schedule, epoch, step / steps, position.spent / run.meter.limit
            )
            loss = self._step(run, training, data, position)
            position.sum_of_losses += loss * data.sizes[step]
            position.step = step + 1
            position.spent = run.meter.spent
            self.on_event(Event("step", *progress, step, steps, loss, rate))
            if position.step == steps:
                position = position.after_epoch(sum(data.sizes))
                self.on_event(Event("epoch", *progress, steps, steps, position.losses[-1], rate))
            stopping = self.should_stop()
            if run.checkpointer is not None:
                run.checkpointer.save_after_step(
                    run.method, training.optimizer, position, now=stopping
                )
            if stopping:
                raise errors.Interrupted
        if position.epoch == epoch:  # the budget was spent before the end of the epoch
            position = position.after_epoch(sum(data.sizes[: position.step]))
        return position

    def _optimizer(
        self, method: Method, stage: Stage, groups: Sequence[ParameterGroup]
    ) -> Optimizer:
        training = self.training
        rates = (stage.learning_rate, training.learning_rate, method.learning_rate)
        rate = next(each for each in rates if each is not None)  # 0.0 is a rate
        decay = training.weight_decay if stage.weight_decay is None else stage.weight_decay
        options = [
            {
                "params": list(group.parameters),
                "lr": (rate if group.learning_rate is None else group.learning_rate) * group.factor,
                "weight_decay": decay if group.weight_decay is None else group.weight_decay,
            }
            for group in groups
        ]
        if stage.optimizer == "sgd":
            return torch.optim.SGD(options, momentum=stage.momentum)
        kind = torch.optim.Adam if stage.optimizer == "adam" else torch.optim.AdamW
        return kind(options, betas=training.betas)

    def _epoch_data(
        self, run: _TaskRun, stage: Stage, epoch: int, done: int, table: Tensor | None
    ) -> _EpochData:
        """Return the batches of an epoch after `done` steps; `epoch` counts over all stages."""
        training, processes = self.training, self.fabric.world_size
        samples, labels = run.train, run.labels
        if stage.data == "generated":
            generator = keyed_generator(training.seed, run.index, epoch, "generated")
            table, labels = run.method.generate(stage, generator)
        elif table is None and run.method.keeps_images:
            samples = self._with_replay(run, epoch)
        count = len(samples) if table is None else len(table)
        generator = keyed_generator(training.seed, run.index, epoch, "order")
        shuffled = torch.randperm(count, generator=generator).tolist()
        size = stage.batch_size or training.batch_size
        order = [shuffled[first : first + size] for first in range(0, count, size)]
        if done and done >= len(order):
            raise errors.CorruptFile("the checkpoint", f"it counts {done} steps of {len(order)}")
        sizes, parts = [len(batch) for batch in order], []
        micro = training.micro_batch or size
        for batch in order:
            share = batch[self.fabric.global_rank :: processes]
            starts = range(0, math.ceil(len(batch) / processes), micro)
            parts.append([share[start : start + micro] for start in starts])
        counts = [len(each) for each in parts]
        remaining = [part for each in parts[done:] for part in each]
        if table is not None:
            rows, labels = self.fabric.to_device((table.to(self.dtype), labels))
            features = (
                Batch(rows[part], labels[part], torch.tensor(part), None) for part in remaining
            )
            return _EpochData(None, sizes, counts, features)
        augmented = stage.data == "augmented"
        key = Epoch(training.seed, run.index, epoch, training.views) if augmented else None
        loaded = batches(
            samples, self.views, remaining, epoch=key, workers=training.workers, dtype=self.dtype
        )
        return _EpochData(samples, sizes, counts, loaded)

    def _with_replay(self, run: _TaskRun, epoch: int) -> Samples:
        """Return the images of the task and the past images that the method replays."""
        generator = keyed_generator(self.training.seed, run.index, epoch, "replay")
        rows = run.method.replay(len(run.train), generator).numpy()
        if not len(rows):
            return run.train
        if rows[:, 0].max() >= len(run.past):
            problem = f"{run.method.name} replays past images; give all {run.index} past tasks"
            raise errors.BadOption("learn", "past", problem)
        replayed = [
            run.past[task].train.subset(rows[rows[:, 0] == task, 1])
            for task in sorted(set(rows[:, 0].tolist()))
        ]
        return Samples.concat([run.train, *replayed])

    def _step(
        self,
        run: _TaskRun,
        training: _StageRun,
        data: _EpochData,
        position: TrainingPosition,
    ) -> float:
        """Train on this process's share of a batch and return the loss over all processes.

        Gradients of micro-batches are accumulated. Processes average their gradients, so a share's
        sums are multiplied by the number of processes; the penalty is the same everywhere and is
        added once.

        Raises:
            NonFiniteLoss: The loss or a gradient is not finite; the optimizer has not stepped.
        """
        method, processes = run.method, self.fabric.world_size
        stage, module, optimizer = training.stage, training.module, training.wrapped
        whole, last = data.sizes[position.step], data.parts[position.step] - 1
        value = torch.zeros((), device=self.fabric.device, dtype=self.dtype)
        optimizer.zero_grad()
        for number in range(last + 1):
            batch = self.fabric.to_device(next(data.loaded))
            with self.fabric.autocast():
                if data.samples is None:
                    inputs = TrainingBatch(None, batch.labels, None, batch.images, stage.name)
                else:
                    images, queries = self.queries.see(method, batch, data.samples)
                    inputs = TrainingBatch(images, batch.labels, queries, None, stage.name)
            with self.fabric.no_backward_sync(module, enabled=number < last):
                loss: Loss = module(inputs)
                share = (loss.mean.sum() / whole + loss.total.sum()) * processes
                if number == 0:
                    share = share + loss.penalty
                self.fabric.backward(share)
            value += share.detach()
        if processes > 1:
            value = self._reduced(value, "mean")
        step_loss = float(value)
        gradients = [parameter.grad for parameter in method.trainable_parameters()]
        # The gradient scaler of 16-mixed provokes overflows and skips those steps itself.
        if not math.isfinite(step_loss) or (
            self.precision != "16-mixed"
            and not all(bool(each.isfinite().all()) for each in gradients if each is not None)
        ):
            raise errors.NonFiniteLoss(position.task, position.epoch, position.step)
        if stage.clip_norm is not None:
            self.fabric.clip_gradients(module, optimizer, max_norm=stage.clip_norm)
        optimizer.step()
        return step_loss


def _join_tasks(stream: Stream) -> Task:
    """Join all tasks into one."""
    tasks = stream.tasks
    return Task(
        index=0,
        classes=tuple(sorted({row for task in tasks for row in task.classes})),
        train=Samples.concat([task.train for task in tasks]),
        test=Samples.concat([group.samples for group in stream.groups]),
        untrained=tuple(row for task in tasks for row in task.untrained),
    )

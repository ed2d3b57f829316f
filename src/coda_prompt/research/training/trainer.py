"""Train one stage of a task: epochs, batches and steps; the only optimizers.

Batches are global: each process trains on its share, and losses and gradients are reduced so that a
step equals that of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from lightning_fabric.wrappers import _FabricOptimizer
from torch import Tensor
from torch.optim import Optimizer

from coda_prompt import errors
from coda_prompt.research.methods import Method
from coda_prompt.research.methods.stages import ParameterGroup, Stage
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.streams.stream import Samples, Task
from coda_prompt.research.training.checkpointing import Checkpointer, TrainingPosition
from coda_prompt.research.training.cores import Cores, images_per_part, parts_of
from coda_prompt.research.training.gradients import Gradients
from coda_prompt.research.training.loading import Batch, Epoch, batches
from coda_prompt.research.training.passes import Passes
from coda_prompt.research.training.schedule import learning_rate
from coda_prompt.research.training.settings import Event
from coda_prompt.research.vit.vit import ViT


@dataclass(frozen=True)
class TaskRun:
    """The task being learned."""

    method: Method
    train: Samples
    labels: Tensor
    past: Sequence[Task]
    index: int
    tasks: int
    """Number of tasks of the stream, for progress."""
    checkpointer: Checkpointer | None
    budget: int | None
    """Optimizer steps after which the training ends."""

    def spent(self, position: TrainingPosition) -> float:
        """Return the share of the budget that is spent; 0 without one."""
        return position.steps_of_task / self.budget if self.budget else 0.0


@dataclass(frozen=True)
class StageRun:
    """The stage being trained."""

    stage: Stage
    epochs: int
    optimizer: Optimizer
    rates: list[float]
    """Initial learning rate of each parameter group."""
    wrapped: _FabricOptimizer
    gradients: Gradients

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
class EpochData:
    """The remaining batches of an epoch."""

    samples: Samples | None
    """None for features and generated samples."""
    sizes: list[int]
    """Number of samples of every batch of the epoch, over all processes."""
    parts: list[int]
    """Number of micro-batches of every batch, the same on all processes."""
    loaded: Iterator[Batch]
    """This process's share of the remaining batches, in micro-batches."""


class Trainer(Passes):
    """Trains the stages of a task; see `Passes` for its arguments."""

    def train_stage(
        self, run: TaskRun, stage: Stage, position: TrainingPosition, epochs_before: int
    ) -> TrainingPosition:
        """Train a stage from a position, or from where it was interrupted; return the end."""
        method, epochs = run.method, stage.epochs or self.training.epochs
        trainable = method.trainable_parameters()
        groups = stage.groups or [ParameterGroup(trainable)]
        trained = {id(parameter) for group in groups for parameter in group.parameters}
        paused = [each for each in trainable if id(each) not in trained]
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
        workers = self._workers(run, stage)
        if workers > 1 and self.precision == "bf16-mixed":
            with self.fabric.autocast():
                method.backbone.cast_weights()
        with Cores(workers) if workers > 1 else nullcontext() as cores:
            parameters = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ]
            gradients = Gradients(
                method, module, stage.name, parameters, self.fabric, self.queries, cores
            )
            training = StageRun(stage, epochs, optimizer, rates, wrapped, gradients)
            if restored is not None:
                self._restore_queries(run, training, position, epochs_before, workers)
            while position.epoch < epochs and run.spent(position) < 1:
                epoch = epochs_before + position.epoch
                data = self._epoch_data(run, stage, epoch, position.step, table, workers)
                position = self._train_epoch(run, training, data, position)
        for parameter in paused:
            parameter.requires_grad_(True)
        method.eval()
        return position

    def _workers(self, run: TaskRun, stage: Stage) -> int:
        """Return how many threads compute parts of a batch at the same time on a CPU.

        One where that is not possible, or where options ask for something else.
        """
        training, method = self.training, run.method
        possible = (
            self.fabric.device.type == "cpu"
            and self.fabric.world_size == 1
            and self.precision in ("32-true", "bf16-mixed")
            and method.loss_in_parts
            and method.frozen_backbone
            and stage.data in ("augmented", "plain")
            and training.micro_batch is None
            and not training.recompute
        )
        parts = parts_of(stage.batch_size or training.batch_size, method.vit_config)
        return min(torch.get_num_threads(), parts) if possible else 1

    def _restore_queries(
        self,
        run: TaskRun,
        training: StageRun,
        position: TrainingPosition,
        epochs_before: int,
        workers: int,
    ) -> None:
        """Compute the queries of recurring views again that were computed before an interruption.

        In the same batches: on several cores, the rounding of a query depends on its batch.
        """
        views, stage = self.training.views, training.stage
        recur = views is not None and self.training.queries == "exact" and stage.data == "augmented"
        if not recur or self.views.augmentation is None or not run.method.needs_queries:
            return
        assert views is not None
        first = epochs_before + position.epoch
        needed = {epoch % views for epoch in range(first, epochs_before + training.epochs)}
        for epoch in range(epochs_before, min(first + 1, epochs_before + views)):
            if epoch % views not in needed:
                continue
            data = self._epoch_data(run, stage, epoch, 0, None, workers)
            assert data.samples is not None
            seen = position.step if epoch == first else len(data.parts)
            for step, parts in enumerate(data.parts[:seen]):
                if self.should_stop():
                    raise errors.Interrupted
                training.gradients.cache_queries(data.loaded, data.samples, parts)
                self.on_event(Event("pass", 0, 0, step=step + 1, steps=seen))

    def _train_epoch(
        self, run: TaskRun, training: StageRun, data: EpochData, position: TrainingPosition
    ) -> TrainingPosition:
        """Train the remaining steps of an epoch, or until the budget is spent.

        Losses stay on the device, and the host waits for them only after some steps: then they are
        reported, a stop is noticed and checkpoints are written.

        Returns:
            The position after the epoch.

        Raises:
            NonFiniteLoss: A loss or a gradient is not finite. The step named is the one after
                which it was noticed.
        """
        epoch, steps = position.epoch, len(data.sizes)
        progress = (run.index, run.tasks, epoch, training.epochs)
        device = self.fabric.device
        precise = torch.float32 if device.type == "mps" else torch.float64
        total = torch.tensor(position.sum_of_losses, dtype=precise, device=device)
        finite = torch.ones((), dtype=torch.bool, device=device)
        for step in range(position.step, steps):
            spent = run.spent(position)
            rate = training.set_rates(self.training.schedule, epoch, step / steps, spent)
            loss, step_is_finite = self._step(training, data, position.step)
            total += loss.to(precise) * data.sizes[step]
            finite &= step_is_finite
            position.step = step + 1
            position.steps_of_task += 1
            ends = position.step == steps or run.spent(position) >= 1
            if not ends and position.step % self.wait_every:
                continue
            fetched = torch.stack([loss.to(precise), total, finite.to(precise)]).tolist()
            if not fetched[2]:
                raise errors.NonFiniteLoss(position.task, epoch, step)
            position.sum_of_losses = fetched[1]
            self.on_event(Event("step", *progress, step, steps, fetched[0], rate))
            if ends:
                position = position.after_epoch(sum(data.sizes[: step + 1]))
                self.on_event(Event("epoch", *progress, steps, steps, position.losses[-1], rate))
            stopping = self.should_stop()
            if run.checkpointer is not None:
                run.checkpointer.save_after_step(
                    run.method, training.optimizer, position, now=stopping
                )
            if stopping:
                raise errors.Interrupted
            if ends:
                break
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
        fused = True if self.fabric.device.type == "cuda" else None
        return kind(options, betas=training.betas, fused=fused)

    def _epoch_data(
        self, run: TaskRun, stage: Stage, epoch: int, done: int, table: Tensor | None, workers: int
    ) -> EpochData:
        """Return the batches of an epoch after `done` steps, in parts for `workers` threads.

        `epoch` counts over all stages.
        """
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
        for batch in order:
            micro = training.micro_batch or size
            if workers > 1:
                micro = images_per_part(len(batch), run.method.vit_config, workers)
            share = batch[self.fabric.global_rank :: processes]
            starts = range(0, math.ceil(len(batch) / processes), micro)
            parts.append([share[start : start + micro] for start in starts])
        counts = [len(each) for each in parts]
        remaining = [part for each in parts[done:] for part in each]
        if table is not None:
            rows, labels = self.fabric.to_device((table.to(self.dtype), labels))
            features = (Batch(rows[part], labels[part], part, None) for part in remaining)
            return EpochData(None, sizes, counts, features)
        augmented = stage.data == "augmented"
        key = Epoch(training.seed, run.index, epoch, training.views) if augmented else None
        loaded = batches(
            samples, self.views, remaining, epoch=key, workers=training.workers, dtype=self.dtype
        )
        return EpochData(samples, sizes, counts, loaded)

    def _with_replay(self, run: TaskRun, epoch: int) -> Samples:
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

    def _step(self, training: StageRun, data: EpochData, step: int) -> tuple[Tensor, Tensor]:
        """Train on this process's share of a batch.

        Returns:
            The loss over all processes, and whether it and all gradients are finite; both on the
            device.
        """
        stage, optimizer = training.stage, training.wrapped
        optimizer.zero_grad()
        value = training.gradients.add(
            data.loaded, data.samples, data.sizes[step], data.parts[step]
        )
        if self.fabric.world_size > 1:
            value = self._reduced(value, "mean")
        finite = value.isfinite()
        # The gradient scaler of 16-mixed provokes overflows and skips those steps itself.
        if self.precision != "16-mixed":
            gradients = [each.grad for each in training.gradients.parameters]
            checks = [each.isfinite().all() for each in gradients if each is not None]
            finite = torch.stack([finite, *checks]).all()
        if stage.clip_norm is not None:
            self.fabric.clip_gradients(
                training.gradients.module, optimizer, max_norm=stage.clip_norm
            )
        optimizer.step()
        return value, finite

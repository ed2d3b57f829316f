"""The engine: learns the tasks of a stream with any method, and evaluates what was learned.

Fabric provides devices, precision and several processes. Batches are global: each process trains on
its share, and losses and gradients are reduced so that a step equals that of a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from coda_prompt import errors
from coda_prompt.research.methods import Method, TaskBrief
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.streams.stream import Samples, Stream, Task
from coda_prompt.research.training.checkpointing import Checkpointer, TrainingPosition
from coda_prompt.research.training.loading import Epoch, batches
from coda_prompt.research.training.passes import share
from coda_prompt.research.training.settings import Event, Result
from coda_prompt.research.training.snapshot import restored_on_error
from coda_prompt.research.training.trainer import TaskRun, Trainer


class Engine(Trainer):
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
            measure_every: Evaluate each time this number of tasks is learned, and at the end; tasks
                in chunks also after their last chunk.
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
            self._move_to_device(method)
            checkpointer.restore_learned(method)
        for task in tasks[done:]:
            losses = self.learn(
                method,
                task,
                past=tasks[: task.index],
                tasks=len(tasks),
                checkpointer=checkpointer,
                budget=stream.budget and stream.budget * (len(stream.tasks) if joint else 1),
            )
            result.losses.append(losses)
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
        budget: int | None = None,
    ) -> list[float]:
        """Learn one task.

        If that fails (a loss that is not finite, an unreadable image, an interrupt), the method is
        left as it was before.

        Args:
            past: Earlier tasks, for methods that train on their images again.
            tasks: Number of tasks of the stream, for progress.
            checkpointer: Saves the training; a training that it has saved before is resumed.
            budget: Optimizer steps after which the training ends; what is fitted in closed form
                is never left out.

        Returns:
            The mean loss of each epoch of all stages.
        """
        if not len(task.train):
            raise errors.EmptyTask(task.index)
        if method.in_task:
            raise errors.UnfinishedTask(method.name)
        self._move_to_device(method)
        index, classes = len(method.task_sizes), tuple(sorted(task.classes))
        labels = torch.from_numpy(np.asarray(task.train.labels, dtype=np.int64))
        if invalid := sorted(set(labels.tolist()) - set(classes)):
            raise errors.InvalidLabels(
                index, f"images of rows {invalid} are not of its classes {classes}"
            )
        tasks = tasks or index + 1
        run = TaskRun(method, task.train, labels, past, index, tasks, checkpointer, budget)
        try:
            with restored_on_error(method):
                resumed = None if checkpointer is None else checkpointer.position
                if resumed is None:
                    self.on_event(Event("task", index, run.tasks))
                if self.should_stop():
                    raise errors.Interrupted
                means = partial(self._class_means, method, task.train, classes)
                method.begin_task(TaskBrief(index, self.training.seed, classes, labels, means))
                if not bool(method.in_task):
                    raise errors.BadMethod(method.name, "begin_task must call super().begin_task")
                losses = self._train(run, resumed)
                method.end_task()
                if bool(method.in_task):
                    raise errors.BadMethod(method.name, "end_task must call super().end_task")
        finally:
            self.queries.tables.pop(task.train, None)
        return losses

    def _train(self, run: TaskRun, resumed: TrainingPosition | None) -> list[float]:
        """Run the passes and the remaining stages of a task; return the losses of all epochs."""
        method, first = run.method, 0 if resumed is None else resumed.stage
        if method.prepares_on is not None:
            with torch.no_grad():
                method.prepare(self._all_batches(run, method.prepares_on))
        stages, epochs_before, position = method.stages(), 0, TrainingPosition(task=run.index)
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
                position = self.train_stage(run, stage, position.at_stage(number), epochs_before)
                method.end_stage(stage)
            epochs_before += stage.epochs or self.training.epochs
        if method.concludes_on is not None:
            with torch.no_grad():
                method.conclude(self._all_batches(run, method.concludes_on))
        if not fitted:
            self._fit(run)
        return position.losses

    def _fit(self, run: TaskRun) -> None:
        method = run.method
        sums = method.task_sums(run.labels)
        if sums is not None:
            self.add_to_sums(sums, method, run.train)
            method.add_sums(sums)
            return
        features, queries = self.features_and_queries(method, run.train)
        method.fit(features, queries, run.labels.to(features.device))

    def _all_batches(self, run: TaskRun, view: str) -> Iterator[TrainingBatch]:
        """Yield all images of the task, augmented or plain, in order, in every process."""
        training, size = self.training, self.pass_size
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
                images, queries = self.queries.images_and_queries(run.method, batch, run.train)
                yield TrainingBatch(images, batch.labels, queries, None, "statistics")


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

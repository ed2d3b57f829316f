"""Split a source into a stream of tasks."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from coda_prompt.data.sources import Integers, Source, Split
from coda_prompt.errors import BadOption, ClassInTwoTasks, EmptyTask, UnknownName


@dataclass(frozen=True, eq=False)
class Samples:
    """Selected images of a split, with the stream's labels (rows of the classifier head)."""

    split: Split
    indices: Integers
    labels: Integers

    def __post_init__(self) -> None:
        if self.indices.shape != self.labels.shape or self.indices.ndim != 1:
            raise ValueError(f"{self.indices.shape} indices, {self.labels.shape} labels")

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, position: int, min_side: int | None = None) -> Image.Image:
        return self.split.image(int(self.indices[position]), min_side)

    @property
    def domains(self) -> Integers | None:
        """Domain id of each image; None if the split has no domains."""
        return None if self.split.domains is None else self.split.domains[self.indices]

    def subset(self, positions: ArrayLike) -> Samples:
        """Select samples by positions, in this order, or by a boolean mask."""
        selected = np.asarray(positions)
        if not selected.size:
            selected = selected.astype(np.int64)  # an empty list becomes an array of floats
        return Samples(self.split, self.indices[selected], self.labels[selected])

    @staticmethod
    def concat(parts: Iterable[Samples]) -> Samples:
        """Concatenate samples, which may come from different splits.

        Splits without any remaining sample are not referenced by the result.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("nothing to concatenate")
        located = [pair for part in parts for pair in _locate(part)]
        splits = tuple(dict.fromkeys(split for split, _ in located)) or (parts[0].split,)
        joined = _JoinedSplit(splits)
        start = dict(zip(splits, joined.starts, strict=True))
        indices = np.array([start[split] + index for split, index in located], np.int64)
        labels = np.concatenate([part.labels for part in parts])
        return Samples(joined if len(splits) > 1 else splits[0], indices, labels)


class _JoinedSplit(Split):
    """Several splits as one."""

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self.splits = splits
        self.starts = [0, *itertools.accumulate(len(split) for split in splits[:-1])]
        self.labels = np.concatenate([split.labels for split in splits])
        domains = [split.domains for split in splits if split.domains is not None]
        self.domains = np.concatenate(domains) if len(domains) == len(splits) else None

    def locate(self, index: int) -> tuple[Split, int]:
        """Return the split of an image and its index there."""
        number = bisect.bisect_right(self.starts, index) - 1
        return self.splits[number], index - self.starts[number]

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        split, own_index = self.locate(index)
        return split.image(own_index, min_side)

    def fingerprint(self) -> str:
        return "+".join(split.fingerprint() for split in self.splits)


def _locate(samples: Samples) -> list[tuple[Split, int]]:
    """Return the original split of each sample and its index there."""
    split, indices = samples.split, samples.indices.tolist()
    if isinstance(split, _JoinedSplit):
        return [split.locate(index) for index in indices]
    return [(split, index) for index in indices]


@dataclass(frozen=True)
class Task:
    """Classes that are learned together, with their training and test images."""

    index: int
    classes: tuple[int, ...]  # rows: positions in the stream's class order
    train: Samples
    test: Samples
    untrained: tuple[int, ...] = ()  # rows without training images; they are tested all the same
    removed_domains: tuple[int, ...] = ()  # not in the training images


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which they are learned."""

    name: str
    class_names: tuple[str, ...]  # by row
    class_order: tuple[int, ...]  # the source's class ids, by row
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    validation: bool = False  # whether the test images are a held-out part of the training images


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """Return the natural order for seed 0, otherwise the shuffled order of the released code."""
    order = list(range(classes))
    if seed > 0:
        random.Random(seed).shuffle(order)
    return tuple(order)


def make_stream(
    source: Source,
    *,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    class_lists: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
    validation: bool = False,
    remove_domains: int = 0,
    train_images: int | None = None,
    test_images: int | None = None,
) -> Stream:
    """Split a source into tasks by exactly one of `tasks`, `classes_per_task` and `class_lists`.

    Args:
        source: the dataset.
        tasks: number of tasks of equal size; the first tasks get the remaining classes.
        classes_per_task: classes of each task; the last task may have fewer.
        class_lists: class names of each task, in this order for every seed.
        seed: seed of the class order, the validation split and the removed domains.
        validation: test on the last fifth of a random permutation of the training images, which
            is then not trained on.
        remove_domains: number of domains, drawn for each task, to remove from its training
            images.
        train_images: number of random images of each class to train on; by default all.
        test_images: number of random images of each class to test on; by default all.

    Raises:
        BadOption: an option is out of range, or not exactly one rule is given.
        EmptyTask: a task has no class or no training image.
    """
    if seed < 0:
        raise BadOption("the stream", "seed", f"{seed} is negative; use 0 or more")
    if sum(rule is not None for rule in (tasks, classes_per_task, class_lists)) != 1:
        problem = "give exactly one of tasks, classes_per_task and class_lists"
        raise BadOption("the stream", "tasks", problem)
    if class_lists is not None:
        order, sizes = _order_from_lists(source, class_lists)
    else:
        order = class_order(len(source.class_names), seed)
        sizes = _task_sizes(len(order), tasks, classes_per_task)
    _check_domains(source, remove_domains)

    row_of = np.full(len(source.class_names), -1, np.int64)
    row_of[list(order)] = np.arange(len(order))
    train_indices = np.arange(len(source.train))
    test_split, test_indices = source.test, np.arange(len(source.test))
    if validation:
        permuted = _generator(seed, "validation").permutation(len(source.train))
        count = len(permuted) - len(permuted) // 5
        train_indices, test_indices = np.sort(permuted[:count]), np.sort(permuted[count:])
        test_split = source.train
    train = Samples(source.train, train_indices, row_of[source.train.labels[train_indices]])
    train = _reduce(train, train_images, "train_images", seed)
    test = Samples(test_split, test_indices, row_of[test_split.labels[test_indices]])
    test = _reduce(test, test_images, "test_images", seed)

    stream_tasks = []
    first_row = 0
    for index, size in enumerate(sizes):
        rows = tuple(range(first_row, first_row + size))
        removed = _draw_removed_domains(source, seed, index, remove_domains)
        stream_tasks.append(_make_task(source, index, rows, train, test, removed))
        first_row += size
    return Stream(
        source.name,
        tuple(source.class_names[number] for number in order),
        order,
        tuple(stream_tasks),
        (
            *source.notes,
            *_notes(stream_tasks, seed, validation, remove_domains, train_images, test_images),
        ),
        validation,
    )


def _reduce(samples: Samples, images: int | None, field: str, seed: int) -> Samples:
    """Return so many random samples of each class; None: all."""
    if images is None:
        return samples
    if images < 1:
        raise BadOption("the stream", field, f"{images} is less than 1")
    order = _generator(seed, field).permutation(len(samples))
    order = order[np.argsort(samples.labels[order], kind="stable")]
    labels = samples.labels[order]
    rank = np.arange(len(labels)) - np.searchsorted(labels, labels)  # within the class
    chosen = np.zeros(len(samples), bool)
    chosen[order[rank < images]] = True
    return samples.subset(chosen)


def _order_from_lists(
    source: Source, class_lists: Sequence[Sequence[str]]
) -> tuple[tuple[int, ...], list[int]]:
    if isinstance(class_lists, str) or any(isinstance(names, str) for names in class_lists):
        problem = "needs a list of class names for each task, not a string"
        raise BadOption("the stream", "class_lists", problem)
    if not class_lists:
        raise EmptyTask(0, "has no class because class_lists is empty")
    number_of = {name: number for number, name in enumerate(source.class_names)}
    task_of: dict[str, int] = {}
    for task, names in enumerate(class_lists):
        if not names:
            raise EmptyTask(task, "has no class")
        for name in names:
            if name not in number_of:
                raise UnknownName("class", name, number_of)
            if name in task_of:
                raise ClassInTwoTasks(name, task_of[name], task)
            task_of[name] = task
    return tuple(number_of[name] for name in task_of), [len(names) for names in class_lists]


def _task_sizes(classes: int, tasks: int | None, classes_per_task: int | None) -> list[int]:
    if tasks is not None:
        if tasks < 1:
            raise BadOption("the stream", "tasks", f"{tasks} is less than 1")
        if tasks > classes:
            raise EmptyTask(classes, f"has no class: {tasks} tasks of {classes} classes")
        return [classes // tasks + (index < classes % tasks) for index in range(tasks)]
    if classes_per_task is None or classes_per_task < 1:
        raise BadOption("the stream", "classes_per_task", f"{classes_per_task} is less than 1")
    if not classes:
        raise EmptyTask(0, "has no class because the source has none")
    return [min(classes_per_task, classes - first) for first in range(0, classes, classes_per_task)]


def _check_domains(source: Source, remove: int) -> None:
    problem, count = "", len(source.domain_names)
    if remove < 0:
        problem = f"{remove} is negative"
    elif remove and source.train.domains is None:
        problem = f"the images of '{source.name}' have no domain labels"
        problem += "; use 0 or a source with domains"
    elif remove and remove >= count:
        problem = f"removing {remove} of {count} domains leaves no training image"
        problem += f"; use at most {count - 1}"
    if problem:
        raise BadOption("the stream", "remove_domains", problem)


def _draw_removed_domains(source: Source, seed: int, task: int, count: int) -> tuple[int, ...]:
    if not count:
        return ()
    drawn = _generator(seed, "domains", task).permutation(len(source.domain_names))[:count]
    return tuple(sorted(int(domain) for domain in drawn))


def _make_task(
    source: Source,
    index: int,
    rows: tuple[int, ...],
    train: Samples,
    test: Samples,
    removed: tuple[int, ...],
) -> Task:
    # The rows of a task are consecutive.
    task_train, task_test = (
        samples.subset((samples.labels >= rows[0]) & (samples.labels <= rows[-1]))
        for samples in (train, test)
    )
    if not len(task_train):
        raise EmptyTask(index)
    domains = task_train.domains
    if removed and domains is not None:
        task_train = task_train.subset(~np.isin(domains, removed))
        if not len(task_train):
            names = ", ".join(source.domain_names[domain] for domain in removed)
            raise EmptyTask(index, f"has no training image without the domains {names}")
    trained = set(task_train.labels.tolist())
    untrained = tuple(row for row in rows if row not in trained)
    return Task(index, rows, task_train, task_test, untrained, removed)


def _notes(
    tasks: Sequence[Task],
    seed: int,
    validation: bool,
    remove_domains: int,
    train_images: int | None,
    test_images: int | None,
) -> Iterator[str]:
    for images, use in ((train_images, "trained"), (test_images, "tested")):
        if images is not None:
            yield f"{use} on at most {images} images of each class"
    if validation:
        yield f"tested on a held-out fifth of the training images (seed {seed})"
    if remove_domains:
        yield f"{remove_domains} domains removed from the training images of each task"
    if untrained := sum(len(task.untrained) for task in tasks):
        yield f"{untrained} classes have no training image but are tested"
    for task in tasks:
        if not len(task.test):
            yield f"task {task.index + 1} has no test image"


def _generator(seed: int, purpose: str, task: int = 0) -> np.random.Generator:
    """Return an independent generator for each purpose and task."""
    return np.random.default_rng((seed, task, int.from_bytes(purpose.encode(), "big")))

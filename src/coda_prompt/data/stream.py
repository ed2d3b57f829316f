"""A source cut into tasks: which classes come when, and which images go with them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from coda_prompt.data.sources import Integers, Source, Split
from coda_prompt.errors import BadOption, ClassInTwoTasks, EmptyTask, UnknownName


@dataclass(frozen=True, eq=False)
class Samples:
    """Chosen images of a split under the stream's labels (rows of the head)."""

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
        """One domain per image, or None where the split has none."""
        return None if self.split.domains is None else self.split.domains[self.indices]

    def subset(self, positions: ArrayLike) -> Samples:
        """The samples at these positions (or where a mask is true), in this order."""
        chosen = np.asarray(positions)
        if not chosen.size:
            chosen = chosen.astype(np.int64)  # an empty list becomes an array of floats
        return Samples(self.split, self.indices[chosen], self.labels[chosen])

    @staticmethod
    def concat(parts: Iterable[Samples]) -> Samples:
        """One after another. A split that none of the samples is from is let go of."""
        parts = list(parts)
        if not parts:
            raise ValueError("nothing to concatenate")
        splits: list[Split] = []
        numbers, places = [], []  # of each sample: which of the splits, and where in it
        for part in parts:
            own, number, place = _located(part)
            splits += [split for split in own if not any(split is known for known in splits)]
            at = [next(n for n, known in enumerate(splits) if known is split) for split in own]
            numbers.append(np.array(at)[number])
            places.append(place)
        number, place = np.concatenate(numbers), np.concatenate(places)
        labels = np.concatenate([part.labels for part in parts])
        used = np.unique(number)
        if len(used) < 2:
            return Samples(splits[used[0] if len(used) else 0], place, labels)
        joined = _JoinedSplit(tuple(splits[n] for n in used))
        return Samples(joined, joined.starts[np.searchsorted(used, number)] + place, labels)


class _JoinedSplit:
    """Several splits seen as one."""

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self.splits = splits
        self.starts: Integers = np.cumsum([0, *(len(split) for split in splits[:-1])])
        self.labels: Integers = np.concatenate([split.labels for split in splits])
        domains = [split.domains for split in splits if split.domains is not None]
        self.domains = np.concatenate(domains) if len(domains) == len(splits) else None

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.splits[number].image(index - int(self.starts[number]), min_side)

    def fingerprint(self) -> str:
        return "+".join(split.fingerprint() for split in self.splits)


def _located(samples: Samples) -> tuple[tuple[Split, ...], Integers, Integers]:
    """Splits that are no join, which of them each sample is from, and where it is in it."""
    joined = samples.split
    if not isinstance(joined, _JoinedSplit):
        return (joined,), np.zeros(len(samples), np.int64), samples.indices
    number = np.searchsorted(joined.starts, samples.indices, side="right") - 1
    return joined.splits, number, samples.indices - joined.starts[number]


@dataclass(frozen=True)
class Task:
    """What arrives at once."""

    index: int
    classes: tuple[int, ...]  # rows: positions in the stream's class order
    train: Samples
    test: Samples
    untrained: tuple[int, ...] = ()  # rows without any training image: they stay in the test
    removed_domains: tuple[int, ...] = ()  # missing in the training images


@dataclass(frozen=True)
class Stream:
    name: str
    class_names: tuple[str, ...]  # by row
    class_order: tuple[int, ...]  # the source's class ids, by row
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    validation: bool = False  # whether the test images are training images held out


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """The natural order for seed 0, else the one the released code shuffles."""
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
) -> Stream:
    """Cut a source into tasks by exactly one of the three rules.

    `tasks`: so many, as even as can be, the remainder to the first; `classes_per_task`: so many
    classes each, the last task takes what is left; `class_lists`: these classes in this order,
    whatever the seed. `validation` holds out the last fifth of a seeded permutation of the
    training images and tests on it. `remove_domains` takes so many domains, others in each task,
    out of the training images.
    """
    if seed < 0:
        raise BadOption("the stream", "seed", f"{seed} is negative; use 0 or more")
    if sum(rule is not None for rule in (tasks, classes_per_task, class_lists)) != 1:
        raise BadOption(
            "the stream", "tasks", "give exactly one of tasks, classes_per_task and class_lists"
        )
    if class_lists is not None:
        order, sizes = _listed_classes(source, class_lists)
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
        kept = len(permuted) - len(permuted) // 5
        train_indices, test_indices = np.sort(permuted[:kept]), np.sort(permuted[kept:])
        test_split = source.train
    train = Samples(source.train, train_indices, row_of[source.train.labels[train_indices]])
    test = Samples(test_split, test_indices, row_of[test_split.labels[test_indices]])

    cut_tasks = []
    first = 0
    for index, size in enumerate(sizes):
        rows = tuple(range(first, first + size))
        removed = _removed(source, seed, index, remove_domains)
        cut_tasks.append(_task(source, index, rows, train, test, removed))
        first += size
    return Stream(
        source.name,
        tuple(source.class_names[number] for number in order),
        order,
        tuple(cut_tasks),
        (*source.notes, *_notes(cut_tasks, seed, validation, remove_domains)),
        validation,
    )


def _listed_classes(
    source: Source, class_lists: Sequence[Sequence[str]]
) -> tuple[tuple[int, ...], list[int]]:
    if isinstance(class_lists, str) or any(isinstance(names, str) for names in class_lists):
        raise BadOption(
            "the stream", "class_lists", "needs a list of class names for each task, not a name"
        )
    if not class_lists:
        raise EmptyTask(0, "has no class, as class_lists is empty")
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
        raise EmptyTask(0, "has no class, as the source has none")
    return [min(classes_per_task, classes - first) for first in range(0, classes, classes_per_task)]


def _check_domains(source: Source, remove: int) -> None:
    if remove < 0:
        raise BadOption("the stream", "remove_domains", f"{remove} is negative")
    if remove and source.train.domains is None:
        raise BadOption(
            "the stream",
            "remove_domains",
            f"the images of '{source.name}' have no domain labels; use 0 or a source with domains",
        )
    if remove and remove >= len(source.domain_names):
        raise BadOption(
            "the stream",
            "remove_domains",
            f"{remove} of {len(source.domain_names)} domains leave no training image; use at most "
            f"{len(source.domain_names) - 1}",
        )


def _removed(source: Source, seed: int, task: int, count: int) -> tuple[int, ...]:
    if not count:
        return ()
    chosen = _generator(seed, "domains", task).permutation(len(source.domain_names))[:count]
    return tuple(sorted(int(domain) for domain in chosen))


def _task(
    source: Source,
    index: int,
    rows: tuple[int, ...],
    train: Samples,
    test: Samples,
    removed: tuple[int, ...],
) -> Task:
    own_train = train.subset(_within(train.labels, rows))
    own_test = test.subset(_within(test.labels, rows))
    if not len(own_train):
        raise EmptyTask(index)
    domains = own_train.domains
    if removed and domains is not None:
        own_train = own_train.subset(~np.isin(domains, removed))
        if not len(own_train):
            names = ", ".join(source.domain_names[domain] for domain in removed)
            raise EmptyTask(index, f"has no training image without the domains {names}")
    present = set(own_train.labels.tolist())
    untrained = tuple(row for row in rows if row not in present)
    return Task(index, rows, own_train, own_test, untrained, removed)


def _within(labels: Integers, rows: tuple[int, ...]) -> NDArray[np.bool_]:
    """A task's rows follow one another."""
    return (labels >= rows[0]) & (labels <= rows[-1])


def _notes(
    tasks: Sequence[Task], seed: int, validation: bool, remove_domains: int
) -> Iterator[str]:
    if validation:
        yield f"tested on a fifth of the training images, held out (seed {seed})"
    if remove_domains:
        yield f"{remove_domains} domains of each task removed from its training images"
    if untrained := sum(len(task.untrained) for task in tasks):
        yield f"{untrained} classes have no training image: they stay in the test"
    for task in tasks:
        if not len(task.test):
            yield f"task {task.index + 1} has no test image"


def _generator(seed: int, purpose: str, task: int = 0) -> np.random.Generator:
    """Independent draws for each purpose and task."""
    return np.random.default_rng((seed, task, int.from_bytes(purpose.encode(), "big")))

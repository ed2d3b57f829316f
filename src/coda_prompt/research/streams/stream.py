"""Streams: a source cut into tasks, for every kind of continual learning.

Every training image is assigned to one task (`assignment.py`); all else follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import BadOption, EmptyTask
from coda_prompt.images.sources import Integers, Source
from coda_prompt.research.streams.assignment import UNUSED, assign, chunked, keyed, random_ranks
from coda_prompt.research.streams.groups import Groups, class_groups, domain_groups
from coda_prompt.research.streams.samples import Samples
from coda_prompt.research.streams.stream_options import StreamOptions

__all__ = ["Samples", "Stream", "Task", "TestGroup", "make_stream"]


@dataclass(frozen=True)
class Task:
    """Images that are learned together, and the test images of what they teach."""

    index: int
    classes: tuple[int, ...]  # rows: positions in the stream's class order
    train: Samples
    test: Samples
    untrained: tuple[int, ...] = ()  # rows without training images; they are tested all the same
    removed_domains: tuple[int, ...] = ()  # not in the training images


@dataclass(frozen=True)
class TestGroup:
    """Test images that are measured together: a column of the accuracy matrix."""

    __test__ = False  # not a test of pytest

    name: str
    classes: tuple[int, ...]
    samples: Samples
    first: int  # the first task that teaches them
    last: int  # the last one: all chunks of the task are learned then


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which they are learned, and the groups of images to test."""

    name: str
    class_names: tuple[str, ...]  # by row: in the order in which classes first appear
    class_order: tuple[int, ...]  # the source's class ids, by row
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    validation: bool = False  # whether the test images are a held-out part of the training images
    groups: tuple[TestGroup, ...] = ()  # default: the test images of each task
    domain_names: tuple[str, ...] = ()
    budget: int | None = None  # optimizer steps of each task

    def __post_init__(self) -> None:
        if not self.groups:
            groups = (
                TestGroup(f"task {task.index + 1}", task.classes, task.test, task.index, task.index)
                for task in self.tasks
            )
            object.__setattr__(self, "groups", tuple(groups))

    @property
    def test_images(self) -> list[int]:
        """Number of test images of each group."""
        return [len(group.samples) for group in self.groups]

    @property
    def ends_of_chunks(self) -> set[int]:
        """The last task of each group that several tasks teach."""
        return {group.last for group in self.groups if group.last > group.first}


def make_stream(
    source: Source, options: StreamOptions | None = None, *, seed: int = 0, **fields: Any
) -> Stream:
    """Cut a source into tasks.

    Args:
        source: The dataset.
        options: How to cut it.
        seed: Seed of the class order and of every random choice.
        **fields: Fields of `StreamOptions`, instead of `options`.

    Raises:
        BadOption: A field is out of range, or fields contradict each other.
        EmptyTask: A task has no class or no training image.

    Example:
        >>> stream = make_stream(source, tasks=10, seed=1)
    """
    if seed < 0:
        raise BadOption("the stream", "seed", f"{seed} is negative; use 0 or more")
    return _Cut(source, StreamOptions.of(**fields) if options is None else options, seed).stream()


class _Cut:
    """A source cut into tasks, which are numbered before they are cut into chunks.

    Labels are the class ids of the source here; the rows of a stream follow from its tasks.
    """

    def __init__(self, source: Source, options: StreamOptions, seed: int) -> None:
        self.source, self.options, self.seed = source, options, seed
        self.class_groups = class_groups(source, options, seed)
        self.domain_groups = domain_groups(source, options, seed)
        if options.remove_domains:
            _check_removed_domains(source, options.remove_domains)
        self.train, self.test = self._images()
        train_cells, test_cells = self._cell_of(self.train), self._cell_of(self.test)
        self.width = max(1, len(self.domain_groups))
        cells = np.arange(len(self.class_groups) * self.width)
        position = np.full(len(cells) + 1, UNUSED)  # the last one is that of cell -1
        if len(self.class_groups) > 1 and self.width > 1:
            cells = keyed(seed, "cells").permutation(cells)
        self.notes = list[str]()
        if options.by_domain:  # not every class exists in every domain
            empty = ~np.isin(cells, train_cells)
            cells = cells[~empty]
            if empty.any():
                self.notes.append(f"{empty.sum()} tasks without training images left out")
        self.cells: list[int] = cells.tolist()
        """Class group x domain groups + domain group of each task."""
        position[cells] = np.arange(len(cells))
        self.home, self.test_home = position[train_cells], position[test_cells]
        """Task of each image by its class and domain."""
        self.removed = [self._draw_removed_domains(task) for task in range(len(cells))]

    def stream(self) -> Stream:
        """Return the stream of all tasks."""
        source, options = self.source, self.options
        task_of, owners = self._chunks()
        first = self._first_tasks(task_of, owners)
        listed = [number for group in self.class_groups for number in group]
        class_order = sorted(listed, key=lambda number: int(first[number]))  # stable within a task
        row_of = np.full(len(source.class_names), UNUSED, np.int64)
        row_of[class_order] = np.arange(len(class_order))
        groups = self._groups(owners, row_of)
        tasks = []
        for index, owner in enumerate(owners.tolist()):
            train = _rows(self.train, task_of == index, row_of)
            present = set(train.labels.tolist())
            untrained = set(row_of[first == index].tolist()) - present
            classes, missing = tuple(sorted(present | untrained)), tuple(sorted(untrained))
            test, removed = groups[owner].samples, self.removed[owner]
            tasks.append(Task(index, classes, train, test, missing, removed))
        tested = [group for group in groups if len(group.samples) or not options.by_domain]
        return Stream(
            source.name,
            tuple(source.class_names[number] for number in class_order),
            tuple(class_order),
            tuple(tasks),
            (*source.notes, *self.notes, *_notes(tasks, groups, options, self.seed)),
            options.validation,
            tuple(tested),
            source.domain_names if self.test.domains is not None else (),
            options.budget,
        )

    def _chunks(self) -> tuple[Integers, Integers]:
        """Return the task of each training image, and the uncut task that each task is part of."""
        for task, removed in enumerate(self.removed):
            members = self.home == task
            if not members.any():
                raise EmptyTask(task)
            if removed:
                assert self.train.domains is not None
                self.home[members & np.isin(self.train.domains, removed)] = UNUSED
                if not (self.home == task).any():
                    names = ", ".join(self.source.domain_names[domain] for domain in removed)
                    raise EmptyTask(task, f"has no training image without the domains {names}")
        task_of = assign(self.home, self.train.labels, self.options, self.seed)
        for task in np.setdiff1d(np.arange(len(self.cells)), task_of):
            raise EmptyTask(int(task), "has no training image left: all moved to other tasks")
        if self.options.chunk is None:
            return task_of, np.arange(len(self.cells))
        return chunked(task_of, self.options.chunk, self.seed)

    def _first_tasks(self, task_of: Integers, owners: Integers) -> Integers:
        """Return the task in which each class first appears.

        A class without training images appears in the first task of its group.
        """
        first = np.full(len(self.source.class_names), len(owners))
        used = task_of != UNUSED
        np.minimum.at(first, self.train.labels[used], task_of[used])
        for task, owner in reversed(list(enumerate(owners.tolist()))):
            group = np.array(self.class_groups[self.cells[owner] // self.width])
            first[group[~np.isin(group, self.train.labels[used])]] = task
        return first

    def _groups(self, owners: Integers, row_of: Integers) -> list[TestGroup]:
        """Return the test images of each uncut task."""
        groups = []
        for number, cell in enumerate(self.cells):
            samples = _rows(self.test, self.test_home == number, row_of)
            classes = tuple(sorted(row_of[list(self.class_groups[cell // self.width])].tolist()))
            name = f"task {number + 1}"
            if self.domain_groups:
                domains = self.domain_groups[cell % self.width]
                name = " + ".join(self.source.domain_names[domain] for domain in domains)
                if len(self.class_groups) > 1:
                    name = f"classes {cell // self.width + 1}, {name}"
            (own,) = np.nonzero(owners == number)
            groups.append(TestGroup(name, classes, samples, int(own[0]), int(own[-1])))
        return groups

    def _images(self) -> tuple[Samples, Samples]:
        """Select training and test images; their labels are class ids."""
        source, options, seed = self.source, self.options, self.seed
        train_indices = np.arange(len(source.train))
        test_split, test_indices = source.test, np.arange(len(source.test))
        if options.validation:
            permuted = keyed(seed, "validation").permutation(len(source.train))
            count = len(permuted) - len(permuted) // 5
            train_indices, test_indices = np.sort(permuted[:count]), np.sort(permuted[count:])
            test_split = source.train
        train = Samples(source.train, train_indices, source.train.labels[train_indices])
        test = Samples(test_split, test_indices, test_split.labels[test_indices])
        return (
            _reduce(train, options.train_images, "train_images", seed),
            _reduce(test, options.test_images, "test_images", seed),
        )

    def _cell_of(self, samples: Samples) -> Integers:
        """Return class group x domain groups + domain group of each image, or `UNUSED`."""
        cells = _group_numbers(self.class_groups, len(self.source.class_names))[samples.labels]
        if self.domain_groups and samples.domains is not None:
            numbers = _group_numbers(self.domain_groups, len(self.source.domain_names))
            domains = numbers[samples.domains]
            unused = (cells == UNUSED) | (domains == UNUSED)
            cells = np.where(unused, UNUSED, cells * len(self.domain_groups) + domains)
        return cells

    def _draw_removed_domains(self, task: int) -> tuple[int, ...]:
        if not self.options.remove_domains:
            return ()
        drawn = keyed(self.seed, "domains", task).permutation(len(self.source.domain_names))
        return tuple(sorted(drawn[: self.options.remove_domains].tolist()))


def _rows(samples: Samples, chosen: NDArray[np.bool_], row_of: Integers) -> Samples:
    """Return the chosen samples with rows of the stream, instead of class ids, as labels."""
    return Samples(samples.split, samples.indices[chosen], row_of[samples.labels[chosen]])


def _group_numbers(groups: Groups, count: int) -> Integers:
    """Return the group of each of `count` ids; `UNUSED` for those in no group."""
    numbers = np.full(count, UNUSED, np.int64)
    for number, group in enumerate(groups):
        numbers[list(group)] = number
    return numbers


def _reduce(samples: Samples, images: int | None, field: str, seed: int) -> Samples:
    """Return `images` random samples of each class; None: all."""
    if images is None:
        return samples
    return samples.subset(random_ranks(samples.labels, keyed(seed, field)) < images)


def _check_removed_domains(source: Source, remove: int) -> None:
    count = len(source.domain_names)
    if source.train.domains is None:
        problem = f"the images of '{source.name}' have no domain labels; use 0 or a source with "
        raise BadOption("the stream", "remove_domains", f"{problem}domains")
    if remove >= count:
        problem = f"removing {remove} of {count} domains leaves no training image"
        raise BadOption("the stream", "remove_domains", f"{problem}; use at most {count - 1}")


def _notes(
    tasks: Sequence[Task], groups: Sequence[TestGroup], options: StreamOptions, seed: int
) -> Iterator[str]:
    for images, use in ((options.train_images, "trained"), (options.test_images, "tested")):
        if images is not None:
            yield f"{use} on at most {images} images of each class"
    if options.validation:
        yield f"tested on a held-out fifth of the training images (seed {seed})"
    if options.remove_domains:
        yield f"{options.remove_domains} domains removed from the training images of each task"
    if untrained := sum(len(task.untrained) for task in tasks):
        yield f"{untrained} classes have no training image but are tested"
    for group in groups:
        if not len(group.samples):
            yield f"{group.name} has no test image"

"""Cut the classes and the domains of a source into groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from coda_prompt.errors import BadOption, ClassInTwoTasks, EmptyTask, UnknownName
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.assignment import keyed
from coda_prompt.research.streams.stream_options import StreamOptions

Groups = list[tuple[int, ...]]


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """Return the natural order for seed 0, otherwise the shuffled order of the released code."""
    order = list(range(classes))
    if seed > 0:
        random.Random(seed).shuffle(order)
    return tuple(order)


def class_groups(source: Source, options: StreamOptions, seed: int) -> Groups:
    """Return the class ids of each group, in the order in which they are learned.

    Raises:
        EmptyTask: A group has no class.
        ClassInTwoTasks, UnknownName: A list names a class twice, or one that does not exist.
    """
    if options.class_lists is not None:
        return _from_lists(source.class_names, options.class_lists, "class")
    order = class_order(len(source.class_names), seed)
    if options.order_seed is not None:
        drawn = np.random.RandomState(options.order_seed).permutation(len(order))
        order = tuple(drawn.tolist())
    if options.tasks is None and options.classes_per_task is None:
        return [order]
    return _cut(order, _class_sizes(len(order), options, seed))


def domain_groups(source: Source, options: StreamOptions, seed: int) -> Groups:
    """Return the domain ids of each group, in the order in which they are learned.

    Raises:
        BadOption: The images have no domains.
        EmptyTask, ClassInTwoTasks, UnknownName: As in `class_groups`.
    """
    if not options.by_domain:
        return []
    if source.train.domains is None or source.test.domains is None:
        problem = f"the images of '{source.name}' have no domain labels; use a source with domains"
        raise BadOption("the stream", "domains_per_task", problem)
    if options.domain_lists is not None:
        return _from_lists(source.domain_names, options.domain_lists, "domain")
    order = class_order(len(source.domain_names), seed)
    assert options.domains_per_task is not None
    return _cut(order, _equal_sizes(len(order), options.domains_per_task))


def _from_lists(names: Sequence[str], lists: Sequence[Sequence[str]], kind: str) -> Groups:
    if not lists:
        raise EmptyTask(0, f"has no {kind} because {kind}_lists is empty")
    number_of = {name: number for number, name in enumerate(names)}
    task_of: dict[str, int] = {}
    for task, listed in enumerate(lists):
        if not listed:
            raise EmptyTask(task, f"has no {kind}")
        for name in listed:
            if name not in number_of:
                raise UnknownName(kind, name, number_of)
            if name in task_of:
                raise ClassInTwoTasks(name, task_of[name], task)
            task_of[name] = task
    return [tuple(number_of[name] for name in listed) for listed in lists]


def _class_sizes(classes: int, options: StreamOptions, seed: int) -> list[int]:
    """Return the number of classes of each group."""
    base = options.base_classes
    if base is not None and base >= classes:
        raise EmptyTask(1, f"has no class: the first has {base} of {classes} classes")
    first, rest = ([], classes) if base is None else ([base], classes - base)
    if options.tasks is None:
        assert options.classes_per_task is not None
        if not rest:
            raise EmptyTask(0, "has no class because the source has none")
        return first + _equal_sizes(rest, options.classes_per_task)
    groups = options.tasks - len(first)
    if groups > rest:
        raise EmptyTask(rest, f"has no class: {options.tasks} tasks of {classes} classes")
    if options.random_sizes:
        cuts = keyed(seed, "sizes").permutation(classes - 1)[: groups - 1] + 1
        bounds = [0, *sorted(cuts.tolist()), classes]
        return [end - start for start, end in pairwise(bounds)]
    if not groups:
        problem = "the classes after base_classes need a task; use 2 or more"
        raise BadOption("the stream", "tasks", problem)
    return first + [rest // groups + (index < rest % groups) for index in range(groups)]


def _equal_sizes(count: int, size: int) -> list[int]:
    return [min(size, count - first) for first in range(0, count, size)]


def _cut(order: Sequence[int], sizes: Sequence[int]) -> Groups:
    return [
        tuple(order[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]

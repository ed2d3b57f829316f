"""Assign every training image to a task: each function takes and returns one number per image.

The number of an image is the task it is learned in, or `UNUSED`. All randomness is keyed by the
seed of the trial and a purpose.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coda_prompt.images.sources import Integers
from coda_prompt.research.streams.stream_options import StreamOptions

UNUSED = -1


def keyed(seed: int, purpose: str, task: int = 0) -> np.random.Generator:
    """Return an independent generator for each purpose and task."""
    return np.random.default_rng((seed, task, int.from_bytes(purpose.encode(), "big")))


def random_ranks(groups: Integers, generator: np.random.Generator) -> Integers:
    """Number the images of each group in random order, from 0."""
    order = generator.permutation(len(groups))
    order = order[np.argsort(groups[order], kind="stable")]
    sorted_groups = groups[order]
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.searchsorted(sorted_groups, sorted_groups)
    return ranks


def assign(home: Integers, classes: Integers, options: StreamOptions, seed: int) -> Integers:
    """Apply the fields of a stream, except its chunks, to the tasks that images belong to.

    Args:
        home: Task of each image by its class and domain, or `UNUSED`.
        classes: Class of each image.
    """
    tasks = home.copy()
    if options.imbalance > 1:
        tasks[~long_tailed(classes, home != UNUSED, options.imbalance, seed)] = UNUSED
    if options.shots is not None:
        cells = tasks * (classes.max(initial=0) + 1) + classes
        ranks = random_ranks(cells, keyed(seed, "shots"))
        tasks[(tasks > 0) & (ranks >= options.shots)] = UNUSED
    if options.blur:
        tasks = blurred(tasks, classes, options.disjoint, options.blur, seed)
    if options.repeat:
        tasks = repeated(tasks, classes, options.repeat, seed)
    return tasks


def long_tailed(
    classes: Integers, used: NDArray[np.bool_], imbalance: float, seed: int
) -> NDArray[np.bool_]:
    """Select images so that the i-th of C classes has a share imbalance^(-i / (C - 1)) of them.

    At least one image of each class is selected; the order of the classes is random.
    """
    names = np.unique(classes[used])
    position = np.full(classes.max(initial=0) + 1, 0.0)
    order = keyed(seed, "imbalance").permutation(len(names))
    position[names] = order / max(1, len(names) - 1)
    counts = np.bincount(classes[used], minlength=len(position))
    limits = np.maximum(1, np.round(counts * imbalance**-position)).astype(np.int64)
    ranks = random_ranks(np.where(used, classes, UNUSED), keyed(seed, "long tail"))
    return used & (ranks < limits[classes])


def blurred(
    tasks: Integers, classes: Integers, disjoint: float, share: float, seed: int
) -> Integers:
    """Spread a share of the images of all blurry classes evenly over all tasks, at random."""
    generator, result = keyed(seed, "blur"), tasks.copy()
    names = np.unique(classes[tasks != UNUSED])
    blurry = generator.permutation(names)[round(disjoint * len(names)) :]
    moving = np.flatnonzero(np.isin(classes, blurry) & (tasks != UNUSED))
    moving = generator.permutation(moving)[: round(share * len(moving))]
    for task, part in enumerate(np.array_split(moving, int(tasks.max(initial=0)) + 1)):
        result[part] = task
    return result


def repeated(tasks: Integers, classes: Integers, probability: float, seed: int) -> Integers:
    """Divide the images of each class among its task and the later tasks in which it returns."""
    generator, result = keyed(seed, "repeat"), tasks.copy()
    later = int(tasks.max(initial=0)) + 1
    pairs = np.stack([tasks, classes], axis=1)[tasks != UNUSED]
    for task, name in np.unique(pairs, axis=0).tolist():
        drawn = np.flatnonzero(generator.random(later - task - 1) < probability) + task + 1
        members = generator.permutation(np.flatnonzero((tasks == task) & (classes == name)))
        for number, part in zip(
            [task, *drawn.tolist()], np.array_split(members, len(drawn) + 1), strict=True
        ):
            result[part] = number
    return result


def chunked(tasks: Integers, size: int, seed: int) -> tuple[Integers, Integers]:
    """Cut each task into random chunks of nearly equal size, at most `size` images.

    Returns:
        The chunk of each image, numbered over all tasks, and the task of each chunk.
    """
    result, owners = np.full_like(tasks, UNUSED), list[int]()
    for task in range(int(tasks.max(initial=UNUSED)) + 1):
        members = keyed(seed, "chunks", task).permutation(np.flatnonzero(tasks == task))
        for part in np.array_split(members, -(-len(members) // size)):
            result[part] = len(owners)
            owners.append(task)
    return result, np.array(owners, np.int64)

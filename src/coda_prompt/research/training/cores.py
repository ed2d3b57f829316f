"""Several threads that compute independent batches, each on cores of its own.

If all cores computed the same batch, each operation would wait for the slowest of them
(docs/lab/performance.md, "One part a core").
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

from coda_prompt.research.vit.vit import ViTConfig

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_IMAGES = 16
"""Images of a part of a training batch, at most; larger parts are slower and need more memory."""
FEWEST_IMAGES, FEWEST_LARGE_IMAGES = 8, 4
"""Images of a part, at least, unless workers would be left without one: with fewer, starting
operations takes a notable part of the time."""
SMALL_IMAGE, LARGE_IMAGE = 2**14, 2**16
"""Values (tokens x width) up to which an image is small, and from which it is large."""
FEWEST_PARTS = 4
"""Parts of a batch that is large enough, so that two cores have half of it in memory."""


class Cores:
    """A context with `workers` threads that share the cores evenly.

    Example:
        >>> with Cores(2) as cores:
        ...     for batch, features in cores.map(batches, vit.features):
        ...         print(batch, features)
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> Cores:
        threads = torch.get_num_threads()
        started = threading.Barrier(self.workers)

        def start() -> None:
            torch.get_num_threads()  # else the first operation would copy the caller's number
            torch.set_num_threads(max(1, threads // self.workers))
            torch.set_autocast_cache_enabled(False)  # any thread would clear it for all
            started.wait()  # so that every thread gets one of these calls

        self._pool = ThreadPoolExecutor(self.workers, "cores")
        try:
            for call in [self._pool.submit(start) for _ in range(self.workers)]:
                call.result()
        except BaseException:  # no thread may wait for one that was not started
            started.abort()
            self._pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(threads)  # of this thread and of those that start later
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(
        self, items: Iterable[Item], compute: Callable[[Item], Result]
    ) -> Iterator[tuple[Item, Result]]:
        """Yield items with what the threads compute from them, in order.

        Items are taken in the calling thread, one more than there are threads.
        """
        pending: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            pending.append((item, self._pool.submit(compute, item)))
            if len(pending) > self.workers:
                first, result = pending.popleft()
                yield first, result.result()
        for item, result in pending:
            yield item, result.result()


def parts_of(batch: int, vit: ViTConfig) -> int:
    """Return into how many parts a training batch is divided; one if images are small."""
    if vit.tokens * vit.width <= SMALL_IMAGE:
        return 1
    large = vit.tokens * vit.width >= LARGE_IMAGE
    fewest = FEWEST_LARGE_IMAGES if large else FEWEST_IMAGES
    return max(1, math.ceil(batch / MOST_IMAGES), min(FEWEST_PARTS, batch // fewest))


def images_per_part(batch: int, vit: ViTConfig, workers: int) -> int:
    """Return the images of each part, if every worker gets as many parts; the last has the rest."""
    parts = parts_of(batch, vit)
    if parts > 1:
        parts = math.ceil(parts / workers) * workers
    return math.ceil(batch / parts)

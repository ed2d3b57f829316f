"""One thread for each core, for functions that release the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of cores this process may use; OMP_NUM_THREADS limits it further."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], ahead: int = 2
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, computed by one thread for each core.

    An exception is raised where its result would have been. When the iterator is closed or
    interrupted, what has not started is not computed.

    Args:
        function: Called in several threads at a time.
        items: Taken in the calling thread, as needed.
        ahead: Items in work for each thread, so that results need not all be in memory.
    """
    threads = usable_cores()
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, "coda")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= threads * ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

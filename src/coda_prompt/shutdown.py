"""Ctrl-C and polite kills: the step at hand is finished and kept before the program ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_following = threading.Event()
"""Whether this process was started for another one, with which it ends."""


class ShutdownFlag:
    """Whether the user has asked to stop; asked twice, the program ends where it is."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Signals ask from here on."""
        with _handled(self._ask):
            yield

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not _following.is_set():
            raise KeyboardInterrupt
        self.asked = True


KINDS = (signal.SIGINT, signal.SIGTERM)


def ignored() -> contextlib.AbstractContextManager[None]:
    """Requests to stop are dropped, also by processes that are started meanwhile."""
    return _handled(signal.SIG_IGN)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """For a while; elsewhere than in the main thread, which alone may set them, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in KINDS}
    try:
        yield
    finally:
        for kind, earlier in before.items():
            signal.signal(kind, earlier)


def exit_with_parent(parent: int | None, code: int) -> None:
    """Started for another process, this one does not outlive it: one that was killed cannot see to
    that itself."""
    _following.set()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(code)

    threading.Thread(target=watch, daemon=True).start()

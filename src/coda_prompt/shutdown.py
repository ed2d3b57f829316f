"""Graceful shutdown: finish and checkpoint the current step, then exit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_has_parent = threading.Event()
"""Set in a process that `exit_with_parent` ends."""


class ShutdownFlag:
    """True once a shutdown was requested by Ctrl-C or SIGTERM; a second signal exits at once.

    Example:
        >>> stop = ShutdownFlag()
        >>> with stop.handling_signals():
        ...     while not stop():
        ...         train_one_step()
    """

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Set the flag on signals inside the block."""
        with _signal_handler(self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and not _has_parent.is_set():
            raise KeyboardInterrupt
        self.requested = True


def signals_ignored() -> contextlib.AbstractContextManager[None]:
    """Ignore shutdown signals inside the block, also in processes started there."""
    return _signal_handler(signal.SIG_IGN)


@contextlib.contextmanager
def _signal_handler(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Install a handler; does nothing outside the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


def exit_with_parent(parent: int | None, code: int) -> None:
    """Exit with `code` when the process `parent` dies, even if it was killed.

    From then on a second shutdown signal does not exit at once: the parent decides.
    """
    _has_parent.set()

    def watch() -> None:
        _wait_for_parent(parent)
        os._exit(code)

    threading.Thread(target=watch, daemon=True).start()


def _wait_for_parent(parent: int | None) -> None:
    """Return when the process `parent` has ended."""
    if sys.platform == "win32":  # there, the number of a parent stays the same when it has died
        import ctypes

        synchronize, forever = 0x00100000, 0xFFFFFFFF
        handle = ctypes.windll.kernel32.OpenProcess(synchronize, False, parent or 0)
        if handle:
            ctypes.windll.kernel32.WaitForSingleObject(handle, forever)
        return
    while os.getppid() == parent:
        time.sleep(0.2)

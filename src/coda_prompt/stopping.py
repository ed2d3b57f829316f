"""Ctrl-C and polite kills: the step at hand is finished and kept before the program ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether the user has asked to stop; asked twice, the program ends where it is."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Signals ask from here on; elsewhere than in the main thread nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self._ask) for kind in _KINDS}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


_KINDS = (signal.SIGINT, signal.SIGTERM)

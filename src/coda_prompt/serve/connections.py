"""Connections whose requests do not arrive: they are closed in time and never block others.

uvicorn limits the number of connections and closes those that are idle after an answer. It waits
without limit for a first request, for the rest of its headers and for an answer to be read.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 500
"""Requests on further connections get status 503."""
MAX_WAITING = 400
"""Connections without a complete request. One more closes the one that has been silent for the
longest time, so that the rest of `MAX_CONNECTIONS` is reserved for complete requests."""
MAX_SILENT_SECONDS = 20.0
"""Time for the headers of a request, and for a client to read some of its answer."""


class Connection(H11Protocol):
    """A connection that is closed if its client neither sends a request nor reads the answer."""

    _timer: asyncio.TimerHandle | None = None
    """Runs while the client has to send headers or to read."""
    _last_data = 0.0
    """When the client connected or sent something last."""

    @property
    def waiting(self) -> bool:
        """Whether a part of the next request has not arrived yet, and there is nothing to send."""
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return incomplete and not self.transport.is_closing() and not self._unread

    @property
    def _unread(self) -> int:
        """Bytes of the answer that could not be sent yet."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, and start to wait for its request."""
        others = (each for each in self.connections if isinstance(each, Connection))
        waiting = [each for each in others if each.waiting]
        if len(waiting) >= MAX_WAITING:
            min(waiting, key=lambda each: each._last_data).transport.abort()
        super().connection_made(transport)
        self._last_data = self.loop.time()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        self._last_data = self.loop.time()
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start to wait for the client to read its answer."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Stop to wait: the client has read."""
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """Run the timer exactly while it is the client's turn."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.flow.write_paused:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(MAX_SILENT_SECONDS, self._time_out, self._unread)

    def _time_out(self, unread: int) -> None:
        """Close the connection, unless its client has read a part of what was unread."""
        if self._unread < unread:
            self._start_timer()
        else:
            self.transport.abort()

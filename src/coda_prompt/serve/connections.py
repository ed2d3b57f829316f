"""Connections whose requests do not arrive: they are closed in time and never block others.

uvicorn limits the number of connections and closes those that are idle after an answer. It waits
without limit for a first request, for the rest of its headers and for an answer to be read.
"""

from __future__ import annotations

import asyncio
import heapq

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 500
"""Requests on further connections get status 503."""
MAX_REPLACEABLE = 400
"""Connections above which those are closed that do not wait for the service, so that the rest of
`MAX_CONNECTIONS` is reserved for complete requests."""
CLOSED_AT_ONCE = 50
"""Connections that are then closed: choosing them takes time."""
ACTIVE_SECONDS = 1.0
"""A client that has sent something within this time is not silent."""
MAX_SILENT_SECONDS = 20.0
"""Time for the headers of a request, and for a client to read some of its answer."""


class Connection(H11Protocol):
    """A connection that is closed if its client neither sends a request nor reads the answer."""

    _last_data = 0.0
    """When the client connected or sent something last."""
    _turn_began = 0.0
    """When the client had something to do first: to send headers, or to read more."""
    _unread = 0
    """Bytes of the answer that could not be sent yet."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, and start to wait for its request."""
        if len(self.connections) >= MAX_REPLACEABLE:
            others = (each for each in self.connections if isinstance(each, Connection))
            replaceable = [each for each in others if not each._waits_for_answer]
            for each in heapq.nsmallest(CLOSED_AT_ONCE, replaceable, Connection._importance):
                each.transport.abort()
                self.connections.discard(each)  # also before the event loop has closed it
        super().connection_made(transport)
        self._last_data = self._turn_began = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        self._last_data = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        self._turn_began = self.loop.time()
        super().on_response_complete()

    def close_if_silent(self) -> None:
        """Close the connection if its client has done nothing for too long; called regularly."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        answering = self.cycle is not None and not self.cycle.response_complete
        if (answering and not self.flow.write_paused) or unread < self._unread:
            self._turn_began = now
        self._unread = unread
        if now - self._turn_began > MAX_SILENT_SECONDS:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request; its route may have begun to answer already."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    @property
    def _has_request(self) -> bool:
        """Whether a complete request has arrived."""
        return self.cycle is not None and not self.cycle.more_body

    @property
    def _waits_for_answer(self) -> bool:
        """Whether nothing of the answer to a complete request was sent yet."""
        return self._has_request and not self.cycle.response_started

    def _importance(self) -> tuple[bool, float]:
        """Order of closing: first the silent, then the oldest streams, slow readers and others."""
        reading = self._has_request and not self.cycle.response_complete
        reading = reading or self.transport.get_write_buffer_size() > 0
        active = self.loop.time() - self._last_data < ACTIVE_SECONDS
        return reading or active, self._last_data

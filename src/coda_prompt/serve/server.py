"""The HTTP server: uvicorn, with a prompt shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import uvicorn

from coda_prompt.serve.access import AccessPolicy
from coda_prompt.serve.app import make_app
from coda_prompt.serve.connections import MAX_CONNECTIONS, Connection
from coda_prompt.serve.service import Service

SHUTDOWN_SECONDS = 30
MAX_ACCEPTED, BACKLOG = 64, 2048
"""Connections that are accepted before the requests of earlier ones are read, and that may wait."""


class Server(uvicorn.Server):
    """Serves models; ends the open streams of states as soon as a shutdown is requested.

    Args:
        services: The models by name.
        policy: Who may access them.
        on_ready: Called when requests are answered and signals end the service.
    """

    def __init__(
        self, services: Mapping[str, Service], policy: AccessPolicy, on_ready: Callable[[], None]
    ) -> None:
        self._services, self._on_ready = services, on_ready
        super().__init__(
            uvicorn.Config(
                make_app(services, policy),
                log_level="error",  # clients cause warnings
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                http=Connection,
                ws="none",
                limit_concurrency=MAX_CONNECTIONS,
                backlog=MAX_ACCEPTED,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Close silent connections; uvicorn calls this ten times a second."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.close_if_silent()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish accepted requests, then stop."""
        for service in self._services.values():
            service.end_streams()
        await super().shutdown(sockets)

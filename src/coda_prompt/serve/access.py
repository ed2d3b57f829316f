"""Access control in front of every route: host, origin, token, request size and time.

Starlette's TrustedHostMiddleware is not used: it answers with plain text instead of a problem
document. (Starlette 1.10 parses IPv6 hosts such as `[::1]:8000`; the versions that FastAPI 0.115
installs cut them at the first colon.)
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections import Counter
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coda_prompt.errors import BadOption
from coda_prompt.serve.problems import request_error_response
from coda_prompt.serve.uploads import (
    MAX_EDIT_BYTES,
    MAX_UNZIPPED_BYTES,
    MAX_UPLOAD_BYTES,
    RequestError,
)

MAX_SECONDS_BETWEEN_CHUNKS = 20.0
"""A client that pauses longer in the middle of a request body gets status 408."""
MIN_BYTES_PER_SECOND = 16 * 1024
"""So does one that has sent less than this over `MAX_SECONDS_BETWEEN_CHUNKS`."""
MAX_HELD_BYTES = 256 * 2**20 + MAX_UPLOAD_BYTES + MAX_UNZIPPED_BYTES
"""Bodies of all requests together, with what is unpacked from them; more gets status 503."""
RESERVED_BYTES = 64 * 2**20
"""The part of `MAX_HELD_BYTES` for requests that hold at most `MAX_EDIT_BYTES`."""
UPLOADS = re.compile(r"(/models/[^/]+)?/v1/(predict|explain|preview|learn|relabel|merge)")
"""Paths whose bodies have files."""
API_PATH = re.compile(r"(/models/[^/]+)?/(v1|metrics)")
"""Paths that need the token: the API of each model, but not the page."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_TOKEN_LENGTH = 8


@dataclass(frozen=True)
class AccessPolicy:
    """Who may use the service."""

    token: str | None = None
    """Bearer token for the API and /metrics; None: no token needed."""
    hosts: tuple[str, ...] | None = LOOPBACK
    """Accepted Host headers, against DNS rebinding; None: any."""

    @classmethod
    def of(cls, host: str, token: str | None) -> AccessPolicy:
        """Return the policy of a service that listens on `host`.

        Raises:
            BadOption: The token is short, or missing where other machines can reach the service.
        """
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            problem = f"use at least {MIN_TOKEN_LENGTH} characters"
            raise BadOption("coda serve", "token", problem)
        if host not in LOOPBACK and token is None:
            problem = f"other machines can reach {host}; set CODA_TOKEN to a secret"
            raise BadOption("coda serve", "token", problem)
        return cls(token, LOOPBACK if host in LOOPBACK else None)

    def check(self, scope: Scope) -> None:
        """Raise RequestError if the policy does not allow the request."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.hosts is not None and _parse_url(f"//{host}").hostname not in self.hosts:
            raise RequestError(403, "The Host header is not an address of this service.")
        origin = headers.get("origin")
        read_only = scope["method"] in ("GET", "HEAD", "OPTIONS")
        if not read_only and origin is not None and _parse_url(origin).netloc != host:
            raise RequestError(403, "Requests from pages of other sites are not allowed.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > (limit := max_body_bytes(scope)):
            raise _too_large(limit)
        if self.token is not None and API_PATH.match(scope["path"]):
            token = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode("latin-1"), self.token.encode()):
                raise RequestError(401, "Send the token: 'Authorization: Bearer TOKEN'.")


class AccessMiddleware:
    """Enforces an AccessPolicy and the limits on request bodies."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self.app, self.policy = app, policy
        self._held: Counter[RequestBody] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.policy.check(scope)
        except RequestError as error:
            await request_error_response(error)(scope, receive, send)
            return
        body = RequestBody(receive, max_body_bytes(scope), self._held)
        scope.setdefault("state", {})["body"] = body
        try:
            await self.app(scope, body.receive, send)
        finally:
            del self._held[body]


class RequestBody:
    """The body of a request, with limits on its size, the time it takes, and its memory.

    Args:
        receive: Returns its next part.
        max_bytes: How large it may be.
        held: Bytes that each request holds in memory.
    """

    def __init__(self, receive: Receive, max_bytes: int, held: Counter[RequestBody]) -> None:
        self._receive, self._max_bytes, self._held = receive, max_bytes, held
        self._received, self._complete = 0, False
        self._deadline = time.monotonic() + MAX_SECONDS_BETWEEN_CHUNKS

    async def receive(self) -> Message:
        """Return the next part."""
        if self._complete:  # the next message is the disconnect, whenever that happens
            return await self._receive()
        try:
            left = self._deadline - time.monotonic()
            message = await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError:
            raise RequestError(408, "The request body did not arrive in time.") from None
        self._complete = not message.get("more_body", False)
        size = len(message.get("body", b""))
        self._received += size
        if self._received > self._max_bytes:
            raise _too_large(self._max_bytes)
        self.hold(size)
        self._deadline = min(
            self._deadline + size / MIN_BYTES_PER_SECOND,
            time.monotonic() + MAX_SECONDS_BETWEEN_CHUNKS,
        )
        return message

    def hold(self, size: int) -> None:
        """Count bytes that are in memory until the request ends; refuse them if they are too many.

        Args:
            size: Bytes of the body or unpacked from it; negative if fewer were unpacked.
        """
        self._held[self] += size
        small = self._held[self] <= MAX_EDIT_BYTES
        if self._held.total() > MAX_HELD_BYTES - (0 if small else RESERVED_BYTES) and size > 0:
            raise RequestError(503, "Too much is being uploaded. Retry in 5 s.", retry_after=5)


def max_body_bytes(scope: Scope) -> int:
    """Return how large the body of a request may be."""
    return MAX_UPLOAD_BYTES if UPLOADS.fullmatch(scope["path"]) else MAX_EDIT_BYTES


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"The request body is larger than {max_bytes:,} bytes.")


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.hostname  # raises ValueError for malformed hosts
    except ValueError:
        raise RequestError(403, "The Host or Origin header is malformed.") from None
    return parts

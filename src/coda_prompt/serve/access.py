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
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coda_prompt.serve.problems import request_error_response
from coda_prompt.serve.uploads import MAX_EDIT_BYTES, MAX_UPLOAD_BYTES, RequestError

MAX_SECONDS_BETWEEN_CHUNKS = 20.0
"""A client that pauses longer in the middle of a request body gets status 408."""
MIN_BYTES_PER_SECOND = 1024
"""So does one that sends a body more slowly than this, after `MAX_SECONDS_BETWEEN_CHUNKS`."""
UPLOADS = re.compile(r"(/models/[^/]+)?/v1/(predict|explain|preview|learn|relabel|merge)")
"""Paths whose bodies have files."""
API_PATH = re.compile(r"(/models/[^/]+)?/(v1|metrics)")
"""Paths that need the token: the API of each model, but not the page."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AccessPolicy:
    """Who may use the service."""

    token: str | None = None
    """Bearer token for the API and /metrics; None: no token needed."""
    hosts: tuple[str, ...] | None = LOOPBACK
    """Accepted Host headers, against DNS rebinding; None: any."""

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.policy.check(scope)
        except RequestError as error:
            await request_error_response(error)(scope, receive, send)
        else:
            await self.app(scope, _limited(receive, max_body_bytes(scope)), send)


def max_body_bytes(scope: Scope) -> int:
    """Return how large the body of a request may be."""
    return MAX_UPLOAD_BYTES if UPLOADS.fullmatch(scope["path"]) else MAX_EDIT_BYTES


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Limit the size of a body and the time it takes to arrive."""
    received, complete = 0, False
    started = time.monotonic()

    async def limited() -> Message:
        nonlocal received, complete
        if complete:  # the next message is the disconnect, whenever that happens
            return await receive()
        ahead = started + received / MIN_BYTES_PER_SECOND - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), MAX_SECONDS_BETWEEN_CHUNKS + min(0, ahead))
        except asyncio.TimeoutError:
            raise RequestError(408, "The request body did not arrive in time.") from None
        complete = not message.get("more_body", False)
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise _too_large(max_bytes)
        return message

    return limited


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"The request body is larger than {max_bytes:,} bytes.")


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.hostname  # raises ValueError for malformed hosts
    except ValueError:
        raise RequestError(403, "The Host or Origin header is malformed.") from None
    return parts

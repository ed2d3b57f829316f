"""Prometheus metrics of a service, and the middleware that records requests."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coda_prompt.serve.service import Service

SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        b"connect-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class Metrics:
    """Metrics of one service, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "coda_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "coda_request_seconds", "Response time.", ["path"], registry=registry
        )
        self.images = Counter("coda_images", "Images predicted.", registry=registry)
        for name, text, value in (
            ("coda_passes", "Forward passes.", lambda: service.passes),
            ("coda_waiting", "Images waiting for a prediction.", lambda: service.batcher.waiting),
            ("coda_classes", "Learned classes.", lambda: len(service.current.classes)),
            ("coda_tasks", "Learned lessons.", lambda: len(service.current.classifier.tasks_)),
            ("coda_learning", "1 while a lesson is running.", lambda: int(service.learning)),
        ):
            Gauge(name, text, registry=registry).set_function(value)


class MetricsMiddleware:
    """Records every request, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *SECURITY_HEADERS]
            await send(message)

        try:
            await self.app(scope, receive, record)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - started)

"""Errors as problem documents (RFC 9457, `application/problem+json`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coda_prompt.errors import (
    BadClassName,
    BadImage,
    BadImages,
    BadOption,
    CannotEdit,
    CodaError,
    FolderBusy,
    MissingData,
    NothingToUndo,
    NotLearned,
)
from coda_prompt.serve.schemas import Problem
from coda_prompt.serve.uploads import RequestError

log = logging.getLogger(__name__)

MAX_DETAIL = 1_000
"""Characters; names and values that clients send may be repeated in it."""

INVALID = (BadClassName, BadImage, BadImages, BadOption, MissingData, NotLearned)
"""Errors that are the client's."""
CLIENT_CLOSED_REQUEST = 499
"""As nginx calls it; only /metrics shows it."""


def problem_response(
    status: int, detail: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a problem document."""
    if len(detail) > MAX_DETAIL:
        detail = f"{detail[:MAX_DETAIL]}…"
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(
        problem.model_dump(), status, dict(headers or {}), "application/problem+json"
    )


def request_error_response(error: RequestError) -> JSONResponse:
    """Return a refused request as a problem document."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return problem_response(error.status, str(error), headers)


def validation_message(first: Mapping[str, Any]) -> str:
    """Return an error of pydantic as a sentence."""
    field = ".".join(str(part) for part in first["loc"]) or "the body"
    return f"{field}: {first['msg'].removeprefix('Value error, ')}."


def add_exception_handlers(app: FastAPI) -> None:
    """Answer every error of the routes with a problem document."""

    @app.exception_handler(CodaError)
    async def coda_error(_: Request, error: CodaError) -> JSONResponse:
        if isinstance(error, RequestError):
            return request_error_response(error)
        if isinstance(error, NothingToUndo):
            return problem_response(409, "There is no earlier version to restore.")
        if isinstance(error, FolderBusy | CannotEdit):
            return problem_response(409, str(error))
        return problem_response(422 if isinstance(error, INVALID) else 503, str(error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(422, validation_message(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return problem_response(error.status_code, f"{error.detail}.", error.headers)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it

    @app.exception_handler(Exception)
    async def unexpected_error(_: Request, error: Exception) -> JSONResponse:
        log.error("unexpected error", exc_info=error)
        return problem_response(500, "Internal error; see the log of the service.")

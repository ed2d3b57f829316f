"""The service over HTTP: routes, limits, problems as documents, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from swagger_ui_bundle import swagger_ui_path

from coda_prompt import __version__
from coda_prompt.errors import BadImage, BadImages, CodaError, FolderBusy, NothingToUndo
from coda_prompt.learner import store
from coda_prompt.serve.service import Answer, Job, Service
from coda_prompt.serve.uploads import (
    MOST_IN_A_REQUEST,
    MOST_TO_LEARN,
    MOST_TO_PREDICT,
    SURELY_FEW,
    Example,
    Refused,
    check_pixels,
    checked_label,
    from_base64,
    from_zip,
)

log = logging.getLogger(__name__)

SECONDS_BETWEEN_PARTS = 20.0
"""That a caller may take between two parts of a request."""
SECONDS = 30.0
"""After which a request for predictions is given up."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ASGI = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class Door:
    """Who may come in."""

    token: str | None = None
    hosts: tuple[str, ...] | None = LOOPBACK
    """Names the service answers to; None: any. A page of another site cannot borrow ours."""


class Given(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Picture(Given):
    data: str = Field(description="An image file in base64, or as a data URL.")


class Lesson(Picture):
    label: str = Field(description="The name of its class.")


class Asked(Given):
    images: list[Picture] = Field(min_length=1, max_length=MOST_TO_PREDICT)


class Taught(Given):
    images: list[Lesson] = Field(min_length=1, max_length=MOST_TO_LEARN)


class Choice(BaseModel):
    label: str
    probability: float


class Prediction(BaseModel):
    label: str | None = Field(description="The likeliest class; null where `unknown`.")
    unknown: bool = Field(description="Whether `best` is less likely than `unknown_below`.")
    best: str = Field(description="The most likely class, unknown or not.")
    probability: float = Field(description="The probability of `best`.")
    top: list[Choice]


class Predictions(BaseModel):
    version: str
    predictions: list[Prediction]


class JobState(BaseModel):
    id: str
    state: str
    stage: str
    share: float
    seconds_left: float | None
    images: int
    classes: list[str]
    reason: str | None
    learned: dict[str, Any] | None
    version: str | None


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 504)
}
FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}


def _body(name: str, form: dict[str, Any], *required: str) -> dict[str, Any]:
    """A request's body in the OpenAPI document: JSON of this name, or a form of these fields."""
    schema: dict[str, Any] = {"type": "object", "properties": form}
    if required:
        schema["required"] = list(required)
    content = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}},
        "multipart/form-data": {"schema": schema},
    }
    return {"requestBody": {"content": content, "required": True}}


IMAGES = _body("Asked", {"images": FILES}, "images")
LESSONS = _body(
    "Taught",
    {
        "images": FILES,
        "labels": {"type": "array", "items": {"type": "string"}},
        "archive": {
            "type": "string",
            "format": "binary",
            "description": "A zip of class folders, instead of images and labels.",
        },
    },
)


class Metrics:
    """What Prometheus collects; each service has its own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("coda_requests", "Requests by path and status.",
                                ["path", "status"], **own)  # fmt: skip
        self.seconds = Histogram("coda_request_seconds", "Time to answer.", ["path"], **own)
        self.images = Counter("coda_images", "Images predicted.", **own)
        for name, text, value in (
            ("coda_passes", "Passes of the network.", lambda: service.passes),
            ("coda_waiting", "Images waiting.", lambda: service.batcher.waiting),
            ("coda_classes", "Classes known.", lambda: len(service.current.classes)),
            ("coda_tasks", "Tasks learned.", lambda: len(service.current.classifier.tasks_)),
            ("coda_learning", "Whether a lesson goes on.", lambda: int(service.learning)),
        ):
            Gauge(name, text, **own).set_function(value)


def make_app(service: Service, door: Door | None = None, *, seconds: float = SECONDS) -> FastAPI:
    door = door or Door()

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="coda-prompt", version=__version__, docs_url=None, redoc_url=None,
                  lifespan=life)  # fmt: skip
    metrics = Metrics(service)
    _handle_problems(app)
    _add_predicting(app, service, metrics, seconds)
    _add_teaching(app, service)
    _add_telling(app, service, metrics)
    _add_page(app)
    _describe(app)
    app.add_middleware(Guard, door=door, metrics=metrics)
    return app


# -- routes


def _add_predicting(app: FastAPI, service: Service, metrics: Metrics, seconds: float) -> None:
    @app.post("/v1/predict", response_model=Predictions, responses=PROBLEMS,
              openapi_extra=IMAGES)  # fmt: skip
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=100)] = 5,
        unknown_below: Annotated[float, Query(ge=0, le=1)] = 0.0,
    ) -> dict[str, Any]:
        """The classes of one or many images, likeliest first."""
        contents = await _images(request)

        async def answered() -> list[Answer]:
            if len(contents) > SURELY_FEW:
                await asyncio.to_thread(check_pixels, contents)
            views = await asyncio.gather(
                *(asyncio.to_thread(service.view, content, name) for name, content in contents)
            )
            return await service.predict(views)

        with service.batcher.admitted(len(contents)):
            try:
                answers = await asyncio.wait_for(answered(), seconds)
            except asyncio.TimeoutError:
                raise Refused(504, f"There was no answer within {seconds:g} seconds.") from None
        metrics.images.inc(len(answers))
        told = [
            answer.version.predictor.rank(answer.probabilities, top, unknown_below).as_dict()
            for answer in answers
        ]
        return {"version": answers[0].version.name, "predictions": told}


def _add_teaching(app: FastAPI, service: Service) -> None:
    @app.post("/v1/learn", status_code=202, response_model=JobState, responses=PROBLEMS,
              openapi_extra=LESSONS)  # fmt: skip
    async def learn(request: Request) -> dict[str, Any]:
        """Start learning labelled images; predictions go on with the version there is."""
        return service.teach(await _lessons(request)).told()

    @app.get("/v1/jobs/{number}", response_model=JobState, responses=PROBLEMS)
    async def job(number: str) -> dict[str, Any]:
        """How a lesson stands."""
        return _job(service, number).told()

    @app.get("/v1/jobs/{number}/events", response_class=StreamingResponse, responses={
        **PROBLEMS, 200: {"content": {"text/event-stream": {}}, "description": "Its changes."}
    })  # fmt: skip
    async def events(number: str) -> StreamingResponse:
        """How a lesson stands, whenever that changes, as server-sent events."""
        found = _job(service, number)

        async def lines() -> AsyncIterator[str]:
            async for told in found.changes():
                yield f"data: {json.dumps(told)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-store"})  # fmt: skip

    @app.post("/v1/undo", responses=PROBLEMS)
    async def undo() -> dict[str, Any]:
        """Back to the version before the newest task."""
        version = await service.undo()
        return {"version": version.name, "classes": list(version.classes)}


def _add_telling(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/classes", responses=PROBLEMS)
    async def classes() -> dict[str, Any]:
        """The classes known, in the order in which they were learned."""
        version = service.current
        return {"version": version.name, "classes": list(version.classes)}

    @app.get("/v1/model", responses=PROBLEMS)
    async def model() -> dict[str, Any]:
        """What the model says of itself."""
        version = service.current
        return {
            "version": version.name,
            "method": version.classifier.method_name,
            "backbone": version.classifier.backbone_name,
            "tasks": version.classifier.tasks_,
            "can_undo": (service.folder / store.PREVIOUS).exists(),
            "learning": service.learning,
        }

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok\n"

    @app.get("/metrics", response_class=PlainTextResponse)
    async def collected() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(metrics.registry))


def _add_page(app: FastAPI) -> None:
    page = resources.files("coda_prompt") / "serve" / "page"

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse((page / "index.html").read_text("utf-8"))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="coda-prompt",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/page/icon.svg",
        )

    app.mount("/page", StaticFiles(directory=str(page)), name="page")
    app.mount("/docs/assets", StaticFiles(directory=str(swagger_ui_path)), name="docs")


def _describe(app: FastAPI) -> None:
    """Name the bodies that are read by hand in the OpenAPI document."""
    made = app.openapi

    def described() -> dict[str, Any]:
        document: dict[str, Any] = made()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in (Asked, Taught, Picture, Lesson):
            own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            own.pop("$defs", None)
            schemas[kind.__name__] = own
        return document

    app.openapi = described  # type: ignore[method-assign]


# -- what comes in


async def _images(request: Request) -> list[tuple[str, bytes]]:
    """Names to speak of them, and contents."""
    if _is_json(request):
        asked = _validated(Asked, await _json(request))
        named = [(f"image {place}", held.data) for place, held in enumerate(asked.images, 1)]
        return [(name, from_base64(data, name)) for name, data in named]
    async with _form(request, MOST_TO_PREDICT) as form:
        files = _files(form, "images")
        return [(f"image {place}", await file.read()) for place, file in enumerate(files, 1)]


async def _lessons(request: Request) -> list[Example]:
    if _is_json(request):
        taught = _validated(Taught, await _json(request))
        return [
            Example(checked_label(held.label), from_base64(held.data, f"image {place}"))
            for place, held in enumerate(taught.images, 1)
        ]
    async with _form(request, MOST_TO_LEARN) as form:
        if form.get("archive") is not None:
            (archive,) = _files(form, "archive")[:1]
            return await asyncio.to_thread(from_zip, await archive.read())
        files = _files(form, "images")
        given = form.getlist("labels")
        if not all(isinstance(label, str) for label in given):
            raise Refused(422, "Labels are fields of text, not files.")
        labels = [checked_label(str(label)) for label in given]
        if len(labels) == 1:
            labels *= len(files)
        if len(labels) != len(files):
            problem = f"There are {len(files)} images and {len(labels)} labels: give each its own."
            raise Refused(422, problem)
        contents = [await file.read() for file in files]
        return [Example(*pair) for pair in zip(labels, contents, strict=True)]


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise Refused(415, "Send application/json or multipart/form-data.")
    return kind == "application/json"


async def _json(request: Request) -> Any:
    try:
        return await asyncio.to_thread(json.loads, await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(400, "The body is not JSON.") from error


def _validated(kind: type[Given], content: Any) -> Any:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise Refused(422, _first(error.errors())) from error


@contextlib.asynccontextmanager
async def _form(request: Request, most: int) -> AsyncIterator[FormData]:
    try:
        form = await request.form(max_files=most, max_fields=most + 10)
    except HTTPException as error:
        raise Refused(400, f"The form cannot be read ({error.detail}).") from error
    try:
        yield form
    finally:
        await form.close()


def _files(form: FormData, name: str) -> list[UploadFile]:
    files = [file for file in form.getlist(name) if isinstance(file, UploadFile)]
    if not files:
        raise Refused(422, f"The form has no file in '{name}'.")
    return files


def _job(service: Service, number: str) -> Job:
    if number not in service.jobs:
        raise Refused(404, "There is no such job.")
    return service.jobs[number]


# -- the door


class Guard:
    """In front of all: who may ask, from where, and how much; and the count of it."""

    def __init__(self, app: ASGI, door: Door, metrics: Metrics) -> None:
        self.app, self.door, self.metrics = app, door, metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1")
                   for name, value in scope["headers"]}  # fmt: skip
        started, status, read, begun, whole = time.perf_counter(), 500, 0, False, False

        async def counted() -> Any:
            nonlocal read, whole
            if whole:  # what follows is when the caller leaves, in its own time
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), SECONDS_BETWEEN_PARTS)
            except asyncio.TimeoutError:
                raise Refused(408, "The rest of the request did not come.") from None
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > MOST_IN_A_REQUEST:
                raise Refused(413, f"More than {MOST_IN_A_REQUEST:,} bytes are not taken.")
            return message

        async def noted(message: Any) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message["headers"], *SAFE_HEADERS]
            await send(message)

        try:
            self._check(scope, headers)
            await self.app(scope, counted, noted)
        except Refused as error:
            if begun:
                raise
            await _problem(error.status, str(error), error.retry)(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - started)

    def _check(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> None:
        host = _split(f"//{headers.get('host', '')}")
        if self.door.hosts is not None and host.hostname not in self.door.hosts:
            raise Refused(403, "This service answers under its own address only.")
        origin = headers.get("origin")
        changes = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if changes and origin is not None and _split(origin).netloc != headers.get("host"):
            raise Refused(403, "Pages of other sites may not change anything here.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MOST_IN_A_REQUEST:
            raise Refused(413, f"More than {MOST_IN_A_REQUEST:,} bytes are not taken.")
        if self.door.token is not None and scope["path"].startswith(("/v1", "/metrics")):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
            if not hmac.compare_digest(given, self.door.token.encode()):
                raise Refused(401, "Give the service's token: 'Authorization: Bearer TOKEN'.")


SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def _split(address: str) -> SplitResult:
    try:
        found = urlsplit(address)
        _ = found.hostname  # it, too, may find the address wrong
    except ValueError:
        raise Refused(403, "The address of the request is none.") from None
    return found


# -- problems


def _handle_problems(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _problem(error.status, str(error), error.retry)

    @app.exception_handler(CodaError)
    async def wrong(_: Request, error: CodaError) -> JSONResponse:
        busy = isinstance(error, NothingToUndo | FolderBusy)
        bad = isinstance(error, BadImage | BadImages)
        status = 409 if busy else 422 if bad else 503
        nothing = "There is no earlier version to go back to."
        return _problem(status, nothing if isinstance(error, NothingToUndo) else str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _problem(422, _first(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _problem(error.status_code, f"{error.detail}.", headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        log.error("unexpected", exc_info=error)
        return _problem(500, "Something went wrong here; the log of the service says what.")


def _problem(
    status: int, detail: str, retry: int | None = None, headers: Any = None
) -> JSONResponse:
    titles = {400: "Bad request", 401: "No token", 403: "Forbidden", 404: "Not found",
              408: "Too slow", 409: "Busy", 413: "Too large", 415: "Unknown format",
              422: "Cannot be used", 429: "Too many",
              503: "Unavailable", 504: "Too slow"}  # fmt: skip
    sent = dict(headers or {})
    if retry is not None:
        sent["Retry-After"] = str(retry)
    if status == 401:
        sent["WWW-Authenticate"] = "Bearer"
    content = Problem(title=titles.get(status, "Problem"), status=status, detail=detail)
    return JSONResponse(content.model_dump(), status, sent, "application/problem+json")


def _first(errors: Any) -> str:
    """The first thing that is wrong, in words."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return f"{where}: {first['msg']}."

"""The FastAPI application: routes of the API, the page and the API docs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from starlette.types import Lifespan
from swagger_ui_bundle import swagger_ui_path

from coda_prompt import __version__
from coda_prompt.learner.predict import check_rule, ranked
from coda_prompt.serve import downloads, editing, schemas
from coda_prompt.serve.access import AccessMiddleware, AccessPolicy
from coda_prompt.serve.editing import CurrentService
from coda_prompt.serve.metrics import Metrics, MetricsMiddleware
from coda_prompt.serve.problems import add_exception_handlers
from coda_prompt.serve.requests import Images, read_examples, read_image, read_images
from coda_prompt.serve.service import Answered, Job, Service
from coda_prompt.serve.uploads import Example, RequestError, check_total_pixels, make_preview
from coda_prompt.statistics.unknown import DEFAULT_RATE, UnknownRule

PREDICT_TIMEOUT = 30.0
"""Seconds after which a prediction request gets status 504."""
PAGE = resources.files("coda_prompt") / "serve" / "page"

api = APIRouter(prefix="/v1", responses=schemas.PROBLEMS)
pages = APIRouter()
MODEL_ROUTERS = (api, editing.api, downloads.api)
"""Routes of each model; `pages` has those of the service."""


class PageFiles(StaticFiles):
    """Files of the page. Browsers ask for each file again, so versions never mix."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def make_app(services: Mapping[str, Service], policy: AccessPolicy | None = None) -> FastAPI:
    """Make the HTTP application of one or more models.

    Args:
        services: Each model by its name. The first has the routes `/` and `/v1/...`, each other
            one `/models/NAME/` and `/models/NAME/v1/...`.
        policy: Who may use the service.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = [asyncio.create_task(each.follow_folder()) for each in services.values()]
        yield
        for task in following:
            task.cancel()
        for service in services.values():
            await service.close()

    paths = {name: f"/models/{name}/" if number else "/" for number, name in enumerate(services)}
    app, *others = (
        _make_model_app(service, name, paths, lifespan) for name, service in services.items()
    )
    app.include_router(pages)
    app.mount("/page", PageFiles(directory=str(PAGE)), name="page")
    for other in others:
        app.mount(paths[other.state.name].rstrip("/"), other)
    app.mount("/docs/assets", StaticFiles(directory=str(swagger_ui_path)), name="docs")
    generate = app.openapi
    app.openapi = lambda: schemas.add_request_schemas(generate())  # type: ignore[method-assign]
    app.add_middleware(AccessMiddleware, policy=policy or AccessPolicy())
    app.add_middleware(MetricsMiddleware, metrics=app.state.metrics)
    return app


def _make_model_app(
    service: Service, name: str, paths: Mapping[str, str], lifespan: Lifespan[FastAPI]
) -> FastAPI:
    """Make the application of one model: its API and its page."""
    app = FastAPI(
        title="coda-prompt", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.service, app.state.metrics = service, Metrics(service)
    app.state.name, app.state.paths = name, paths
    add_exception_handlers(app)
    for router in MODEL_ROUTERS:
        app.include_router(router)
    app.add_api_route("/", index, response_class=HTMLResponse, include_in_schema=False)
    return app


def _page_file(name: str) -> HTMLResponse:
    return HTMLResponse((PAGE / name).read_text("utf-8"))


async def index() -> HTMLResponse:
    return _page_file("index.html")


def _get_metrics(request: Request) -> Metrics:
    return request.app.state.metrics


def _get_job(
    number: Annotated[str, PathParameter(description="Number of the job.")], service: CurrentService
) -> Job:
    if number not in service.jobs:
        raise RequestError(404, "There is no such job.")
    return service.jobs[number]


CurrentMetrics = Annotated[Metrics, Depends(_get_metrics)]
CurrentJob = Annotated[Job, Depends(_get_job)]


@api.post("/predict", response_model=schemas.Predictions, openapi_extra=schemas.PREDICT_BODY)
async def predict(
    images: Annotated[Images, Depends(read_images)],
    service: CurrentService,
    metrics: CurrentMetrics,
    top: Annotated[int, Query(ge=1, le=100, description="How many classes to return.")] = 5,
    unknown: Annotated[
        Literal["auto"] | None, Query(description="Reject images unlike the learned classes.")
    ] = None,
    unknown_rate: Annotated[
        float,
        Query(ge=1e-6, lt=1, description="Share of images of learned classes rejected by mistake."),
    ] = DEFAULT_RATE,
    unknown_below: Annotated[
        float, Query(ge=0, le=1, description="Reject images with a lower probability.")
    ] = 0.0,
) -> dict[str, Any]:
    """Predict the classes of one or more images.

    With `unknown=auto`, images that are not typical of the learned classes are unknown.
    """
    rule = UnknownRule.parse(unknown, unknown_rate, unknown_below)
    check_rule(service.current.model, rule)

    async def answer() -> list[Answered]:
        await asyncio.to_thread(check_total_pixels, images)
        decoded = await asyncio.gather(
            *(asyncio.to_thread(service.decode, content, name) for name, content in images)
        )
        return await service.batcher.run(decoded)

    with service.batcher.admit(len(images)):
        try:
            answers = await asyncio.wait_for(answer(), PREDICT_TIMEOUT)
        except asyncio.TimeoutError:
            detail = f"There was no prediction within {PREDICT_TIMEOUT:g} seconds."
            raise RequestError(504, detail) from None
    metrics.images.inc(len(answers))
    predictions = [
        ranked(each.version.classes, each.answer, top, rule).as_dict() for each in answers
    ]
    return {"version": answers[0].version.name, "predictions": predictions}


@api.post("/explain", response_model=schemas.ExplanationAnswer, openapi_extra=schemas.PREDICT_BODY)
async def explain(
    image: Annotated[tuple[str, bytes], Depends(read_image)], service: CurrentService
) -> dict[str, Any]:
    """Explain the prediction for one image: nearest classes, and the weights of the prompts."""
    with service.batcher.admit(1):
        version, explanation = await asyncio.to_thread(service.explain, image[1])
    return {"version": version.name, **dataclasses.asdict(explanation)}


@api.post(
    "/preview",
    response_class=Response,
    openapi_extra=schemas.PREDICT_BODY,
    responses={200: {"content": {"image/png": {}}, "description": "The image."}},
)
async def preview(
    image: Annotated[tuple[str, bytes], Depends(read_image)], service: CurrentService
) -> Response:
    """Return an image as a PNG of at most 512 x 512 pixels, for files that browsers cannot show."""
    name, content = image
    with service.batcher.admit(1):
        preview = await asyncio.to_thread(make_preview, content, name)
    return Response(preview, media_type="image/png")


@api.post(
    "/learn", status_code=202, response_model=schemas.JobState, openapi_extra=schemas.LEARN_BODY
)
async def learn(
    examples: Annotated[list[Example], Depends(read_examples)], service: CurrentService
) -> schemas.JobState:
    """Start a lesson; the service keeps answering with the current version while it trains."""
    return service.start_lesson(examples)


@api.get("/jobs/{number}")
async def job(job: CurrentJob) -> schemas.JobState:
    """Return the state of a lesson."""
    return job


@api.get(
    "/jobs/{number}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "States of the lesson."}},
)
async def job_events(job: CurrentJob, service: CurrentService) -> StreamingResponse:
    """Stream the state of a lesson as server-sent events, one for each change."""
    return _event_stream(service.states(job))


@api.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "States."}},
)
async def events(service: CurrentService) -> StreamingResponse:
    """Stream the version and the newest lesson as server-sent events, one for each change."""
    return _event_stream(service.states())


def _event_stream(states: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for state in states:
            yield f"data: {json.dumps(state)}\n\n"

    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


@api.get("/classes", response_model=schemas.Classes)
async def classes(service: CurrentService) -> dict[str, Any]:
    """List the learned classes."""
    return {"version": service.current.name, "classes": service.current.classes}


@api.get("/model", response_model=schemas.ModelInfo)
async def model(service: CurrentService, request: Request) -> dict[str, Any]:
    """Describe the model. This also starts the learning process, so that lessons are fast."""
    service.process.warm_up()
    version, state = service.current, request.app.state
    return {
        "version": version.name,
        "method": version.classifier.method_name,
        "backbone": version.classifier.backbone_name,
        "input": service.encoder.kind,
        "tasks": version.classifier.tasks_,
        "can_undo": version.classifier.can_undo,
        "can_redo": version.classifier.can_redo,
        "can_reject": version.missing_images == 0,
        "missing_images": version.missing_images,
        "learning": service.learning,
        "temporary": service.temporary,
        "models": [
            {"name": name, "path": path, "current": name == state.name}
            for name, path in state.paths.items()
        ],
    }


@pages.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Answer `ok`, for load balancers and monitors."""
    return "ok\n"


@pages.get("/metrics", response_class=PlainTextResponse)
async def metrics(metrics: CurrentMetrics) -> PlainTextResponse:
    """Return counts and durations of requests in the format of Prometheus."""
    return PlainTextResponse(generate_latest(metrics.registry))


@pages.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs() -> HTMLResponse:
    return _page_file("docs.html")

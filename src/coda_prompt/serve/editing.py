"""Routes that edit what was taught; each edit is a new version, written before the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from coda_prompt.errors import CorruptFile
from coda_prompt.learner import reports
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.edit import check_mergeable
from coda_prompt.learner.folder import decode_model
from coda_prompt.serve import schemas
from coda_prompt.serve.learning import ExampleDataset
from coda_prompt.serve.requests import json_reader, read_examples
from coda_prompt.serve.service import Service
from coda_prompt.serve.uploads import Example, RequestError, check_label

api = APIRouter(prefix="/v1", responses=schemas.PROBLEMS)


class Forgotten(schemas.Classes):
    images: int = Field(description="Images the class was taught with.")
    versions: int = Field(description="Earlier versions that were rewritten.")
    remains: str = Field(description="What of the class remains in sums over all classes.")


RenameBody = Annotated[schemas.RenameRequest, Depends(json_reader(schemas.RenameRequest))]
MergeBody = Annotated[
    schemas.MergeClassesRequest, Depends(json_reader(schemas.MergeClassesRequest))
]
ForgetBody = Annotated[schemas.ForgetRequest, Depends(json_reader(schemas.ForgetRequest))]
StoredVersion = Annotated[int, Query(ge=0, description="Number of a stored version.")]


def get_service(request: Request) -> Service:
    """Return the service of the application."""
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(get_service)]


def classes_of(service: Service) -> dict[str, Any]:
    """Return the answer of routes that change the model."""
    return {"version": service.current.name, "classes": service.current.classes}


async def _edit(service: Service, change: Callable[[ContinualClassifier], Any]) -> dict[str, Any]:
    await service.edit(change)
    return classes_of(service)


@api.post(
    "/rename",
    response_model=schemas.Classes,
    openapi_extra=schemas.json_body(schemas.RenameRequest),
)
async def rename(body: RenameBody, service: CurrentService) -> dict[str, Any]:
    """Rename a class."""
    new = check_label(body.new)
    return await _edit(service, lambda classifier: classifier.rename(body.old, new))


@api.post(
    "/merge-classes",
    response_model=schemas.Classes,
    openapi_extra=schemas.json_body(schemas.MergeClassesRequest),
)
async def merge_classes(body: MergeBody, service: CurrentService) -> dict[str, Any]:
    """Merge classes into one."""
    into = check_label(body.into)
    return await _edit(service, lambda classifier: classifier.merge_classes(body.classes, into))


@api.post(
    "/forget", response_model=Forgotten, openapi_extra=schemas.json_body(schemas.ForgetRequest)
)
async def forget(body: ForgetBody, service: CurrentService) -> dict[str, Any]:
    """Remove a class from the model and all its versions; this cannot be undone."""
    if not body.confirm:
        raise RequestError(422, "Set `confirm` to true: a forgotten class cannot be restored.")
    forgotten = await service.edit(lambda classifier: classifier.forget(body.name), forgets=True)
    return {**dataclasses.asdict(forgotten), **classes_of(service)}


@api.post("/relabel", response_model=schemas.Classes, openapi_extra=schemas.LEARN_BODY)
async def relabel(
    examples: Annotated[list[Example], Depends(read_examples)],
    service: CurrentService,
    taught_as: Annotated[str, Query(description="The class the images were taught as.")],
) -> dict[str, Any]:
    """Move images that were taught as the wrong class to the class they are labelled with."""
    data = ExampleDataset(examples)
    return await _edit(service, lambda classifier: classifier.relabel(data, taught_as=taught_as))


@api.post(
    "/merge",
    response_model=schemas.Classes,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def merge(
    request: Request,
    service: CurrentService,
    count_twice: Annotated[
        bool, Query(description="Join models that have learned the same images.")
    ] = False,
) -> dict[str, Any]:
    """Join another model into this one: the body is its `model.safetensors`."""
    content, name = await request.body(), "The uploaded model"
    try:
        description, _ = await asyncio.to_thread(decode_model, content, name)
        check_mergeable(service.current.classifier.model, description)

        def change(classifier: ContinualClassifier) -> None:
            classifier.join(content, name, count_twice=count_twice)

        return await _edit(service, change)
    except CorruptFile as error:
        raise RequestError(422, str(error)) from error


@api.post("/undo", response_model=schemas.Classes)
async def undo(
    service: CurrentService,
    to: Annotated[int | None, Query(ge=0, description="Number of a version.")] = None,
) -> dict[str, Any]:
    """Restore the version before the newest lesson or edit, or version `to`."""
    await service.restore(to)
    return classes_of(service)


@api.post("/redo", response_model=schemas.Classes)
async def redo(service: CurrentService) -> dict[str, Any]:
    """Restore the version that was undone last."""
    await service.restore(redo=True)
    return classes_of(service)


@api.get("/history")
async def history(service: CurrentService) -> reports.ModelHistory:
    """List the lessons with accuracy and cost for older classes, the edits and the versions."""
    return await service.read(lambda classifier: classifier.history())


@api.get("/diff")
async def diff(service: CurrentService, version: StoredVersion) -> reports.Difference:
    """Show how a stored version (first) and the current one (second) differ."""

    def compare(_: ContinualClassifier) -> reports.Difference:
        first = reports.read_named(f"{service.folder.path}@{version}")
        return reports.difference(first, reports.read_named(str(service.folder.path)))

    return await service.read(compare)

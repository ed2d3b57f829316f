"""Routes that return what the model has learned: accuracy, a model folder and an ONNX file."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import zipfile
from typing import Any

from fastapi import APIRouter, Response

from coda_prompt.errors import MissingExtra
from coda_prompt.learner import held_out
from coda_prompt.learner.export import onnx_graph
from coda_prompt.learner.folder import MODEL, copies
from coda_prompt.learner.folder import Version as FileVersion
from coda_prompt.serve import schemas
from coda_prompt.serve.editing import CurrentService
from coda_prompt.serve.service import Version
from coda_prompt.serve.uploads import RequestError

FOLDER = "model"
"""Name of the folder in the zip file."""

api = APIRouter(prefix="/v1", responses=schemas.PROBLEMS)


def _file_response(media_type: str) -> dict[str, Any]:
    """Return the OpenAPI entry of a route that answers with a file."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {"response_class": Response, "responses": {200: {"content": content}}}


def _attachment(content: bytes, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return Response(content, media_type=media_type, headers=headers)


@api.get("/accuracy", response_model=schemas.HeldOutAccuracy)
async def accuracy(service: CurrentService) -> dict[str, Any]:
    """Return the accuracy of each class and the most confused pairs, on held-out images.

    The images were held out in the lessons that taught their classes, and were classified right
    after these lessons.
    """
    version = service.current
    summary = held_out.summarize(version.classifier.model.tasks)
    return {"version": version.name, **dataclasses.asdict(summary)}


@api.get("/model.zip", **_file_response("application/zip"))
async def model_folder(service: CurrentService) -> Response:
    """Download the model folder, without earlier versions and without the backbone."""
    version = await service.after_edits()
    content = await asyncio.to_thread(_zip, version)
    return _attachment(content, "application/zip", f"model-{version.name}.zip")


@api.get("/model.onnx", **_file_response("application/octet-stream"))
async def model_onnx(service: CurrentService) -> Response:
    """Download the model with its backbone as one ONNX graph, from pixels to probabilities."""
    async with service.exporting:
        version = await service.after_edits()
        version.model  # noqa: B018 (refuses a model without classes)
        try:
            content = await asyncio.to_thread(onnx_graph, version.classifier.model)
        except MissingExtra as error:
            raise RequestError(503, str(error)) from error
    return _attachment(content, "application/octet-stream", f"model-{version.name}.onnx")


def _files(version: Version) -> dict[str, bytes]:
    """Return the content of each file of a model folder."""
    model = version.classifier.model
    description = model.description()
    content = FileVersion.of(description, model.arrays()).content
    return {MODEL: content, **copies(description)}


def _zip(version: Version) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in _files(version).items():
            archive.writestr(f"{FOLDER}/{name}", content)
    return buffer.getvalue()

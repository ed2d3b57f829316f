"""Routes that return what the model has learned: accuracy, a model folder and an ONNX file."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from coda_prompt.learner import held_out
from coda_prompt.learner.folder import MODEL, copies
from coda_prompt.learner.folder import Version as FileVersion
from coda_prompt.serve import schemas
from coda_prompt.serve.editing import CurrentService
from coda_prompt.serve.learning_process import MAX_REASON_LENGTH
from coda_prompt.serve.service import Service, Version
from coda_prompt.serve.uploads import RequestError

EXPORT_TIMEOUT = 900.0
"""Seconds after which an export to ONNX gets status 504."""
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
        content = await _export(service, version)
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


async def _export(service: Service, version: Version) -> bytes:
    """Run `coda export` in a process of its own: tracing a network disturbs predictions."""
    with tempfile.TemporaryDirectory(prefix="coda-export-") as temporary:
        folder, out = Path(temporary) / FOLDER, Path(temporary) / "model.onnx"
        folder.mkdir()
        for name, content in (await asyncio.to_thread(_files, version)).items():
            (folder / name).write_bytes(content)
        parts = [] if service.backbone is None else ["--backbone", service.backbone]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coda_prompt", "export", str(folder), str(out), *parts,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = await asyncio.wait_for(process.communicate(), EXPORT_TIMEOUT)
        except asyncio.TimeoutError:
            detail = f"The export took more than {EXPORT_TIMEOUT:g} seconds."
            raise RequestError(504, detail) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            reason = errors.decode("utf-8", "replace")[-MAX_REASON_LENGTH:].strip()
            raise RequestError(503, f"The export failed. {reason}")
        return out.read_bytes()

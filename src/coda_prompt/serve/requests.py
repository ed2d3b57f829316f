"""Read images from request bodies: JSON with base64, or a multipart form with files."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from coda_prompt.serve import uploads
from coda_prompt.serve.problems import validation_message
from coda_prompt.serve.schemas import LearnRequest, PredictRequest
from coda_prompt.serve.uploads import Example, RequestError, check_label

Body = TypeVar("Body", bound=BaseModel)


async def read_images(request: Request) -> list[tuple[str, bytes]]:
    """Return the images to predict: a name for messages and the file content of each."""
    if _is_json(request):
        body = await _read_json(request, PredictRequest)
        names = [f"image {number}" for number in range(1, len(body.images) + 1)]
        images = zip(names, body.images, strict=True)
        return [(name, uploads.decode_base64(image.data, name)) for name, image in images]
    async with _read_form(request, uploads.MAX_IMAGES_PREDICT) as form:
        files = _files(form, "images")
        return [(f"image {number}", await file.read()) for number, file in enumerate(files, 1)]


async def read_examples(request: Request) -> list[Example]:
    """Return the labelled images to learn."""
    if _is_json(request):
        body = await _read_json(request, LearnRequest)
        return [
            Example(check_label(image.label), uploads.decode_base64(image.data, f"image {number}"))
            for number, image in enumerate(body.images, 1)
        ]
    async with _read_form(request, uploads.MAX_IMAGES_LEARN) as form:
        if form.get("archive") is not None:
            archive = _files(form, "archive")[0]
            return await asyncio.to_thread(uploads.read_zip, await archive.read())
        files = _files(form, "images")
        labels = _labels(form, len(files))
        contents = [await file.read() for file in files]
        return [Example(*pair) for pair in zip(labels, contents, strict=True)]


def _is_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in ("application/json", "multipart/form-data"):
        raise RequestError(415, "Send application/json or multipart/form-data.")
    return media_type == "application/json"


async def _read_json(request: Request, model: type[Body]) -> Body:
    try:
        content = await asyncio.to_thread(json.loads, await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "The body is not valid JSON.") from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise RequestError(422, validation_message(error.errors())) from error


@contextlib.asynccontextmanager
async def _read_form(request: Request, max_files: int) -> AsyncIterator[FormData]:
    try:
        form = await request.form(max_files=max_files, max_fields=max_files + 10)
    except HTTPException as error:
        raise RequestError(400, f"The form cannot be read ({error.detail}).") from error
    try:
        yield form
    finally:
        await form.close()


def _files(form: FormData, field: str) -> list[UploadFile]:
    files = [file for file in form.getlist(field) if isinstance(file, UploadFile)]
    if not files:
        raise RequestError(422, f"The form has no file in the field '{field}'.")
    return files


def _labels(form: FormData, images: int) -> list[str]:
    """Return one label per image; a single label applies to all."""
    labels = []
    for label in form.getlist("labels"):
        if not isinstance(label, str):
            raise RequestError(422, "Labels must be text fields, not files.")
        labels.append(check_label(label))
    if len(labels) == 1:
        labels *= images
    if len(labels) != images:
        problem = f"The form has {images} images and {len(labels)} labels; send one per image."
        raise RequestError(422, problem)
    return labels

"""Read request bodies: JSON, or a multipart form with files. They are limited before parsing.

Images are held in memory and never written to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from coda_prompt.serve import schemas, uploads
from coda_prompt.serve.problems import validation_message
from coda_prompt.serve.uploads import Example, RequestError, check_label

MAX_JSON_VALUES = 50_000
"""Values in a JSON body: each takes much more memory than its text."""
MAX_ZIP_RATIO = 1032
"""Bytes that deflate packs into one, at most."""
JSON, FORM = "application/json", "multipart/form-data"

Images = list[tuple[str, bytes]]
"""A name for messages and the file content of each image."""
Body = TypeVar("Body", bound=schemas.Body)


class _MemoryParser(MultiPartParser):
    """Holds files in memory; by default, those above 1 MiB are written to disk."""

    spool_max_size = max_file_size = uploads.MAX_UPLOAD_BYTES  # two versions of starlette


def json_reader(model: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """Return the dependency that reads a JSON body."""

    async def read(request: Request) -> Body:
        _media_type(request, JSON)
        return await _read_json(request, model)

    return read


async def read_images(request: Request) -> Images:
    """Return the images to predict."""
    if _media_type(request, JSON, FORM) == JSON:
        images = (await _read_json(request, schemas.PredictRequest)).images
        return await asyncio.to_thread(_decoded, images)
    async with _read_form(request, uploads.MAX_IMAGES_PREDICT) as form:
        files = _files(request, form, "images")
        return [(f"image {number}", await file.read()) for number, file in enumerate(files, 1)]


async def read_image(
    request: Request, images: Annotated[Images, Depends(read_images)]
) -> tuple[str, bytes]:
    """Return the only image of a request."""
    if len(images) != 1:
        purpose = request.url.path.rpartition("/")[2]
        raise RequestError(422, f"Send one image to {purpose}, not {len(images)}.")
    return images[0]


async def read_examples(request: Request) -> list[Example]:
    """Return the labelled images to learn."""
    if _media_type(request, JSON, FORM) == JSON:
        labelled = (await _read_json(request, schemas.LearnRequest)).images
        labels = [check_label(image.label) for image in labelled]
        decoded = await asyncio.to_thread(_decoded, labelled)
        return [Example(label, each) for label, (_, each) in zip(labels, decoded, strict=True)]
    async with _read_form(request, uploads.MAX_IMAGES_LEARN) as form:
        if form.get("archive") is not None:
            archive = await _files(request, form, "archive")[0].read()
            most = min(MAX_ZIP_RATIO * len(archive), uploads.MAX_UNZIPPED_BYTES)
            _hold(request, most)
            examples = await asyncio.to_thread(uploads.read_zip, archive)
            _hold(request, sum(len(example.content) for example in examples) - most)
            return examples
        files = _files(request, form, "images")
        labels = _labels(form, len(files))
        contents = [await file.read() for file in files]
        return [Example(*pair) for pair in zip(labels, contents, strict=True)]


def _decoded(images: Sequence[schemas.ImageData]) -> Images:
    named = ((f"image {number}", image.data) for number, image in enumerate(images, 1))
    return [(name, uploads.decode_base64(data, name)) for name, data in named]


def _media_type(request: Request, *accepted: str) -> str:
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in accepted:
        raise RequestError(415, f"Send {' or '.join(accepted)}.")
    return media_type


async def _read_json(request: Request, model: type[Body]) -> Body:
    content = await request.body()
    _hold(request, 2 * len(content))  # the values, and the files they encode
    return await asyncio.to_thread(_parse_json, content, model)


def _hold(request: Request, size: int) -> None:
    """Count bytes that are unpacked from a body, before they are; negative: they were not."""
    request.state.body.hold(size)


def _parse_json(content: bytes, model: type[Body]) -> Body:
    """Parse a body whose number of values is counted first: each follows one of `,`, `[`, `{`."""
    if sum(content.count(character) for character in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise RequestError(413, f"The body has more than {MAX_JSON_VALUES:,} values.")
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(400, "The body is not valid JSON.") from error
        raise RequestError(422, validation_message(first)) from error


@contextlib.asynccontextmanager
async def _read_form(request: Request, max_files: int) -> AsyncIterator[FormData]:
    parser = _MemoryParser(
        request.headers, request.stream(), max_files=max_files, max_fields=max_files + 10
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise RequestError(400, f"The form cannot be read ({error.message}).") from error
    try:
        yield form
    finally:
        await form.close()


def _files(request: Request, form: FormData, field: str) -> list[UploadFile]:
    files = [file for file in form.getlist(field) if isinstance(file, UploadFile)]
    if not files:
        raise RequestError(422, f"The form has no file in the field '{field}'.")
    _hold(request, sum(file.size or 0 for file in files))  # they are copied when they are read
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

"""Checks of uploaded images, labels and zip files. Uploads are not trusted."""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from coda_prompt.console import class_name
from coda_prompt.errors import BadImage, CodaError
from coda_prompt.images.reading import (
    FORMATS,
    SUFFIXES,
    convert_channels,
    is_heic,
    open_image,
    supports_heic,
)

MAX_UPLOAD_BYTES, MAX_EDIT_BYTES = 64 * 2**20, 2**20
"""Bodies of requests with and without files."""
MAX_IMAGES_PREDICT, MAX_IMAGES_LEARN = 64, 5_000
"""Images per request."""
MAX_PIXELS, MAX_TOTAL_PIXELS = 25_000_000, 200_000_000
"""Per image, and for all images of a prediction request, which are decoded at the same time."""
MAX_ZIP_ENTRIES, MAX_UNZIPPED_BYTES = 10_000, 256 * 2**20
MAX_LABEL_LENGTH = 100
PREVIEW_SIZE = 512
"""Pixels of the longer side of a preview."""


class RequestError(CodaError):
    """A request that is refused with an HTTP status."""

    def __init__(self, status: int, detail: str, *, retry_after: int | None = None) -> None:
        """`retry_after`: seconds after which the client may try again."""
        super().__init__(detail)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Example:
    """An image file to learn."""

    label: str
    content: bytes


def decode_image(content: bytes, name: str, min_side: int | None = None) -> Image.Image:
    """Decode an image after checking its size, which is read from the header alone."""
    _count_pixels(content, name)
    return open_image(content, min_side, name)


def make_preview(content: bytes, name: str) -> bytes:
    """Return an image file as a small PNG."""
    image = decode_image(content, name, PREVIEW_SIZE)
    preview = convert_channels(image, 3)
    preview.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE))
    buffer = io.BytesIO()
    preview.save(buffer, "PNG")
    return buffer.getvalue()


def check_total_pixels(images: Sequence[tuple[str, bytes]]) -> None:
    """Refuse images (names and contents) that have too many pixels together."""
    if len(images) * MAX_PIXELS <= MAX_TOTAL_PIXELS:
        return  # decode_image checks each image
    total = sum(_count_pixels(content, name) for name, content in images)
    if total > MAX_TOTAL_PIXELS:
        detail = f"The images have {total:,} pixels together; the limit is {MAX_TOTAL_PIXELS:,}."
        raise RequestError(413, detail)


def _count_pixels(content: bytes, name: str) -> int:
    heic = is_heic(content)
    formats = (*FORMATS, "HEIF") if heic and supports_heic() else FORMATS
    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            pixels: int = image.width * image.height
    except Image.DecompressionBombError as error:
        raise BadImage(name, f"it has more than {MAX_PIXELS:,} pixels") from error
    except Exception as error:  # decoders raise anything for malformed content
        problem = "it is not an image that can be read"
        if heic and not supports_heic():
            problem = "to read HEIC, the service needs: pip install 'coda-prompt[heic]'"
        raise BadImage(name, problem) from error
    if pixels > MAX_PIXELS:
        raise BadImage(name, f"it has {pixels:,} pixels; the limit is {MAX_PIXELS:,}")
    return pixels


def decode_base64(text: bytes, name: str) -> bytes:
    """Decode base64 with or without the prefix of a data URL."""
    _, _, content = text.rpartition(b",")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(422, f"{name}: not valid base64.") from error


def check_label(label: str) -> str:
    """Return the class name that a label means, as `class_name` spells it."""
    name = class_name(label)
    if len(name) > MAX_LABEL_LENGTH:
        detail = f"'{name[:MAX_LABEL_LENGTH]}…' cannot be the name of a class"
        raise RequestError(422, f"{detail}: use 1 to {MAX_LABEL_LENGTH} printable characters.")
    return name


def read_zip(content: bytes) -> list[Example]:
    """Return the images of a zip file with one folder per class. Nothing is written to disk."""
    if _declared_entries(content) > MAX_ZIP_ENTRIES:
        raise RequestError(413, f"The zip has more than {MAX_ZIP_ENTRIES} entries.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            examples = list(_zip_examples(archive))
    except (
        zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError,
        ValueError,
    ) as error:  # fmt: skip
        raise RequestError(422, f"The zip cannot be read ({error}).") from error
    if not examples:
        raise RequestError(422, "The zip has no image in a folder named after its class.")
    return examples


def _zip_examples(archive: zipfile.ZipFile) -> Iterator[Example]:
    entries = archive.infolist()
    if len(entries) > MAX_ZIP_ENTRIES:
        raise RequestError(413, f"The zip has more than {MAX_ZIP_ENTRIES} entries.")
    unzipped = 0
    for number, entry in enumerate(_zip_images(entries), 1):
        if number > MAX_IMAGES_LEARN:
            raise RequestError(413, f"The zip has more than {MAX_IMAGES_LEARN} images.")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise RequestError(422, "The zip must be compressed with deflate or not at all.")
        unzipped += entry.file_size
        if unzipped > MAX_UNZIPPED_BYTES:
            raise RequestError(413, f"The zip unpacks to more than {MAX_UNZIPPED_BYTES:,} bytes.")
        with archive.open(entry) as file:
            content = file.read(entry.file_size + 1)
        if len(content) != entry.file_size:
            raise RequestError(422, f"{entry.filename}: its size in the zip is wrong.")
        yield Example(check_label(entry.filename.split("/")[-2]), content)


def _zip_images(entries: Iterable[zipfile.ZipInfo]) -> Iterator[zipfile.ZipInfo]:
    for entry in entries:
        parts = entry.filename.split("/")
        if ".." in parts or entry.filename.startswith("/") or "\\" in entry.filename:
            raise RequestError(422, f"The zip has a path outside of itself ({entry.filename!r}).")
        hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
        suffix = "." + parts[-1].rpartition(".")[2].lower()
        if not entry.is_dir() and len(parts) > 1 and suffix in SUFFIXES and not hidden:
            yield entry


def _declared_entries(content: bytes) -> int:
    """Read the number of entries from the end record, before any entry is parsed.

    Zip files with 65,535 entries or more declare 65,535.
    """
    start = content.rfind(b"PK\x05\x06")
    return int.from_bytes(content[start + 10 : start + 12], "little") if start >= 0 else 0

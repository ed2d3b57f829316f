"""What strangers send: bytes that are checked before they become images, names that stay names."""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from coda_prompt.data.folders import is_valid_class_name
from coda_prompt.data.images import FORMATS, SUFFIXES, open_image
from coda_prompt.errors import BadImage, CodaError

MOST_IN_A_REQUEST = 64 * 2**20
"""Bytes of a request's body."""
MOST_TO_PREDICT, MOST_TO_LEARN = 64, 5_000
MOST_PIXELS, MOST_PIXELS_IN_A_REQUEST = 25_000_000, 200_000_000
"""Of an image, and of all to be predicted together: they are decoded at the same time."""
SURELY_FEW = MOST_PIXELS_IN_A_REQUEST // MOST_PIXELS
"""Images that cannot be too many pixels together, since each is looked at by itself."""
MOST_ENTRIES, MOST_UNPACKED = 10_000, 256 * 2**20
LONGEST_NAME = 100


class Refused(CodaError):
    """A request that cannot be met; `status` says why in HTTP's terms."""

    def __init__(self, status: int, problem: str, *, retry: int | None = None) -> None:
        super().__init__(problem)
        self.status, self.retry = status, retry


@dataclass(frozen=True)
class Example:
    label: str
    content: bytes


def image_of(content: bytes, name: str, min_side: int | None = None) -> Image.Image:
    """The decoded image; its size is known, and refused, before its pixels are there."""
    _pixels(content, name)
    return open_image(content, min_side, name)


def check_pixels(contents: Iterable[tuple[str, bytes]]) -> None:
    """Refuse names and contents that would be too much together."""
    total = sum(_pixels(content, name) for name, content in contents)
    if total > MOST_PIXELS_IN_A_REQUEST:
        most = f"{MOST_PIXELS_IN_A_REQUEST:,}"
        raise Refused(413, f"The images have {total:,} pixels together, more than {most}.")


def _pixels(content: bytes, name: str) -> int:
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as peeked:
            pixels: int = peeked.width * peeked.height
    except Image.DecompressionBombError as error:
        raise BadImage(name, f"it has more than the {MOST_PIXELS:,} pixels taken here") from error
    except Exception as error:  # a decoder may raise anything on bytes of strangers
        raise BadImage(name, "it is not an image that can be read") from error
    if pixels > MOST_PIXELS:
        raise BadImage(name, f"{pixels:,} pixels are more than the {MOST_PIXELS:,} taken here")
    return pixels


def from_base64(text: str, name: str) -> bytes:
    """Of a data URL or of its content alone."""
    _, _, content = text.rpartition(",")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(422, f"{name}: it is not base64.") from error


def checked_label(label: str) -> str:
    name = label.strip()
    if not is_valid_class_name(name) or len(name) > LONGEST_NAME:
        problem = f"{label[:LONGEST_NAME]!r} cannot be the name of a class"
        raise Refused(422, f"{problem}: take 1 to {LONGEST_NAME} letters.")
    return name


def from_zip(content: bytes) -> list[Example]:
    """The images of a zip of class folders; a name in it is a class's, never a place on disk."""
    examples: list[Example] = []
    unpacked = 0
    if _entries_told(content) > MOST_ENTRIES:
        raise Refused(413, f"The zip has more than {MOST_ENTRIES} entries.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_ENTRIES:
                raise Refused(413, f"The zip has {len(entries)} entries, more than {MOST_ENTRIES}.")
            for entry in _images(entries):
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise Refused(422, "The zip is not compressed in the usual way (deflate).")
                unpacked += entry.file_size
                if unpacked > MOST_UNPACKED:
                    raise Refused(413, f"The zip unpacks to more than {MOST_UNPACKED:,} bytes.")
                with archive.open(entry) as file:
                    held = file.read(entry.file_size + 1)
                if len(held) != entry.file_size:
                    raise Refused(422, f"{entry.filename}: its size in the zip is wrong.")
                label = checked_label(entry.filename.split("/")[-2])
                examples.append(Example(label, held))
                if len(examples) > MOST_TO_LEARN:
                    raise Refused(413, f"The zip has more than {MOST_TO_LEARN} images.")
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError,
            ValueError) as error:  # fmt: skip
        raise Refused(422, f"The zip cannot be read ({error}).") from error
    if not examples:
        raise Refused(422, "The zip has no image in a folder named like its class.")
    return examples


def _entries_told(content: bytes) -> int:
    """What the record at the zip's end says, before its entries are read; large zips say 65,535."""
    start = content.rfind(b"PK\x05\x06")
    return int.from_bytes(content[start + 10 : start + 12], "little") if start >= 0 else 0


def _images(entries: Iterable[zipfile.ZipInfo]) -> Iterable[zipfile.ZipInfo]:
    for entry in entries:
        parts = entry.filename.split("/")
        if ".." in parts or entry.filename.startswith("/") or "\\" in entry.filename:
            raise Refused(422, f"The zip names a path outside of itself ({entry.filename!r}).")
        hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
        suffix = "." + parts[-1].rpartition(".")[2].lower()
        if not entry.is_dir() and len(parts) > 1 and suffix in SUFFIXES and not hidden:
            yield entry

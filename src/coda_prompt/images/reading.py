"""From an image file to an upright image of 8-bit channels."""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from coda_prompt.errors import BadImage, BadOption

# Tried in this order. Pillow's other decoders start programs (EPS) or are rare.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    (
        *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
        *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
    )
)
HEIC_SUFFIXES = frozenset((".heic", ".heif"))
"""Read if the extra `heic` is installed."""
HEIC_BRANDS = frozenset(
    (
        *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
        *(b"mif1", b"msf1"),
    )
)
"""What follows `ftyp` at the start of a HEIC file."""
MAX_PIXELS = 89_478_485  # 256 MiB as RGB; Pillow warns of a decompression bomb from here on
FULL_SIZE = "full size"
"""Key in `Image.info` of the size before a JPEG was decoded at reduced size."""

_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
SUPPORTED_MODES = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "F")
).union(_SIXTEEN_BIT)
_ORIENTATION_TAG = 0x0112
_EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@functools.cache
def supports_heic() -> bool:
    """Return whether HEIC files can be read; registers the decoder if it is installed."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Return how names of images that can be read end."""
    return SUFFIXES | HEIC_SUFFIXES if supports_heic() else SUFFIXES


def heic_hint(names: Iterable[object]) -> str | None:
    """Return how to read the HEIC files among these names; None if there is none to install."""
    count = sum(str(name).lower().endswith(tuple(HEIC_SUFFIXES)) for name in names)
    if not count or supports_heic():
        return None
    files = "a HEIC file is" if count == 1 else f"{count} HEIC files are"
    return f"{files} skipped; to read them: pip install 'coda-prompt[heic]'"


def open_image(
    file: str | os.PathLike[str] | bytes, min_side: int | None = None, name: str | None = None
) -> Image.Image:
    """Decode an image file and apply its EXIF orientation; of an animation, the first frame.

    Args:
        file: a path, or the content of a file.
        min_side: pixels the shorter side needs. A JPEG with at least twice as many is decoded at
            1/2, 1/4 or 1/8 of its size, which takes a fraction of the time.
        name: what error messages call the file; by default its path.

    Raises:
        BadImage: the file is missing, empty, damaged, too large or in an unsupported format.
    """
    path = name if isinstance(file, bytes) else file
    if not isinstance(file, bytes) and not os.path.isfile(file):  # a named pipe would block
        raise BadImage(path, "there is no such file", "Check the path.")
    if not (len(file) if isinstance(file, bytes) else os.path.getsize(file)):
        raise BadImage(path, "the file is empty")
    try:
        opened = io.BytesIO(file) if isinstance(file, bytes) else file
        Image.preinit()  # else a format before the file's own loads the decoders of all formats
        formats = (*FORMATS, "HEIF") if is_heic(file) and supports_heic() else FORMATS
        with Image.open(opened, formats=formats) as image:
            size = image.size
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise BadImage(path, f"{size} are more than the limit of {MAX_PIXELS:,}")
            if image.mode not in SUPPORTED_MODES:
                raise BadImage(path, f"its color mode {image.mode} cannot be converted to RGB")
            if min_side is not None:
                image.draft(None, (min_side, min_side))
            image.load()
            upright = apply_exif_orientation(image)
            turned = upright.size == image.size[::-1] != image.size
            upright.info[FULL_SIZE] = size[::-1] if turned else size
            return upright
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(path, f"it has more pixels than the limit of {MAX_PIXELS:,}") from error
    except UnidentifiedImageError as error:
        problem = f"it is in none of the formats {', '.join(FORMATS)}"
        raise BadImage(path, heic_hint([path]) or problem) from error
    except Exception as error:  # on damaged bytes a decoder may raise anything
        raise BadImage(path, f"it cannot be decoded ({error})") from error


def is_heic(file: str | os.PathLike[str] | bytes) -> bool:
    """Return whether a file starts as HEIC files do: others do not need its decoder."""
    if isinstance(file, bytes):
        start = file[:12]
    else:
        with open(file, "rb") as opened:
            start = opened.read(12)
    return start[4:8] == b"ftyp" and start[8:] in HEIC_BRANDS


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Rotate or mirror an image according to its EXIF tag.

    `ImageOps.exif_transpose` rewrites the EXIF data and fails where they are damaged.
    """
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error):
        orientation = None  # the pixels are good
    # Remaining metadata would rotate the image a second time.
    image.info = {key: image.info[key] for key in ("transparency",) if key in image.info}
    operation = _EXIF_TRANSPOSE.get(orientation) if isinstance(orientation, int) else None
    return image if operation is None else image.transpose(operation)


def convert_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert to RGB (3) or grey (1): transparency over white, more than 8 bits scaled to 8."""
    if channels not in (1, 3):
        problem = f"images have 1 or 3 channels, not {channels}"
        raise BadOption("the preprocessing", "channels", problem)
    mode = "RGB" if channels == 3 else "L"
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BIT:
        image = _to_eight_bit(np.asarray(image) / 257.0)
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        image = _to_eight_bit(values * 255.0 if values.max() <= 1.0 else values)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image if image.mode == mode else image.convert(mode)


def _to_eight_bit(values: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8))

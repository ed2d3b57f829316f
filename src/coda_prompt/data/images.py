"""From a file to the tensor a backbone sees: decoding, crops, flips, normalisation."""

from __future__ import annotations

import io
import math
import os
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from coda_prompt.errors import BadImage, BadOption, UnknownName
from coda_prompt.preprocessing import Preprocessing

# Tried in this order. Pillow's other decoders start programs (EPS) or are rare.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("avif", "bmp", "gif", "jfif", "jp2", "jpe", "jpeg", "jpg"),
        *("pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"),
    )
)
MAX_PIXELS = 89_478_485  # 256 MiB as RGB, where Pillow starts to warn of a decompression bomb

_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
SUPPORTED_MODES = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "F")
).union(_SIXTEEN_BIT)
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


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
        raise BadImage(path, "there is no such file")
    if not (len(file) if isinstance(file, bytes) else os.path.getsize(file)):
        raise BadImage(path, "the file is empty")
    try:
        opened = io.BytesIO(file) if isinstance(file, bytes) else file
        with Image.open(opened, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(
                    path,
                    f"{image.width} x {image.height} pixels are more than the limit of "
                    f"{MAX_PIXELS:,}",
                )
            if image.mode not in SUPPORTED_MODES:
                raise BadImage(path, f"its color mode {image.mode} cannot be converted to RGB")
            if min_side is not None:
                image.draft(None, (min_side, min_side))
            image.load()
            return apply_exif_orientation(image)
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(path, f"it is too large to decode ({error})") from error
    except UnidentifiedImageError as error:
        raise BadImage(path, f"it is in none of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # on damaged bytes a decoder may raise anything
        raise BadImage(path, f"it cannot be decoded ({error})") from error


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """As `ImageOps.exif_transpose`, which rewrites the EXIF data and fails on a damaged one."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error):
        orientation = None  # the pixels are good
    # What is left of the metadata would turn the image a second time.
    image.info = {key: image.info[key] for key in ("transparency",) if key in image.info}
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def convert_channels(image: Image.Image, channels: int) -> Image.Image:
    """The image as RGB (3) or grey (1): alpha over white, more than 8 bits scaled to 8."""
    if channels not in (1, 3):
        raise BadOption("the pixels", "channels", f"images have 1 or 3 channels, not {channels}")
    mode = "RGB" if channels == 3 else "L"
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BIT:
        image = _eight_bit(np.asarray(image) / 257.0)
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        image = _eight_bit(values * 255.0 if values.max() <= 1.0 else values)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(values: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Augmentation:
    """Random resized crop and horizontal flip."""

    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    flip: float = 0.5  # probability

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise BadOption(
                "the augmentation", "scale", f"{self.scale} is not 0 < low <= high <= 1"
            )
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise BadOption("the augmentation", "ratio", f"{self.ratio} is not 0 < low <= high")
        if not 0 <= self.flip <= 1:
            raise BadOption("the augmentation", "flip", f"{self.flip} is not a probability")


def view_generator(seed: int, task: int, epoch: int, sample: int) -> np.random.Generator:
    """The randomness of one view of one image, whoever computes it and when.

    Philox turns a counter into random numbers: the low word counts the draws of this view, the
    others name the view, so that no two views share a stream and none has to be skipped.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, sample, epoch, task]))


def training_view(
    image: Image.Image, pixels: Preprocessing, augmentation: Augmentation, rng: np.random.Generator
) -> torch.Tensor:
    """A random resized crop, flipped with the given probability: float32, C x H x W."""
    image = convert_channels(image, pixels.channels)
    box = crop_box(image.width, image.height, augmentation, rng)
    # Cropped first: resize(box=...) would blend in pixels from outside the crop.
    view = image.crop(box).resize((pixels.size, pixels.size), Image.Resampling.BILINEAR)
    return _normalised(view, pixels, mirrored=rng.random() < augmentation.flip)


def crop_box(
    width: int, height: int, augmentation: Augmentation, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random crop, chosen as torchvision's RandomResizedCrop does."""
    low, high = augmentation.scale
    narrow, wide = augmentation.ratio
    log_narrow, log_wide = math.log(narrow), math.log(wide)
    for _ in range(10):
        area = width * height * (low + (high - low) * rng.random())
        ratio = math.exp(log_narrow + (log_wide - log_narrow) * rng.random())
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.random() * (height - crop_height + 1))
            left = int(rng.random() * (width - crop_width + 1))
            return left, top, left + crop_width, top + crop_height
    # The image is longer than any crop: the largest central one of an allowed ratio.
    crop_width, crop_height = width, height
    if width / height < narrow:
        crop_height = max(1, round(width / narrow))
    elif width / height > wide:
        crop_width = max(1, round(height * wide))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def eval_view(
    image: Image.Image,
    pixels: Preprocessing,
    resize: Literal["crop", "squash"] = "crop",
) -> torch.Tensor:
    """The view that is classified: float32, C x H x W.

    `crop` brings the shorter side to 256/224 of the size and takes the centre; `squash` resizes
    to the size whatever the shape.
    """
    image = convert_channels(image, pixels.channels)
    if resize == "crop":
        box = _central_box(image.width, image.height, pixels.size)
    elif resize == "squash":
        box = (0, 0, image.width, image.height)
    else:
        raise UnknownName("resize", resize, ("crop", "squash"))
    view = image.resize((pixels.size, pixels.size), _filter(pixels.interpolation), box)
    return _normalised(view, pixels)


def required_min_side(pixels: Preprocessing, augmentation: Augmentation | None) -> int:
    """The shorter side an image needs: the smallest crop of a training view then has as many pixels
    as it is resized to, and a test view twice as many.
    """
    if augmentation is None:
        return 2 * round(pixels.size * 256 / 224)
    return math.ceil(pixels.size / math.sqrt(augmentation.scale[0]))


def _central_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The part of the image that ends up in the centre crop.

    Resizing it alone gives the same pixels as resizing all and cropping (but for rounding between
    Pillow's two passes), and does not build a gigantic image out of a very long one.
    """
    shorter = round(size * 256 / 224)
    if width <= height:
        full_width, full_height = shorter, shorter * height // width
    else:
        full_width, full_height = shorter * width // height, shorter
    left, top = round((full_width - size) / 2), round((full_height - size) / 2)
    across, down = width / full_width, height / full_height  # source pixels per pixel
    return (
        left * across,
        top * down,
        min((left + size) * across, width),
        min((top + size) * down, height),
    )


def _filter(interpolation: str) -> Image.Resampling:
    try:
        return Image.Resampling[interpolation.upper()]
    except KeyError:
        known = [member.name.lower() for member in Image.Resampling]
        raise UnknownName("interpolation", interpolation, known) from None


def _normalised(view: Image.Image, pixels: Preprocessing, mirrored: bool = False) -> torch.Tensor:
    values = np.asarray(view)  # H x W or H x W x C
    if mirrored:
        values = values[:, ::-1]
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)  # C x H x W
    planes = planes.astype(np.float32, order="C")
    std = np.array(pixels.std, np.float32)[:, None, None]
    mean = np.array(pixels.mean, np.float32)[:, None, None]
    planes /= 255 * std
    planes -= mean / std
    return torch.from_numpy(planes)

"""From an image file to the tensor a backbone sees: decoding, crops, flips, normalisation."""

from __future__ import annotations

import functools
import io
import math
import os
import struct
from collections.abc import Iterable
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
_INTERPOLATIONS = {member.name.lower(): member for member in Image.Resampling}
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


@dataclass(frozen=True)
class Augmentation:
    """Random resized crop and horizontal flip."""

    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    flip: float = 0.5  # probability

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            problem = f"{self.scale} is not 0 < low <= high <= 1"
            raise BadOption("the augmentation", "scale", problem)
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise BadOption("the augmentation", "ratio", f"{self.ratio} is not 0 < low <= high")
        if not 0 <= self.flip <= 1:
            raise BadOption("the augmentation", "flip", f"{self.flip} is not a probability")


def view_generator(seed: int, task: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the random generator of one view of one image, independent of workers and order.

    Philox is counter-based: the low word counts the draws within a view, the other three identify
    the view. No two views share random numbers, and none have to be skipped.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, sample, epoch, task]))


def training_view(
    image: Image.Image,
    preprocessing: Preprocessing,
    augmentation: Augmentation,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return a random resized crop, possibly flipped: float32, C x H x W."""
    image = convert_channels(image, preprocessing.channels)
    box = crop_box(image.width, image.height, augmentation, rng)
    size = (preprocessing.size, preprocessing.size)
    # Crop first: resize(box=...) would blend in pixels from outside the crop.
    view = image.crop(box).resize(size, Image.Resampling.BILINEAR)
    return _to_tensor(view, preprocessing, flip=rng.random() < augmentation.flip)


def crop_box(
    width: int, height: int, augmentation: Augmentation, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw left, top, right, bottom of a crop as torchvision's RandomResizedCrop does."""
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
    # No draw fits the image: take the largest central crop with an allowed ratio.
    crop_width, crop_height = width, height
    if width / height < narrow:
        crop_height = max(1, round(width / narrow))
    elif width / height > wide:
        crop_width = max(1, round(height * wide))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def eval_view(
    image: Image.Image, preprocessing: Preprocessing, resize: Literal["crop", "squash"] = "crop"
) -> torch.Tensor:
    """Return the view of an image that is classified: float32, C x H x W.

    Args:
        image: an image of any size and mode.
        preprocessing: what the backbone expects.
        resize: `crop` resizes the shorter side to 256/224 of the size and takes the centre;
            `squash` resizes to the size and ignores the aspect ratio.
    """
    image = convert_channels(image, preprocessing.channels)
    if resize == "crop":
        box = _center_crop_box(image.width, image.height, preprocessing.size)
    elif resize == "squash":
        box = (0, 0, image.width, image.height)
    else:
        raise UnknownName("resize", resize, ("crop", "squash"))
    interpolation = _INTERPOLATIONS.get(preprocessing.interpolation.lower())
    if interpolation is None:
        raise UnknownName("interpolation", preprocessing.interpolation, _INTERPOLATIONS)
    view = image.resize((preprocessing.size, preprocessing.size), interpolation, box)
    return _to_tensor(view, preprocessing)


def required_min_side(preprocessing: Preprocessing, augmentation: Augmentation | None) -> int:
    """Return how many pixels the shorter side of a decoded image needs.

    The smallest crop of a training view then has at least as many pixels as it is resized to; a
    view for evaluation (`augmentation=None`) has twice as many.
    """
    if augmentation is None:
        return 2 * round(preprocessing.size * 256 / 224)
    return math.ceil(preprocessing.size / math.sqrt(augmentation.scale[0]))


def _center_crop_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the part of the image that ends up in the centre crop.

    Resizing only this part gives the same pixels as resizing everything and cropping (except for
    rounding between Pillow's two passes), without a huge intermediate for a very long image.
    """
    shorter = round(size * 256 / 224)
    if width <= height:
        full_width, full_height = shorter, shorter * height // width
    else:
        full_width, full_height = shorter * width // height, shorter
    left, top = round((full_width - size) / 2), round((full_height - size) / 2)
    x_scale, y_scale = width / full_width, height / full_height  # source pixels per pixel
    right, bottom = min((left + size) * x_scale, width), min((top + size) * y_scale, height)
    return left * x_scale, top * y_scale, right, bottom


def _to_tensor(view: Image.Image, preprocessing: Preprocessing, flip: bool = False) -> torch.Tensor:
    values = np.asarray(view)  # H x W or H x W x C
    if flip:
        values = values[:, ::-1]
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)  # C x H x W
    planes = planes.astype(np.float32, order="C")
    std = np.array(preprocessing.std, np.float32)[:, None, None]
    mean = np.array(preprocessing.mean, np.float32)[:, None, None]
    planes /= 255 * std
    planes -= mean / std
    return torch.from_numpy(planes)

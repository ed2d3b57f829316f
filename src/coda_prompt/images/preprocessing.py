"""From an image to the pixels a network expects: resizing, cropping, normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.errors import UnknownName
from coda_prompt.images.reading import convert_channels

Resize = Literal["crop", "squash"]
"""How an image becomes square: crop its centre, or squash it."""
_INTERPOLATIONS = {member.name.lower(): member for member in Image.Resampling}


@dataclass(frozen=True)
class Preprocessing:
    """Size, channels and normalisation of the images a set of weights was trained on."""

    size: int = 224
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"

    def unnormalised(self) -> Preprocessing:
        """Return the same size without normalisation: values in [0, 1], as the paper used them."""
        return Preprocessing(
            self.size, self.channels, (0.0,) * self.channels, (1.0,) * self.channels, "bilinear"
        )


def input_kind(channels: int) -> Literal["drawing", "photograph"]:
    """Return what images a backbone is for: one with grey input is for drawings."""
    return "drawing" if channels == 1 else "photograph"


def eval_view(
    image: Image.Image, preprocessing: Preprocessing, resize: Resize = "crop"
) -> NDArray[np.float32]:
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
    return normalised(view, preprocessing)


def required_min_side(preprocessing: Preprocessing) -> int:
    """Return how many pixels the shorter side of a decoded image needs for `eval_view`."""
    return 2 * round(preprocessing.size * 256 / 224)


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


def normalised(
    view: Image.Image, preprocessing: Preprocessing, flip: bool = False
) -> NDArray[np.float32]:
    """Return normalised pixels, C x H x W, of an image of the right size."""
    values = np.asarray(view)  # H x W or H x W x C
    if flip:
        values = values[:, ::-1]
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)  # C x H x W
    planes = planes.astype(np.float32, order="C")
    std = np.array(preprocessing.std, np.float32)[:, None, None]
    mean = np.array(preprocessing.mean, np.float32)[:, None, None]
    planes /= 255 * std
    planes -= mean / std
    return planes

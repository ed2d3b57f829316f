"""Augmented views of training images: a random resized crop, possibly flipped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.errors import BadOption
from coda_prompt.images.preprocessing import Preprocessing, normalised
from coda_prompt.images.reading import convert_channels


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
) -> NDArray[np.float32]:
    """Return a random resized crop, possibly flipped: float32, C x H x W."""
    image = convert_channels(image, preprocessing.channels)
    box = crop_box(image.width, image.height, augmentation, rng)
    size = (preprocessing.size, preprocessing.size)
    # Crop first: resize(box=...) would blend in pixels from outside the crop.
    view = image.crop(box).resize(size, Image.Resampling.BILINEAR)
    return normalised(view, preprocessing, flip=rng.random() < augmentation.flip)


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


def augmented_min_side(preprocessing: Preprocessing, augmentation: Augmentation) -> int:
    """Return how many pixels the shorter side of a decoded image needs.

    The smallest crop of a training view then has at least as many pixels as it is resized to.
    """
    return math.ceil(preprocessing.size / math.sqrt(augmentation.scale[0]))

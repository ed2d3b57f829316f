"""Classify images with a model that `coda export` wrote: python predict.py MODEL.onnx IMAGE...

Needs NumPy, Pillow and onnxruntime; prints a line of JSON for each image.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")
ORIENTATION = 0x0112
UPRIGHT = {  # value of the EXIF tag -> what turns the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Model:
    """A classifier in an ONNX file.

    Example:
        >>> model = Model("my-model.onnx")
        >>> probabilities, typicality = model("cup.jpg")
        >>> print(model.classes[probabilities.argmax()], probabilities.max())
    """

    def __init__(self, path: str | Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.classes: list[str] = json.loads(metadata["classes"])
        self.pixels: list[dict[str, Any]] = json.loads(metadata["pixels"])
        """How an image becomes each input of the graph."""

    def __call__(self, path: str | Path) -> tuple[NDArray[np.float32], float]:
        """Return the probability of each class, and how typical the image is of all of them.

        To reject 5 % of the images of known classes by mistake, call those below 0.05 unknown.
        """
        image = open_image(path, max(2 * resized_side(each["size"]) for each in self.pixels))
        inputs = {each["input"]: view(image, each)[None] for each in self.pixels}
        if any(each.name == "side" for each in self.session.get_inputs()):
            inputs["side"] = np.array([min(image.size)], np.float32)
        probabilities, typicality = self.session.run(["probabilities", "typicality"], inputs)
        return probabilities[0], float(typicality[0])


def open_image(path: str | Path, min_side: int) -> Image.Image:
    """Decode an image and turn it upright; a large JPEG at 1/2, 1/4 or 1/8 of its size."""
    image = Image.open(path, formats=FORMATS)
    image.draft(None, (min_side, min_side))
    image.load()
    operation = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    return image if operation is None else image.transpose(operation)


def view(image: Image.Image, pixels: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return an input of the graph, channels x size x size."""
    size, image = pixels["size"], converted(image, "L" if pixels["channels"] == 1 else "RGB")
    crops = pixels["resize"] == "crop"
    box = centre(*image.size, size) if crops else (0, 0, *image.size)
    interpolation = Image.Resampling[pixels["interpolation"].upper()]
    values = np.asarray(image.resize((size, size), interpolation, box), np.float32)
    mean, std = (np.array(pixels[name], np.float32) for name in ("mean", "std"))
    values = values.reshape(size, size, -1) / (255 * std) - mean / std
    return values.transpose(2, 0, 1)


def converted(image: Image.Image, mode: str) -> Image.Image:
    """Convert to RGB or L: transparency over white, more than 8 bits scaled to 8."""
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray(np.rint(np.asarray(image) / 257.0).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        values = values * 255 if values.max() <= 1 else values
        image = Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert(mode)


def resized_side(size: int) -> int:
    """Return the length to which the shorter side of an image is resized before it is cropped."""
    return round(size * 256 / 224)


def centre(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the part of an image that is in the centre crop after resizing."""
    side = resized_side(size)
    shorter = min(width, height)
    full_width, full_height = side * width // shorter, side * height // shorter
    left, top = round((full_width - size) / 2), round((full_height - size) / 2)
    across, down = width / full_width, height / full_height  # pixels for a resized one
    right, bottom = min((left + size) * across, width), min((top + size) * down, height)
    return left * across, top * down, right, bottom


def main() -> None:
    """Print the five most likely classes of each image."""
    model = Model(sys.argv[1])
    for path in sys.argv[2:]:
        probabilities, typicality = model(path)
        best = np.argsort(-probabilities, kind="stable")[:5]
        top = {model.classes[row]: round(float(probabilities[row]), 4) for row in best}
        print(json.dumps({"path": path, "typicality": round(typicality, 4), "top": top}))


if __name__ == "__main__":
    main()

"""Image inputs: paths, URLs of files, bytes, PIL images, arrays, tensors, loaders and datasets."""

from __future__ import annotations

import glob
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.errors import BadOption, CodaWarning, MissingData, UnknownName, WrongType
from coda_prompt.images import folders, hf_datasets
from coda_prompt.images.reading import (
    SUPPORTED_MODES,
    apply_exif_orientation,
    heic_hint,
    open_image,
)

Paths = str | os.PathLike[str]
Channels = Literal["rgb", "bgr"]
"""Order of the colours in arrays; frames of OpenCV are `bgr`."""
DEPTHS = (1, 3, 4)
"""Numbers of channels: grey, RGB, RGB with transparency."""
ONE_IMAGE = (
    "a path or file:// URL, bytes, a file object, a PIL image, an array of H x W or H x W x C, "
    "a tensor of C x H x W"
)
IMAGES = f"{ONE_IMAGE}, or a list, generator, stack, DataLoader or Dataset of these"
PAIRS = (
    "a folder of class folders, hub:owner/name, a DataLoader or dataset of (image, class) pairs, "
    "or images together with labels"
)


def is_tensor(value: object) -> bool:
    """Return whether this is a tensor of torch, which is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_loader(value: object) -> bool:
    """Return whether this is a `DataLoader` of torch, which is not imported for it."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.DataLoader)


def image_items(data: Any, channels: Channels = "rgb") -> list[Any] | NDArray[Any]:
    """Return one or many images as a sequence for `as_image`.

    Args:
        data: A path (a folder or glob pattern stands for the images it names), a `file://` URL,
            bytes, a file object, a PIL image, an array of H x W or H x W x C, a tensor of H x W
            or C x H x W; or many of these in a list, generator, stack, `DataLoader` or a
            `datasets.Dataset`.
        channels: Order of the colours in arrays and tensors.

    Raises:
        BadOption: An array may be one image or several.
        WrongType: This is not an image.
    """
    if isinstance(data, str | os.PathLike):
        items: Any = image_paths([data], _warn)
    elif isinstance(data, np.ndarray) and data.dtype.kind in "UO":
        items = data.tolist()  # an array of paths or of images
    elif isinstance(data, np.ndarray) or is_tensor(data):
        items = _stack_items(data)
    elif isinstance(data, Image.Image | bytes | bytearray) or hasattr(data, "read"):
        items = [data]
    elif is_loader(data):
        items = [item[0] for item in loader_items(data)]
    elif hf_datasets.is_dataset(data):
        items = hf_datasets.image_files("the dataset", data)
    elif isinstance(data, dict | set) or not hasattr(data, "__iter__"):
        raise WrongType(data, "images", IMAGES)
    else:
        items = list(data)
    if isinstance(items, list):  # a file object can be read only once
        items = [
            item.read() if hasattr(item, "read") and not isinstance(item, io.BytesIO) else item
            for item in items
        ]
    if channels == "rgb":
        return items
    if channels != "bgr":
        raise UnknownName("order of channels", str(channels), ("rgb", "bgr"))
    return [_reverse_colours(item) for item in items]


def image_paths(
    names: Iterable[Paths], on_skipped: Callable[[str], object] | None = None
) -> list[str]:
    """Expand files, folders, `file://` URLs and glob patterns like `*.png` to paths of images.

    Args:
        names: What to expand. A name that matches nothing is returned as it is, to be reported
            with the unreadable files.
        on_skipped: Called with a hint if HEIC files of a folder are skipped.
    """
    paths: list[str] = []
    others: list[str] = []
    for name in names:
        root = local_path(name)
        exists = root.exists() or root.is_symlink()
        matches = [str(root)] if exists else sorted(glob.glob(str(root), recursive=True))
        for match in matches or [str(root)]:
            if not os.path.isdir(match):
                paths.append(match)
                continue
            images, others_here = folders.files_below(match)
            paths += images
            others += others_here
            if exists and not images:
                hint = heic_hint(others)
                remedy = "Name files or folders." if hint is None else f"Note: {hint}."
                raise MissingData(root, "there is no image in it", remedy)
    if on_skipped is not None and others and (hint := heic_hint(others)):
        on_skipped(hint)
    return paths


def local_path(name: Paths) -> Path:
    """Return the path that a path or `file://` URL names.

    Raises:
        BadOption: It is a remote path.
    """
    text = os.fspath(name)
    if "://" in text and not text.startswith("file://"):
        problem = (
            f"{text} is not downloaded; download it and name the local path. Images to learn can "
            "be in Parquet files there, named as hub:URL"
        )
        raise BadOption("the images", "path", problem)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    return Path(text).expanduser()


def as_image(value: Any, min_side: int | None = None) -> Image.Image:
    """Return an item of a list or dataset (an image, or an image and its label) as a PIL image.

    With `min_side`, a file may be decoded at reduced size, as in `open_image`.

    Raises:
        BadImage: The file cannot be read.
        BadOption: The array or PIL image cannot be used.
        WrongType: This is not an image.
    """
    if isinstance(value, tuple | list):
        value = value[0]
    if isinstance(value, Image.Image):
        if not (value.width and value.height):
            raise BadOption("an image", "shape", "it has no pixels")
        if value.mode not in SUPPORTED_MODES:
            raise BadOption("an image", "mode", f"'{value.mode}' cannot be converted to RGB")
        return apply_exif_orientation(value.copy())
    if isinstance(value, str | os.PathLike):
        return open_image(local_path(value), min_side)
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes | bytearray):
        return open_image(bytes(value), min_side, "an image in memory")
    if not (isinstance(value, np.ndarray) or is_tensor(value)):
        raise WrongType(value, "an image", ONE_IMAGE)
    array = np.asarray(value.detach().cpu() if is_tensor(value) else value)
    if _channels_first(value):
        array = array.transpose(1, 2, 0)  # C x H x W to H x W x C
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if np.issubdtype(array.dtype, np.floating) and array.size and np.isfinite(array).all():
        if array.min() < 0 or array.max() > 1:
            raise BadOption("an image", "values", "floating-point pixels must be in [0, 1]")
        array = np.rint(array * 255).astype(np.uint8)
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in DEPTHS)
    if array.dtype != np.uint8 or not is_image or not array.size:
        problem = (
            f"{array.dtype} of shape {array.shape} is not an image; pass uint8 or floats in [0, 1] "
            "of H x W, H x W x C or C x H x W with 1, 3 or 4 channels"
        )
        raise BadOption("an image", "shape", problem)
    return Image.fromarray(np.ascontiguousarray(array))


def loader_items(loader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the images of a loader's batches, each with its label (None if there is none)."""
    for batch in loader:
        if is_tensor(batch):
            yield from ((image, None) for image in batch)
        elif isinstance(batch, tuple | list) and len(batch) >= 2:
            yield from zip(batch[0], batch[1], strict=True)
        else:
            problem = f"its batches are {type(batch).__name__}; they must be (images, labels)"
            raise BadOption("the images", "data", problem)


def _stack_items(data: Any) -> list[Any] | NDArray[Any]:
    """Return the images of an array or tensor of one or many images.

    Three dimensions are one image if the last (or of a tensor, the first) is a number of channels.
    """
    tensor, shape = is_tensor(data), tuple(data.shape)
    if len(shape) == 3:
        if shape[2] in DEPTHS or (tensor and shape[0] in DEPTHS):
            return [data]
        if shape[0] in (3, 4):
            problem = (
                f"{shape} may be one image of C x H x W or {shape[0]} grey images; pass "
                "array.transpose(1, 2, 0) for one image, list(array) for several"
            )
            raise BadOption("an array", "shape", problem)
    if len(shape) < 3:
        return [data]
    if tensor:
        return list(data)
    first = len(shape) == 4 and shape[3] not in DEPTHS and shape[1] in DEPTHS
    return data.transpose(0, 2, 3, 1) if first else data


def _channels_first(image: Any) -> bool:
    """Return whether an image is C x H x W; where both are possible, a tensor is."""
    shape = tuple(image.shape)
    if len(shape) != 3 or shape[0] not in DEPTHS:
        return False
    return is_tensor(image) or shape[2] not in DEPTHS


def _reverse_colours(image: Any) -> Any:
    """Turn an array or tensor from BGR into RGB; transparency stays last."""
    if not (isinstance(image, np.ndarray) or is_tensor(image)):
        problem = f"bgr is for arrays and tensors, not for {type(image).__name__}"
        raise BadOption("the images", "channels", problem)
    if image.ndim != 3 or 1 in (image.shape[0], image.shape[2]):
        return image  # grey
    return (
        image[[2, 1, 0, 3][: len(image)]]
        if _channels_first(image)
        else (image[:, :, [2, 1, 0, 3][: image.shape[2]]])
    )


def _warn(message: str) -> None:
    warnings.warn(message, CodaWarning, stacklevel=5)

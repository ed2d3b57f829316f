"""The embedded pocket dataset: 100 classes of human sketches from Quick, Draw! (CC BY 4.0).

80 training and 20 test drawings per class, each rendered in one of ten styles, its domain.
"""

from __future__ import annotations

from importlib import resources
from typing import IO

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import CorruptFile
from coda_prompt.images.sources import ArraySplit, Source
from coda_prompt.research.streams.renditions import STYLES, render, style_index

FILE = "pocket-drawings.npz"
TRAIN_PER_CLASS = 80
STRENGTH = 0.25
"""Default strength of the styles; docs/lab/pocket.md explains how it was chosen."""


def pocket_source(strength: float = STRENGTH) -> Source:
    """Open the drawings in their styles; strength 0 leaves them unchanged."""
    asset = resources.files("coda_prompt") / "assets" / FILE
    with asset.open("rb") as file:
        drawings, classes = _read(file)
    per_class = len(drawings) // len(classes)
    styles = np.array([style_index(f"{name}/{n}") for name in classes for n in range(per_class)])
    rendered = render(drawings, styles, strength)
    labels = np.repeat(np.arange(len(classes)), per_class)
    is_train = np.arange(len(drawings)) % per_class < TRAIN_PER_CLASS
    train, test = (
        ArraySplit(rendered[mask], labels[mask], styles[mask]) for mask in (is_train, ~is_train)
    )
    return Source("pocket", classes, train, test, domain_names=tuple(STYLES))


def _read(file: IO[bytes]) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return the drawings, grouped by class, and the class names."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            drawings, names = arrays["drawings"], arrays["classes"]
    except Exception as error:  # on damaged bytes NumPy and zipfile raise many kinds
        raise CorruptFile(FILE, f"cannot be read ({error})") from error
    valid = drawings.ndim == 3 and names.ndim == 1 and drawings.dtype == np.uint8
    if not valid or not len(names) or len(drawings) % len(names) or len(drawings) < len(names):
        raise CorruptFile(FILE, "does not contain drawings and their classes")
    return drawings, tuple(str(name) for name in names)

"""The embedded dataset: 100 classes of real human sketches, from Quick, Draw! (CC BY 4.0).

80 drawings a class to train and 20 to test, each in one of ten styles kept as its domain.
"""

from __future__ import annotations

from importlib import resources
from typing import IO

import numpy as np
from numpy.typing import NDArray

from coda_prompt.data.renditions import STYLES, render, style_index
from coda_prompt.data.sources import ArraySplit, Source
from coda_prompt.errors import CorruptFile

FILE = "pocket-drawings.npz"
TRAIN = 80
"""Drawings a class to train; the rest test."""
STRENGTH = 0.25
"""How strong the styles are: docs/lab/pocket.md says by which criterion it was set."""


def pocket_source(strength: float = STRENGTH) -> Source:
    """The drawings in their styles; strength 0 is plain ink."""
    asset = resources.files("coda_prompt") / "assets" / FILE
    with asset.open("rb") as file:
        drawings, classes = _read(file)
    each = len(drawings) // len(classes)
    styles = np.array([style_index(f"{name}/{n}") for name in classes for n in range(each)])
    rendered = render(drawings, styles, strength)
    labels = np.repeat(np.arange(len(classes)), each)
    training = np.arange(len(drawings)) % each < TRAIN
    train, test = (
        ArraySplit(rendered[part], labels[part], styles[part]) for part in (training, ~training)
    )
    return Source("pocket", classes, train, test, domain_names=tuple(STYLES))


def _read(file: IO[bytes]) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The drawings, those of a class together, and the names of the classes."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            drawings, names = arrays["drawings"], arrays["classes"]
    except Exception as error:  # on damaged bytes NumPy and zipfile raise many kinds
        raise CorruptFile(FILE, f"cannot be read ({error})") from error
    shaped = drawings.ndim == 3 and names.ndim == 1 and drawings.dtype == np.uint8
    if not shaped or not len(names) or len(drawings) % len(names) or len(drawings) < len(names):
        raise CorruptFile(FILE, "does not hold drawings and their classes")
    return drawings, tuple(str(name) for name in names)

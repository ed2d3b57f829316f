"""The embedded dataset: 100 classes of real human sketches, from Quick, Draw! (CC BY 4.0).

80 drawings a class to train and 20 to test, each in one of ten styles kept as its domain.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from coda_prompt.data.renditions import STYLES, render, style_of
from coda_prompt.data.sources import ArraySplit, Source

FILE = "pocket-drawings.npz"
TRAIN = 80
"""Drawings a class to train; the rest test."""
STRENGTH = 0.25
"""How strong the styles are: docs/pocket.md says by which criterion it was set."""


def pocket_source(strength: float = STRENGTH) -> Source:
    """The drawings in their styles; strength 0 is plain ink."""
    asset = resources.files("coda_prompt") / "assets" / FILE
    with asset.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        drawings, classes = arrays["drawings"], tuple(str(name) for name in arrays["classes"])
    each = len(drawings) // len(classes)
    styles = np.array([style_of(f"{name}/{n}") for name in classes for n in range(each)])
    rendered = render(drawings, styles, strength)
    labels = np.repeat(np.arange(len(classes)), each)
    training = np.arange(len(drawings)) % each < TRAIN
    train, test = (
        ArraySplit(rendered[part], labels[part], styles[part]) for part in (training, ~training)
    )
    return Source("pocket", classes, train, test, domain_names=tuple(STYLES))

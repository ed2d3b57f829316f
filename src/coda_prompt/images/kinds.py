"""Tell drawings from photographs by their pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.images.reading import convert_channels

SIDE = 48
"""Pixels of the longer side of the copy that is examined."""
PAPER = 12
"""Largest difference of a paper pixel from the most frequent of 256 grey levels."""
SHADING = (5, 40)
"""Range of grey levels among a pixel and its neighbours where a surface is shaded: the edge of a
stroke has more contrast, paper and filled areas have less."""
LEAST_PAPER, PAPER_PER_SHADING = 0.4, 4.0
MOST_COLOURS = 5.0
"""Largest standard deviation of colours in the direction in which they vary second most. Mixtures
of one ink and the paper lie on a line; the colours of photographed objects do not."""


def is_drawing(image: Image.Image) -> bool:
    """Return whether an image is a drawing: much paper of one tone, little shading, one ink.

    Paper and shading are shares of the pixels of a small grey copy. Paper and ink may have any tone
    and colour; each quadrant has its own paper, so that uneven light on a photographed sheet does
    not matter.
    """
    grey = _small_copy(image, 1)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(grey, 1, mode="edge"), (3, 3))
    contrast = around.max(axis=(2, 3)) - around.min(axis=(2, 3))
    shaded = (contrast >= SHADING[0]) & (contrast <= SHADING[1])
    paper = np.zeros_like(shaded)
    for rows in np.array_split(np.arange(grey.shape[0]), 2):
        for columns in np.array_split(np.arange(grey.shape[1]), 2):
            quadrant = np.ix_(rows, columns)
            levels = np.bincount(grey[quadrant].ravel(), minlength=256)
            near = np.convolve(levels, np.ones(2 * PAPER + 1), mode="same")
            paper[quadrant] = abs(grey[quadrant] - near.argmax()) <= PAPER
    shading = float((shaded & ~paper).mean())
    if paper.mean() < LEAST_PAPER + PAPER_PER_SHADING * shading:
        return False
    colours = _small_copy(image, 3)[~paper]
    if len(colours) < 2:
        return True
    variances = np.linalg.eigvalsh(np.cov(colours.T))  # ascending
    return float(variances[1]) <= MOST_COLOURS**2


def _small_copy(image: Image.Image, channels: int) -> NDArray[np.int64]:
    """Return the pixels of a small copy, H x W, or H x W x 3 in colour."""
    small = convert_channels(image, channels).copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small).astype(np.int64)

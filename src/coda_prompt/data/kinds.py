"""Tell drawings from photographs by their pixels."""

from __future__ import annotations

import numpy as np
from PIL import Image

from coda_prompt.data.images import convert_channels

SIDE = 48
"""Pixels of the longer side of the copy that is examined."""
PAPER = 12
"""Largest difference of a paper pixel from the most frequent of 256 grey levels."""
SHADING = (5, 40)
"""Range of grey levels among a pixel and its neighbours where a surface is shaded: the edge of a
stroke has more contrast, paper and filled areas have less."""
LEAST_PAPER, PAPER_PER_SHADING = 0.4, 4.0


def is_drawing(image: Image.Image) -> bool:
    """Return whether an image is a drawing: much paper of one tone, and little shading beside it.

    Both are shares of the pixels of a small grey copy. Paper and ink may have any tone and colour;
    each quadrant has its own paper, so that uneven light on a photographed sheet does not matter.
    """
    small = convert_channels(image, 1).copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    grey = np.asarray(small).astype(np.int64)
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
    return float(paper.mean()) >= LEAST_PAPER + PAPER_PER_SHADING * shading

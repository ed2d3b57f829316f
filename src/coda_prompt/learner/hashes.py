"""Hashes of learned images: a later lesson is compared with them, and no image is stored.

The hash has one bit for each low frequency of the image, shrunk to 32 x 32 grey pixels: whether its
cosine coefficient is above the median. docs/lab/unknown.md has the distances measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.images.reading import convert_channels

SIDE, FREQUENCIES = 32, 11
BITS = FREQUENCIES**2 - 1
BYTES = BITS // 8
MAX_DIFFERENT_BITS = 12
"""Copies at another size or quality differ less, different images more."""
CHUNK = 256

Hashes = NDArray[np.uint8]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LearnedHashes:
    """The hash and the class of each image of the lessons that asked for it: a value."""

    hashes: Hashes = field(default_factory=lambda: np.zeros((0, BYTES), np.uint8))
    """Images x BYTES."""
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    """The class of each image."""

    def __len__(self) -> int:
        return len(self.rows)

    def learned(self, hashes: Hashes, rows: Rows) -> LearnedHashes:
        """Add the images of a lesson."""
        return LearnedHashes(
            np.concatenate([self.hashes, hashes]), np.concatenate([self.rows, rows])
        )

    def nearest(self, hashes: Hashes) -> tuple[Rows, Rows]:
        """Return the position of the most similar hash for each of `hashes`, and differing bits."""
        if not len(self):
            return np.zeros(len(hashes), np.int64), np.full(len(hashes), BITS)
        own, positions, differing = _signs(self.hashes), [], []
        for start in range(0, len(hashes), CHUNK):
            agreement = _signs(hashes[start : start + CHUNK]) @ own.T
            positions.append(agreement.argmax(axis=1))
            differing.append((BITS - agreement.max(axis=1)).astype(np.int64) // 2)
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *positions]), np.concatenate([none, *differing])

    def repeated(self, other: LearnedHashes) -> dict[int, int]:
        """Return how many images of each class of `other` resemble one of these."""
        _, differing = self.nearest(other.hashes)
        rows, counts = np.unique(other.rows[differing <= MAX_DIFFERENT_BITS], return_counts=True)
        return dict(zip(rows.tolist(), counts.tolist(), strict=True))

    # -- the arrays in a model

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays by name; none without hashes."""
        return {"hashes": self.hashes, "rows": self.rows} if len(self) else {}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]], classes: int) -> LearnedHashes:
        """Return what `arrays` stored.

        Raises:
            ValueError: The arrays do not fit each other or the number of classes.
        """
        if not arrays:
            return cls()
        if arrays.keys() != {"hashes", "rows"}:
            raise ValueError("unexpected arrays")
        hashes, rows = arrays["hashes"], arrays["rows"]
        fits = hashes.dtype == np.uint8 and rows.dtype == np.int64 and rows.ndim == 1
        if not fits or hashes.shape != (len(rows), BYTES) or (rows >= classes).any():
            raise ValueError("they do not fit the classes")
        return cls(hashes, rows)

    # -- editing

    def without_classes(self, rows: Sequence[int]) -> LearnedHashes:
        """Remove classes; later classes move up."""
        kept = ~np.isin(self.rows, rows)
        return LearnedHashes(self.hashes[kept], _moved_up(self.rows[kept], rows))

    def united(self, rows: Sequence[int], into: int) -> LearnedHashes:
        """Give the images of the classes `rows` to `into`, one of them; the others are removed."""
        others = [row for row in rows if row != into]
        united = np.where(np.isin(self.rows, others), into, self.rows)
        return LearnedHashes(self.hashes, _moved_up(united, others))

    def joined(self, other: LearnedHashes, rows: Sequence[int]) -> LearnedHashes:
        """Add those of another model; `rows[k]` is the row here of its class k."""
        return self.learned(other.hashes, np.asarray(rows, np.int64)[other.rows])

    def moved(self, hashes: Hashes, source: int, labels: Rows) -> LearnedHashes:
        """Move images with these hashes from the class `source` to the classes `labels`."""
        rows = self.rows.copy()
        for each, label in zip(hashes, labels, strict=True):
            same = np.flatnonzero((self.hashes == each).all(axis=1) & (rows == source))
            rows[same[:1]] = label
        return LearnedHashes(self.hashes, rows)


def image_hash(image: Image.Image) -> Hashes:
    """Return the hash of an image, BYTES in uint8."""
    small = convert_channels(image, 1).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    grid = np.arange(SIDE)
    cosines = np.cos(np.pi * np.outer(np.arange(FREQUENCIES), 2 * grid + 1) / (2 * SIDE))
    coefficients = (cosines @ np.asarray(small, np.float64) @ cosines.T).flatten()[1:]
    return np.packbits(coefficients > np.median(coefficients))


def _signs(hashes: Hashes) -> NDArray[np.float32]:
    """Return the bits as 1 and -1, N x BITS: a product of two rows counts agreement."""
    return np.unpackbits(hashes, axis=1).astype(np.float32) * 2 - 1


def _moved_up(rows: Rows, dropped: Sequence[int]) -> Rows:
    """Renumber the classes after some were dropped."""
    return rows - np.searchsorted(np.sort(np.asarray(dropped, np.int64)), rows)

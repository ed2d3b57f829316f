"""Hashes of learned images: a later lesson is compared with them, and no image is stored.

The hash has one bit for each low frequency of the image, shrunk to 32 x 32 grey pixels: whether its
cosine coefficient is above the median. docs/lab/unknown.md has the distances measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from coda_prompt.images.reading import convert_channels
from coda_prompt.research.methods.bank import Bank, CPUModule, other_rows

if TYPE_CHECKING:
    from coda_prompt.images.labelled import Labelled

PREFIX = "duplicates."
"""Begins the names of the hashes' tensors in a model."""
SIDE, FREQUENCIES = 32, 11
BITS = FREQUENCIES**2 - 1
BYTES = BITS // 8
MAX_DIFFERENT_BITS = 12
"""Copies at another size or quality differ less, different images more."""
MAX_SHOWN = 5


class LearnedHashes(CPUModule):
    """The hash and the class of each image of the lessons that asked for it; additive."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes = Bank((BYTES,), dtype=torch.uint8)
        self.rows = Bank(dtype=torch.int64)

    def learned(self, images: Labelled, names: Sequence[str]) -> tuple[LearnedHashes, list[str]]:
        """Add the images of a lesson, and find those that were learned before.

        Args:
            images: All images of the lesson, held-out ones too.
            names: All class names by row.

        Returns:
            The hashes after the lesson, and a sentence about repeated images if there are any.
        """
        hashes, repeated = hash_images(images), list[str]()
        nearest, differing = self.nearest(hashes)
        found = [at for at, bits in enumerate(differing) if bits <= MAX_DIFFERENT_BITS]
        for at in found[:MAX_SHOWN]:
            repeated.append(f"{images.name(at)} (as '{names[int(self.rows.frozen[nearest[at]])]}')")
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        sentence = f"near-duplicates of images learned before: {'; '.join(repeated)}{more}"
        after = LearnedHashes()
        rows = [names.index(images.names[label]) for label in images.split.labels]
        after.hashes.append(torch.cat([self.hashes.frozen, hashes]))
        after.rows.append(torch.cat([self.rows.frozen, torch.tensor(rows, dtype=torch.int64)]))
        return after, [sentence] if repeated else []

    def nearest(self, hashes: Tensor) -> tuple[list[int], list[int]]:
        """Return the position of the most similar hash for each of `hashes`, and differing bits."""
        if not len(self.rows):
            return [0] * len(hashes), [BITS] * len(hashes)
        own, positions, differing = _signs(self.hashes.frozen), list[int](), list[int]()
        for chunk in hashes.split(256):
            closest = (_signs(chunk) @ own.T).max(dim=1)
            positions += closest.indices.tolist()
            differing += ((BITS - closest.values) / 2).long().tolist()
        return positions, differing

    def repeated(self, other: LearnedHashes) -> dict[int, int]:
        """Return how many images of each class of `other` resemble one of these."""
        _, differing = self.nearest(other.hashes.frozen)
        rows = other.rows.frozen[torch.tensor(differing) <= MAX_DIFFERENT_BITS]
        found = rows.unique(return_counts=True)
        return {int(row): int(count) for row, count in zip(*found, strict=True)}

    # -- the state in a model

    def state(self) -> dict[str, Tensor]:
        """Return all tensors under their names in a model; none without hashes."""
        return {PREFIX + name: each for name, each in self.state_dict().items() if len(self.rows)}

    def load(self, tensors: Mapping[str, Tensor], classes: int) -> bool:
        """Load what `state` returned; False if the tensors do not fit the number of classes."""
        hashes, rows = (tensors.get(f"{PREFIX}{name}.frozen") for name in ("hashes", "rows"))
        if len(tensors) != 2 or hashes is None or rows is None or rows.dtype != torch.int64:
            return False
        if hashes.shape != (len(rows), BYTES) or hashes.dtype != torch.uint8 or rows.dim() != 1:
            return False
        self.hashes.frozen, self.rows.frozen = hashes, rows
        return bool((rows < classes).all())

    # -- editing: see methods/additive.py

    def grow(self, classes: int) -> None:
        """Classes without images have no hashes."""

    def drop_classes(self, rows: Sequence[int]) -> None:
        kept = (~torch.isin(self.rows.frozen, torch.tensor(list(rows)))).nonzero()[:, 0]
        self.hashes.keep(kept)
        self.rows.keep(kept)
        self._move_up(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        others = [row for row in rows if row != into]
        united = torch.isin(self.rows.frozen, torch.tensor(others))
        self.rows.frozen = self.rows.frozen.masked_fill(united, into)
        self._move_up(others)

    def absorb(self, other: LearnedHashes, rows: Sequence[int]) -> None:
        self.hashes.append(other.hashes.frozen)
        self.rows.append(torch.tensor(list(rows), dtype=torch.int64)[other.rows.frozen])

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        """Move images to other classes; `features` are their hashes."""
        if not len(self.rows):
            return
        rows = self.rows.frozen.clone()
        for each, label in zip(features, labels.tolist(), strict=True):
            same = ((self.hashes.frozen == each).all(dim=1) & (rows == source)).nonzero()
            if len(same):
                rows[same[0]] = label
        self.rows.frozen = rows

    def _move_up(self, dropped: Sequence[int]) -> None:
        """Renumber the classes after some were dropped."""
        if len(self.rows):
            kept = other_rows(max([int(self.rows.frozen.max()), *dropped]) + 1, dropped)
            self.rows.frozen = torch.searchsorted(kept, self.rows.frozen)


def hash_images(images: Labelled) -> Tensor:
    """Return the hashes of all images, N x BYTES in uint8."""
    split = images.split
    hashes = [image_hash(split.image(at, 2 * SIDE)) for at in range(len(split.labels))]
    return torch.from_numpy(np.stack(hashes))


def image_hash(image: Image.Image) -> NDArray[np.uint8]:
    """Return the hash of an image, BYTES in uint8."""
    small = convert_channels(image, 1).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    grid = np.arange(SIDE)
    cosines = np.cos(np.pi * np.outer(np.arange(FREQUENCIES), 2 * grid + 1) / (2 * SIDE))
    coefficients = (cosines @ np.asarray(small, np.float64) @ cosines.T).flatten()[1:]
    return np.packbits(coefficients > np.median(coefficients))


def _signs(hashes: Tensor) -> Tensor:
    """Return the bits as 1 and -1, N x BITS: a product of two rows counts agreement."""
    bits = torch.from_numpy(np.unpackbits(hashes.numpy(), axis=1))
    return bits.float() * 2 - 1

"""What a classifier computes of the features of an image before it classifies them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coda_prompt.seeding import keyed_generator
from coda_prompt.statistics.algebra import Array, unit

NORMAL_STEPS = 256
"""Values that the weights of random features can have, equally likely."""


def random_projection(seed: int, width: int, projected: int) -> NDArray[np.float32]:
    """Draw W, width x projected, from a normal distribution in 256 steps.

    It is drawn again instead of stored. The bits of a bit generator are the same in all versions of
    NumPy, numbers of a normal distribution need not be.
    """
    distribution = NormalDist()
    shares = ((step + 0.5) / NORMAL_STEPS for step in range(NORMAL_STEPS))
    values = np.array([round(distribution.inv_cdf(share), 4) for share in shares], np.float32)
    count = width * projected
    bits = keyed_generator(seed, "random features").bit_generator.random_raw(-(-count // 8))
    steps = np.asarray(bits, "<u8").view(np.uint8)[:count]
    return values[steps].reshape(width, projected)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Maps features of images to those that are classified."""

    kind: Literal["plain", "unit", "random"]
    """As they are; scaled to unit length; or random features h = ReLU(f W)."""
    inputs: int
    """Length of f."""
    width: int
    """Length of the result."""
    seed: int = 0
    """Of the random features."""
    given: Array | None = None
    """W, if it is not drawn from the seed."""

    def __call__(self, features: Array) -> Array:
        """Map features, n x inputs, to n x width, in their precision."""
        if self.kind == "random":
            return np.maximum(features @ self.projection.astype(features.dtype, copy=False), 0)
        return unit(features) if self.kind == "unit" else features

    @cached_property
    def projection(self) -> Array:
        """W, inputs x width."""
        if self.given is not None:
            return self.given
        return random_projection(self.seed, self.inputs, self.width)

"""The image preprocessing a backbone expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Preprocessing:
    """Size, channels and normalisation of the images a set of weights was trained on."""

    size: int = 224
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"

    def unnormalised(self) -> Preprocessing:
        """Return the same size without normalisation: values in [0, 1], as the paper used them."""
        return Preprocessing(
            self.size, self.channels, (0.0,) * self.channels, (1.0,) * self.channels, "bilinear"
        )


def input_kind(channels: int) -> Literal["drawing", "photograph"]:
    """Return what images a backbone is for: one with grey input is for drawings."""
    return "drawing" if channels == 1 else "photograph"

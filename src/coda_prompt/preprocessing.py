"""What a backbone expects of an image: the contract between weights and the data pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preprocessing:
    """Size, channels and normalisation of the images a set of weights was trained on."""

    size: int = 224
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"

    def unnormalised(self) -> Preprocessing:
        """The same image size with values in [0, 1], as the paper fed them."""
        return Preprocessing(
            self.size, self.channels, (0.0,) * self.channels, (1.0,) * self.channels, "bilinear"
        )

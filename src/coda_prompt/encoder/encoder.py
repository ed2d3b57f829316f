"""From an image to its features: the ONNX graphs of one network or several."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load

from coda_prompt.encoder.catalog import BUILT_IN
from coda_prompt.encoder.description import EncoderDescription, Pixels, read_description
from coda_prompt.encoder.network import Network, Values
from coda_prompt.errors import BadOption, UnknownName
from coda_prompt.images.preprocessing import required_min_side
from coda_prompt.storage.files import file_sha256
from coda_prompt.storage.headers import read_checked_description


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """What an encoder knows of an image."""

    features: Values
    """What classifiers read, D."""
    tokens: Values
    """What the unknown score reads, T."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Learned prompts of CODA-Prompt, M components for each prompted block."""

    components: NDArray[np.floating]
    """blocks x M x length x width."""
    keys: NDArray[np.floating]
    """blocks x M x width."""
    attention: NDArray[np.floating]
    """blocks x M x width."""


class Encoder:
    """Networks that turn an image into features; of several, features of unit length side by side.

    An image is always run by itself, so that no answer depends on others. `encode` can be called
    in many threads at a time.

    Args:
        description: What the JSON of the encoder says.
        networks: Its networks, in the order of the description.

    Example:
        >>> encoder = load_encoder("photo-vit")
        >>> features = encoder.encode(Image.open("cup.jpg")).features
    """

    def __init__(self, description: EncoderDescription, networks: Sequence[Network]) -> None:
        self.description, self._networks = description, tuple(networks)

    @property
    def name(self) -> str:
        """As in the catalogue, with the size if one was given; else as in the JSON."""
        return self.description.name

    @property
    def kind(self) -> Literal["drawing", "photograph"]:
        """What images it is for."""
        return self.description.kind

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the source weights with preprocessing and precision, or of the files."""
        if self.description.fingerprint is not None:
            return self.description.fingerprint
        parts = [self.description.model_dump_json(include={"networks"})]
        for network in self._networks:
            parts += [file_sha256(network.folder / name) for name in network.description.files]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def pixels(self) -> tuple[Pixels, ...]:
        """The input of each network."""
        return tuple(network.description.pixels for network in self._networks)

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(network.description.width for network in self._networks)

    @property
    def token_width(self) -> int:
        """Number of values that the unknown score reads."""
        widths = [network.description.token_width or 0 for network in self._networks]
        return sum(widths) or self.width

    @property
    def min_side(self) -> int:
        """Pixels that the shorter side of a decoded image needs."""
        return max(required_min_side(pixels.preprocessing) for pixels in self.pixels)

    @property
    def can_prompt(self) -> bool:
        """Whether `encode` takes prompts."""
        return self.prompt_shape is not None

    @property
    def prompt_shape(self) -> tuple[int, int, int] | None:
        """Blocks, length and width of prompts; None if it takes none."""
        prompted = self._networks[0].description.prompted
        if prompted is None or len(self._networks) > 1:
            return None
        return prompted.blocks, prompted.length, prompted.width

    def views(self, image: Image.Image) -> list[Values]:
        """Return the preprocessed pixels of an image for each network, channels x size x size."""
        return [network.view(image) for network in self._networks]

    def encode(self, image: Image.Image, prompts: Prompts | None = None) -> EncodedImage:
        """Return the features of an image, under prompts if there are any.

        Tokens do not depend on prompts.

        Raises:
            BadOption: The prompts do not fit the encoder.
            CorruptFile: A graph cannot be run.
        """
        inputs = {} if prompts is None else self._inputs(prompts)
        outputs = [network.run(network.view(image), inputs) for network in self._networks]
        features = [each for each, _ in outputs]
        tokens = [each for _, each in outputs if each is not None]
        return EncodedImage(_side_by_side(features), _side_by_side(tokens or features))

    def prior(self) -> dict[str, NDArray[Any]] | None:
        """Return statistics of the images it was trained on: `covariance` and `class_means`.

        None if there are none for these weights.
        """
        if self.name not in BUILT_IN:
            return None
        path = assets() / f"{self.name}-statistics.safetensors"
        if not path.is_file():
            return None
        content = path.read_bytes()
        description, _ = read_checked_description(content, path)
        known = (self.description.fingerprint, self.description.weights_fingerprint)
        if description is None or description["fingerprint"] not in known:
            return None
        return {name: values.astype(np.float64) for name, values in load(content).items()}

    def _inputs(self, prompts: Prompts) -> dict[str, Values]:
        """Return prompts as inputs of the prompted graph."""
        if self.prompt_shape is None:
            raise BadOption(f"encoder '{self.name}'", "prompts", "it does not take prompts")
        blocks, length, width = self.prompt_shape
        count = prompts.keys.shape[1] if prompts.keys.ndim == 3 else 0
        shapes = {
            "components": (blocks, count, length, width),
            "keys": (blocks, count, width),
            "attention": (blocks, count, width),
        }
        for name, shape in shapes.items():
            actual = getattr(prompts, name).shape
            if actual != shape or not count:
                problem = f"shape {actual} does not fit encoder '{self.name}'"
                raise BadOption("the prompts", name, problem)
        return {name: np.ascontiguousarray(getattr(prompts, name), np.float32) for name in shapes}


def _side_by_side(parts: Sequence[Values]) -> Values:
    """Return one part as it is, several with unit length side by side."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part / max(float(np.linalg.norm(part)), 1e-12) for part in parts])


def assets() -> Path:
    """Return the folder of the files in this package."""
    return Path(str(resources.files("coda_prompt"))) / "assets"


def load_encoder(text: str, *, download: bool = True) -> Encoder:
    """Load an encoder by name.

    Raises:
        UnknownName: There is no such encoder.
    """
    if text not in BUILT_IN:
        raise UnknownName("encoder", text, BUILT_IN)
    parts = [read_description(assets() / f"{name}.json") for name in BUILT_IN[text]]
    networks = [
        Network(network, assets(), checked=True) for part in parts for network in part.networks
    ]
    return Encoder(parts[0] if len(parts) == 1 else _combined(text, parts), networks)


def _combined(name: str, parts: Sequence[EncoderDescription]) -> EncoderDescription:
    """Return the description of the networks of several encoders as one."""
    fingerprints = "".join(f"{part.fingerprint}" for part in parts)
    changes = dict(
        name=name,
        licence="; ".join(f"{part.name}: {part.licence}" for part in parts),
        source="; ".join(f"{part.name}: {part.source}" for part in parts),
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        weights_fingerprint=None,
        networks=tuple(network for part in parts for network in part.networks),
    )
    return parts[0].model_copy(update=changes)

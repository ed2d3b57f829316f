"""From an image to its features: the ONNX graphs of one network or several."""

from __future__ import annotations

import hashlib
import re
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

from coda_prompt.encoder import made
from coda_prompt.encoder.catalog import CATALOG, parse_name
from coda_prompt.encoder.description import (
    EncoderDescription,
    Pixels,
    read_description,
    write_description,
)
from coda_prompt.encoder.network import Network, Values
from coda_prompt.errors import BadOption
from coda_prompt.images.preprocessing import required_min_side
from coda_prompt.storage.files import file_sha256, read_regular, write_atomically
from coda_prompt.storage.headers import read_checked_description

REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
"""Of the hub."""


TONES = 4
"""Numbers of a drawing beside its features: the mean and the deviation of its pixels, and how much
neighbours differ, down and across."""


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """What an encoder knows of an image."""

    features: Values
    """What classifiers read, D, of unit length."""
    plain: Values
    """What the unknown score reads: features without prompts, and of a drawing its `TONES`."""


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
    """Networks that turn an image into features of unit length; those of several are side by side.

    An image is always run by itself, so that no answer depends on others. `encode` can be called
    in many threads at a time.

    Args:
        description: What the JSON of the encoder says.
        networks: Its networks, in the order of the description.
        path: The local file or folder it was read or made from; None: embedded or downloaded.
        revision: Commit of the hub's repository; None: not downloaded.

    Example:
        >>> encoder = load_encoder("photo-vit")
        >>> features = encoder.encode(Image.open("cup.jpg")).features
    """

    def __init__(
        self,
        description: EncoderDescription,
        networks: Sequence[Network],
        path: Path | None = None,
        revision: str | None = None,
    ) -> None:
        self.description, self.networks = description, tuple(networks)
        self.path, self.revision = path, revision

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
        for network in self.networks:
            parts += [file_sha256(network.folder / name) for name in network.description.files]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def pixels(self) -> tuple[Pixels, ...]:
        """The input of each network."""
        return tuple(network.description.pixels for network in self.networks)

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(network.description.width for network in self.networks)

    @property
    def plain_width(self) -> int:
        """Number of values that the unknown score reads."""
        return self.width + (TONES if self.kind == "drawing" else 0)

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
        prompted = self.networks[0].description.prompted
        if prompted is None or len(self.networks) > 1:
            return None
        return prompted.blocks, prompted.length, prompted.width

    def views(self, image: Image.Image) -> list[Values]:
        """Return the preprocessed pixels of an image for each network, channels x size x size."""
        return [network.view(image) for network in self.networks]

    def encode(self, image: Image.Image, prompts: Prompts | None = None) -> EncodedImage:
        """Return the features of an image, under prompts if there are any.

        Raises:
            BadOption: The prompts do not fit the encoder.
            CorruptFile: A graph cannot be run.
        """
        views = self.views(image)
        if prompts is None:
            features = [
                network.run(view) for network, view in zip(self.networks, views, strict=True)
            ]
            joined = self._joined(features, min(image.size))
            return EncodedImage(joined, self._with_tones(joined, views[0]))
        outputs = self.networks[0].run_prompted(views[0], self._inputs(prompts))
        joined, plain = (self._joined([each], min(image.size)) for each in outputs)
        return EncodedImage(joined, self._with_tones(plain, views[0]))

    def _with_tones(self, plain: Values, view: Values) -> Values:
        """Append what `TONES` says of drawings: features say little about what is no drawing."""
        if self.kind == "photograph":
            return plain
        down, across = abs(np.diff(view, axis=1)).mean(), abs(np.diff(view, axis=2)).mean()
        return np.append(plain, [view.mean(), view.std(), down, across]).astype(np.float32)

    def _joined(self, parts: Sequence[Values], side: int) -> Values:
        """Return the features of each network with unit length side by side, of unit length.

        `side` is of the decoded image: one decoded at reduced size is not small.
        """
        weighted = []
        for network, part in zip(self.networks, parts, strict=True):
            small = network.description.small
            weight = small.weight if small is not None and side < small.below else 1.0
            weighted.append(weight * _unit(part))
        return _unit(np.concatenate(weighted))

    def prior(self) -> dict[str, NDArray[Any]] | None:
        """Return statistics of the images it was trained on: `covariance` and `class_means`.

        None if there are none for these weights.
        """
        if self.name not in CATALOG:
            return None
        path = _assets() / f"{self.name}-statistics.safetensors"
        if not path.is_file():
            return None
        content = path.read_bytes()
        description, _ = read_checked_description(content, path)
        known = (self.description.fingerprint, self.description.weights_fingerprint)
        if description is None or description["fingerprint"] not in known:
            return None
        return {name: values.astype(np.float64) for name, values in load(content).items()}

    def save(self, folder: Path) -> None:
        """Write graphs and JSON to a new or empty folder, whose path loads the encoder again.

        Raises:
            BadOption: The folder has files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadOption("", "out", f"{folder} is not empty; name a new folder")
        for network in self.networks:
            for name in network.description.files:
                write_atomically(folder / name, read_regular(network.folder / name))
        description = self.description.model_copy(update={"fingerprint": self.fingerprint})
        write_description(folder / made.DESCRIPTION, description)

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


def _unit(values: Values) -> Values:
    """Return values scaled to unit length."""
    return values / max(float(np.linalg.norm(values)), 1e-12)


def _assets() -> Path:
    """Return the folder of the files in this package."""
    return Path(str(resources.files("coda_prompt"))) / "assets"


def load_encoder(text: str, *, download: bool = True) -> Encoder:
    """Load an encoder.

    One that is not a ready encoder is made from its weights at the first use, which needs torch.

    Args:
        text: `NAME`, `NAME@SIZE` (pixels), `NAME=PATH`, `PATH` (a .safetensors file of weights, a
            .onnx file with a .json file beside it, a folder with `encoder.json`), or `OWNER/NAME`,
            a repository of the hub with `encoder.json`.
        download: Whether what is not on this machine may be downloaded.

    Raises:
        BackboneUnavailable: It cannot be downloaded.
        BadOption: The size does not fit.
        CorruptFile: A file is damaged or is no encoder.
        MissingData: There is no such file, or it would have to be downloaded without `download`.
        MissingExtra: It has to be made from weights, and torch is not installed.
        UnknownName: There is no such encoder.

    Example:
        >>> encoder = load_encoder("photo")
    """
    entry, size, path = parse_name(text, CATALOG)
    if entry is not None and entry.file is None and (size is not None or path is not None):
        problem = f"'{entry.name}' has one size and no weights to exchange; photo-vit has others"
        raise BadOption("the backbone", "name", problem)
    if path is not None:
        return _load_local(text, path, download, known=entry is not None)
    assert entry is not None
    if entry.repository is not None:
        folder, pin = made.from_hub(text, entry, download)
        return _read(folder / made.DESCRIPTION, name=text, revision=pin.revision)
    parts = [_read(_assets() / f"{name}.json", checked=True) for name in entry.networks]
    if size is None:
        return parts[0] if len(parts) == 1 else _side_by_side(text, parts)
    folder = made.from_embedded(text, f"{parts[0].description.weights_fingerprint}")
    return _read(folder / made.DESCRIPTION, name=text)


def _load_local(text: str, path: Path, download: bool, known: bool) -> Encoder:
    """Load an encoder from a folder, a graph or weights, or a repository of the hub."""
    if path.is_dir():
        return _read(path / made.DESCRIPTION, path=path)
    if path.suffix == ".onnx":
        return _read(path.with_suffix(".json"), path=path)
    if not known and not path.exists() and re.fullmatch(REPOSITORY, text):
        folder, pin = made.from_repository(text, download)
        return _read(folder / made.DESCRIPTION, name=text, revision=pin.revision)
    folder = made.from_file(text, path)
    name = text.partition("=")[0] if known else None
    return _read(folder / made.DESCRIPTION, name=name, path=path)


def _read(
    file: Path,
    *,
    name: str | None = None,
    path: Path | None = None,
    revision: str | None = None,
    checked: bool = False,
) -> Encoder:
    """Return the encoder that a JSON file describes, called `name` if that is given."""
    description = read_description(file)
    if name is not None:
        description = description.model_copy(update={"name": name})
    networks = [Network(each, file.parent, checked=checked) for each in description.networks]
    return Encoder(description, networks, path, revision)


def cached_encoder(fingerprint: str) -> Encoder | None:
    """Return an encoder that was made on this machine from weights; None: it was not."""
    folder = made.find_encoder(fingerprint)
    return None if folder is None else _read(folder / made.DESCRIPTION)


def _side_by_side(name: str, parts: Sequence[Encoder]) -> Encoder:
    """Return several encoders as one."""
    described = [part.description for part in parts]
    networks = [network for part in parts for network in part.networks]
    sources = [part.fingerprint for part in parts]
    sources += [f"{network.description.small!r}" for network in networks]
    changes = dict(
        name=name,
        licence="; ".join(f"{each.name}: {each.licence}" for each in described),
        source="; ".join(f"{each.name}: {each.source}" for each in described),
        fingerprint=hashlib.sha256("".join(sources).encode()).hexdigest(),
        weights_fingerprint=None,
        networks=tuple(network.description for network in networks),
    )
    return Encoder(described[0].model_copy(update=changes), networks)

"""The JSON beside an encoder's graphs: what they read, what they give, where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from coda_prompt.errors import CorruptFile, MissingData, bad_field
from coda_prompt.images.preprocessing import Preprocessing, Resize
from coda_prompt.storage.files import MAX_NOTE_BYTES, FileSchema, read_regular, write_atomically

MAX_SIZE, MAX_WIDTH, MAX_NETWORKS = 2048, 2**16, 4
REMEDY = "Export the encoder again (coda backbones export), or correct this file."

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,120}$")]
"""Of a file in the same folder: no separators, no leading dot."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class Pixels(FileSchema):
    """How an image becomes the input of a network."""

    size: int = Field(ge=1, le=MAX_SIZE)
    channels: Literal[1, 3]
    mean: tuple[Finite, ...]
    std: tuple[Positive, ...]
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
    resize: Resize = "crop"

    @model_validator(mode="after")
    def _one_value_a_channel(self) -> Pixels:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError("mean and std need one value for each channel")
        return self

    @property
    def preprocessing(self) -> Preprocessing:
        """The same for `eval_view`."""
        return Preprocessing(self.size, self.channels, self.mean, self.std, self.interpolation)


class PromptedGraph(FileSchema):
    """A graph with prompts as inputs: `components`, `keys` and `attention` beside `images`.

    Its outputs are `features`, and `plain`: the same without prompts.
    """

    file: FileName
    blocks: int = Field(ge=1, le=256)
    """Number of prompted blocks."""
    length: int = Field(ge=2, le=1024)
    """Rows of a prompt; half go to the keys of a block, half to the values."""
    width: Width
    """Channels of a row."""


class SmallImages(FileSchema):
    """Small images in which a network sees less than others do."""

    below: int = Field(ge=1, le=MAX_SIZE)
    """Pixels of the shorter side from which on an image is not small."""
    weight: float = Field(ge=0, le=1)
    """Length of the network's features of a small image; of others it is 1."""


class NetworkDescription(FileSchema):
    """One network: a graph from `images` (1 x channels x size x size) to features."""

    file: FileName
    weights: FileName | None = None
    """File with weights of the graphs; None: they are in the graphs."""
    prompted: PromptedGraph | None = None
    precision: Literal["int8", "float32"]
    pixels: Pixels
    features: Text = "features"
    """Name of the output."""
    width: Width
    """Number of features."""
    small: SmallImages | None = None
    """Other weight beside other networks; None: the same for all images."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files."""
        prompted = None if self.prompted is None else self.prompted.file
        return tuple(name for name in (self.file, self.weights, prompted) if name is not None)


class EncoderDescription(FileSchema):
    """An encoder: one or several networks."""

    format: Literal[1]
    name: Text
    kind: Literal["drawing", "photograph"]
    """Images it is for."""
    licence: Text
    source: Text
    """Where the weights come from."""
    fingerprint: Sha256 | None = None
    """Hash of the source weights, preprocessing and precision: another version of the exporter
    makes the same encoder. None: that of the files."""
    weights_fingerprint: Sha256 | None = None
    """Hash of the source weights alone; None: unknown."""
    networks: tuple[NetworkDescription, ...] = Field(min_length=1, max_length=MAX_NETWORKS)


def write_description(path: Path, description: EncoderDescription) -> None:
    """Write the JSON of an encoder."""
    content = description.model_dump_json(indent=2, exclude_none=True)
    write_atomically(path, content.encode() + b"\n")


def read_description(path: Path) -> EncoderDescription:
    """Read and check the JSON of an encoder.

    Raises:
        CorruptFile: It is not the description of an encoder.
        MissingData: It does not exist or cannot be read.
    """
    try:
        content = read_regular(path, MAX_NOTE_BYTES)
    except OSError as error:
        problem = f"the description of an encoder cannot be read ({error.strerror})"
        raise MissingData(path, problem, "It is a JSON file beside the graph.") from error
    try:
        return EncoderDescription.model_validate_json(content)
    except ValidationError as error:
        known = {"": EncoderDescription.model_fields, "networks": NetworkDescription.model_fields}
        field = bad_field("", error, known)
        raise CorruptFile(path, f"does not describe an encoder: {field}", REMEDY) from error

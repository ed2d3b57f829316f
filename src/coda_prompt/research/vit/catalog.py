"""Backbones by name: architecture, preprocessing and where their weights are.

A backbone is written `NAME`, `NAME@SIZE` (other input size), `NAME=PATH` (its weights in a local
file) or `PATH` (any `.safetensors` file).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import torch

from coda_prompt.encoder import catalog as encoders
from coda_prompt.encoder.download import fetch
from coda_prompt.errors import BadOption
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research.vit.vit import ViT, ViTConfig
from coda_prompt.research.vit.weights import (
    convert_checkpoint,
    expected_layout,
    infer_config,
    load_weights,
    read_description,
    read_layout,
    read_weights,
    write_weights,
)
from coda_prompt.storage.files import file_sha256

__all__ = [
    "CATALOG",
    "Backbone",
    "LoadedBackbone",
    "convert_checkpoint",
    "load_backbone",
    "load_weights",
    "read_weights",
    "write_weights",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backbone:
    """A named set of weights."""

    name: str
    description: str
    file: str
    repository: str | None
    """Hub repository of `file`; None if the file is embedded in this package."""
    config: ViTConfig | None
    """None if stated in the file's metadata, as in embedded files."""
    preprocessing: Preprocessing | None
    """None if stated in the file's metadata."""
    classes: int = 0
    """Rows of the classifier in the file, which is not used; 0: none."""


@dataclass(frozen=True, eq=False)
class LoadedBackbone:
    """A frozen ViT in evaluation mode and its origin."""

    name: str
    """As in the catalogue, with the size if one was given; of an unknown file, its path."""
    vit: ViT
    preprocessing: Preprocessing
    sha256: str
    revision: str | None
    """Commit of the hub repository; None if the file was not downloaded."""
    path: Path | None = None
    """The local file; None if it is embedded or was downloaded."""
    known_fingerprint: InitVar[str | None] = None
    """Of an embedded file: hashing it as float32 takes longer than loading it. `replace` with
    another ViT does not copy it."""

    def __post_init__(self, known_fingerprint: str | None) -> None:
        if known_fingerprint is not None:
            self.__dict__["fingerprint"] = known_fingerprint

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the weights."""
        return self.vit.fingerprint()


_FINGERPRINTS = MappingProxyType(
    {
        "7d73299c9d5df6fcb72811af9ec896ffe0df231953b27f91b1769a27e3f5039d": (  # photo
            "836805752e92d4cd6b03af427962c2786778f1e8141c69be1104695b8d840387"
        ),
        "7aa34708e6c475aa0efdac3d5e071ce2abb8bf40c6d8e8dc7d521f51ff2f343d": (  # pocket
            "2a25eb51555199f24214c555299d1a2e33175e77874ccecf289dbbbdfd9e7872"
        ),
    }
)
"""Hashes of the embedded files -> hashes of their weights at their own image size."""


_TINY = ViTConfig(width=192, heads=3, mlp_width=768)
_SMALL = ViTConfig(width=384, heads=6, mlp_width=1536)
_BASE = ViTConfig()
# The 37 x 37 positions in the file (518 px images) are resampled to 16 x 16.
_SMALL_14 = ViTConfig(patch_size=14, width=384, heads=6, mlp_width=1536, layer_scale=True)
_CLIP = ViTConfig(pre_norm=True, norm_eps=1e-5)
_BASE_ROTARY = ViTConfig(image_size=256, registers=4, layer_scale=True, norm_eps=1e-5, rotary=True)
_ON_HUB = {
    "vit-b16-in1k": _BASE,
    "vit-b16-in21k": _BASE,
    "deit-tiny": _TINY,
    "deit-small": _SMALL,
    "dino-s16": _SMALL,
    "dino-b16": _BASE,
    "dinov2-s14": _SMALL_14,
    "dinov2-s14-reg": replace(_SMALL_14, registers=4, position_for_class=False),
    "dinov3-s16": replace(_BASE_ROTARY, width=384, heads=6, mlp_width=1536),
    "dinov3-b16": _BASE_ROTARY,
    "mae-b16": _BASE,
    "clip-b16-openai": replace(_CLIP, quick_gelu=True),
    "clip-b16-laion2b": _CLIP,
}


CATALOG: Mapping[str, Backbone] = MappingProxyType(
    {
        entry.name: Backbone(
            name=entry.name,
            description=entry.description,
            file=entry.file,
            repository=entry.repository,
            config=_ON_HUB.get(entry.name),
            preprocessing=entry.preprocessing,
            classes=entry.classes,
        )
        for entry in encoders.CATALOG.values()
        if entry.file is not None
    }
    # Until torch's learner is gone, whose `photo` is the ViT alone.
    | {"photo": Backbone("photo", "photo-vit", "photo-vit.safetensors", None, None, None)}
)
"""The encoders that are a ViT, with weights to train on."""


def load_backbone(
    text: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    download: bool = True,
) -> LoadedBackbone:
    """Load a frozen backbone by name, from a local file, or both.

    A file's metadata state architecture and preprocessing; otherwise they are those of the named
    backbone, else of the one in the catalogue with the same tensors, else inferred with a warning.

    Args:
        text: `NAME`, `NAME@SIZE` (pixels; positions are resampled), `NAME=PATH` or `PATH`.
        cache: Folder of the hub's cache; by default that of huggingface_hub.
        endpoint: URL of the hub; by default that of huggingface_hub.
        download: Whether weights may be downloaded that are not in the cache.

    Raises:
        BadOption: The size does not fit the patches.
        UnknownName: There is no such backbone.
        BackboneUnavailable: The weights cannot be downloaded.
        MissingData: They would have to be downloaded without `download`.
        WeightsMismatch: A file does not have the tensors of the named backbone.

    Example:
        >>> backbone = load_backbone("photo-vit@224")
        >>> features = backbone.vit.features(images)
    """
    backbone, size, local = encoders.parse_name(text, CATALOG)
    name, pin = text.partition("=")[0] if backbone else text, None
    with contextlib.ExitStack() as stack:
        if local is not None:
            path = local
            config, preprocessing, recognised = _describe(path, backbone)
            name = name if backbone else recognised or text
        elif backbone is not None and backbone.repository is not None:
            path, pin = fetch(
                *(backbone.name, backbone.repository, backbone.file),
                cache=cache, endpoint=endpoint, download=download,
            )  # fmt: skip
            config, preprocessing = _architecture(backbone)
        else:
            assert backbone is not None
            path = stack.enter_context(_embedded_file(backbone))
            config, preprocessing = _architecture(backbone)
        if size is not None:
            config, preprocessing = _resized(config, preprocessing, size)
        with torch.device("meta"):
            vit = ViT(config)
        load_weights(vit, path)
        vit.requires_grad_(False).eval()
        sha256, revision = (pin.sha256, pin.revision) if pin else (file_sha256(path), None)
    fingerprint = _FINGERPRINTS.get(sha256) if size is None else None
    return LoadedBackbone(name, vit, preprocessing, sha256, revision, local, fingerprint)


def _resized(
    config: ViTConfig, preprocessing: Preprocessing, size: int
) -> tuple[ViTConfig, Preprocessing]:
    """Return the same architecture for images of another size."""
    if config.stem or size % config.patch_size or not size:
        problem = f"{size} px is not a multiple of its patches of {config.patch_size} px"
        raise BadOption("the backbone", "size", problem)
    return replace(config, image_size=size), replace(preprocessing, size=size)


def _describe(path: Path, named: Backbone | None) -> tuple[ViTConfig, Preprocessing, str | None]:
    """Return architecture, preprocessing and the name of a file that is known by its tensors."""
    config, preprocessing = read_description(path)
    if config is not None and preprocessing is not None:
        return config, preprocessing, None
    candidates = [named] if named else _recognise(path)
    if candidates:
        config_named, preprocessing_named = _architecture(candidates[0])
        name = candidates[0].name if len(candidates) == 1 else None
        return config or config_named, preprocessing or preprocessing_named, name
    config = config or infer_config(path)
    half = (0.5,) * config.channels
    preprocessing = preprocessing or Preprocessing(config.image_size, config.channels, half, half)
    log.warning(
        "%s does not state its architecture and preprocessing, and its tensors are not those of "
        "one backbone in the catalogue. Assumed: %s; %s. If that is wrong, name the backbone it "
        "belongs to: NAME=%s ('coda backbones' lists the names).",
        path,
        config,
        preprocessing,
        path,
    )
    return config, preprocessing, None


def _recognise(path: Path) -> list[Backbone]:
    """Return the backbones with the tensors of a file, if they are one architecture and input."""
    shapes, classes = read_layout(path)
    same = [
        backbone
        for backbone in CATALOG.values()
        if backbone.config is not None and expected_layout(backbone.config) == shapes
    ]
    candidates = [backbone for backbone in same if backbone.classes == classes] or same
    kinds = {(backbone.config, backbone.preprocessing) for backbone in candidates}
    return candidates if len(kinds) == 1 else []


def _architecture(backbone: Backbone) -> tuple[ViTConfig, Preprocessing]:
    if backbone.config is not None and backbone.preprocessing is not None:
        return backbone.config, backbone.preprocessing
    with _embedded_file(backbone) as path:
        config, preprocessing, _ = _describe(path, None)
        return config, preprocessing


@contextlib.contextmanager
def _embedded_file(backbone: Backbone) -> Iterator[Path]:
    asset = resources.files("coda_prompt") / "assets" / backbone.file
    with resources.as_file(asset) as path:
        yield path

"""Backbones by name: architecture, preprocessing and where their weights are.

The path of a `.safetensors` file can be used instead of a name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import torch

from coda_prompt.errors import BadOption, UnknownName
from coda_prompt.model import download
from coda_prompt.model.vit import ViT, ViTConfig
from coda_prompt.model.weights import (
    infer_config,
    load_weights,
    read_description,
    read_weights,
    write_weights,
)
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.storage.files import file_sha256

__all__ = [
    "CATALOG",
    "Backbone",
    "LoadedBackbone",
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


@dataclass(frozen=True, eq=False)
class LoadedBackbone:
    """A frozen ViT in evaluation mode and its origin."""

    name: str
    vit: ViT
    preprocessing: Preprocessing
    sha256: str
    revision: str | None
    """Commit of the hub repository; None if the file was not downloaded."""


_TINY = ViTConfig(width=192, heads=3, mlp_width=768)
_SMALL = ViTConfig(width=384, heads=6, mlp_width=1536)
_BASE = ViTConfig()
# The 37 x 37 positions in the file (518 px images) are resampled to 16 x 16.
_SMALL_14 = ViTConfig(patch_size=14, width=384, heads=6, mlp_width=1536, layer_scale=True)
_SMALL_14_REGISTERS = ViTConfig(
    patch_size=14,
    width=384,
    heads=6,
    mlp_width=1536,
    layer_scale=True,
    registers=4,
    position_for_class=False,
)

_MEAN_STD_HALF = Preprocessing()
_IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def _on_hub(
    name: str, repository: str, config: ViTConfig, preprocessing: Preprocessing, description: str
) -> Backbone:
    return Backbone(
        name, description, "model.safetensors", f"timm/{repository}", config, preprocessing
    )


_BACKBONES = (
    Backbone(
        "pocket",
        "small ViT embedded in this package; no download",
        "pocket-vit.safetensors",
        None,
        None,
        None,
    ),
    _on_hub(
        "vit-b16-in1k",
        "vit_base_patch16_224.augreg_in21k_ft_in1k",
        _BASE,
        _MEAN_STD_HALF,
        "ViT-B/16 of the paper, ImageNet-21k then ImageNet-1k; about 346 MB",
    ),
    _on_hub(
        "vit-b16-in21k",
        "vit_base_patch16_224.augreg_in21k",
        _BASE,
        _MEAN_STD_HALF,
        "ViT-B/16, ImageNet-21k only; about 410 MB",
    ),
    _on_hub(
        "deit-tiny",
        "deit_tiny_patch16_224.fb_in1k",
        _TINY,
        _IMAGENET,
        "DeiT-Tiny/16, ImageNet-1k; about 23 MB",
    ),
    _on_hub(
        "deit-small",
        "deit_small_patch16_224.fb_in1k",
        _SMALL,
        _IMAGENET,
        "DeiT-Small/16, ImageNet-1k; about 88 MB",
    ),
    _on_hub(
        "dino-s16",
        "vit_small_patch16_224.dino",
        _SMALL,
        _IMAGENET,
        "DINO ViT-S/16, self-supervised on ImageNet-1k; about 87 MB",
    ),
    _on_hub(
        "dino-b16",
        "vit_base_patch16_224.dino",
        _BASE,
        _IMAGENET,
        "DINO ViT-B/16, self-supervised on ImageNet-1k; about 343 MB",
    ),
    _on_hub(
        "dinov2-s14",
        "vit_small_patch14_dinov2.lvd142m",
        _SMALL_14,
        _IMAGENET,
        "DINOv2 ViT-S/14, self-supervised on LVD-142M; about 88 MB",
    ),
    _on_hub(
        "dinov2-s14-reg",
        "vit_small_patch14_reg4_dinov2.lvd142m",
        _SMALL_14_REGISTERS,
        _IMAGENET,
        "DINOv2 ViT-S/14 with 4 registers, self-supervised on LVD-142M; about 88 MB",
    ),
    _on_hub(
        "mae-b16",
        "vit_base_patch16_224.mae",
        _BASE,
        _IMAGENET,
        "MAE ViT-B/16, self-supervised on ImageNet-1k, licence CC BY-NC 4.0; about 343 MB",
    ),
)

CATALOG: Mapping[str, Backbone] = MappingProxyType(
    {backbone.name: backbone for backbone in _BACKBONES}
)


def load_backbone(
    name_or_path: str,
    like: str | None = None,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> LoadedBackbone:
    """Load a frozen backbone by name or from a `.safetensors` file.

    Args:
        name_or_path: a name in `CATALOG`, or a path.
        like: for a path, the named backbone whose architecture and preprocessing apply if the
            file's metadata does not state them. By default they are inferred, with a warning.
        cache: folder of the hub's cache; by default that of huggingface_hub.
        endpoint: URL of the hub; by default that of huggingface_hub.

    Raises:
        UnknownName: there is no such backbone.
        BackboneUnavailable: the weights cannot be downloaded.

    Example:
        >>> backbone = load_backbone("pocket")
        >>> features = backbone.vit.features(images)
    """
    if name_or_path not in CATALOG:
        if not _looks_like_path(name_or_path):
            raise UnknownName("backbone", name_or_path, CATALOG)
        return _load(name_or_path, Path(name_or_path), *_describe(Path(name_or_path), like))
    if like is not None:
        problem = f"is for weights given by path; '{name_or_path}' is a named backbone"
        raise BadOption("the backbone", "like", problem)
    backbone = CATALOG[name_or_path]
    if backbone.repository is None:
        with _embedded(backbone) as path:
            return _load(backbone.name, path, *_describe(path))
    path, pin = download.fetch(
        backbone.name, backbone.repository, backbone.file, cache=cache, endpoint=endpoint
    )
    return _load(backbone.name, path, *_architecture(backbone), pin)


def _load(
    name: str,
    path: Path,
    config: ViTConfig,
    preprocessing: Preprocessing,
    pin: download.Pin | None = None,
) -> LoadedBackbone:
    with torch.device("meta"):
        vit = ViT(config)
    load_weights(vit, path)
    vit.requires_grad_(False).eval()
    if pin is None:
        return LoadedBackbone(name, vit, preprocessing, file_sha256(path), None)
    return LoadedBackbone(name, vit, preprocessing, pin.sha256, pin.revision)


def _describe(path: Path, like: str | None = None) -> tuple[ViTConfig, Preprocessing]:
    """Return architecture and preprocessing: from the metadata, else of `like`, else inferred."""
    config, preprocessing = read_description(path)
    if like is not None:
        if like not in CATALOG:
            raise UnknownName("backbone", like, CATALOG)
        like_config, like_preprocessing = _architecture(CATALOG[like])
        return config or like_config, preprocessing or like_preprocessing
    if config is None:
        config = infer_config(path)
        log.warning(
            "%s does not state its architecture. Inferred from its tensors: %s. If that is wrong, "
            "name a backbone with the same architecture.",
            path,
            config,
        )
    if preprocessing is None:
        half = (0.5,) * config.channels
        preprocessing = Preprocessing(config.image_size, config.channels, half, half)
        log.warning(
            "%s does not state its preprocessing. Assumed: %d x %d pixels, mean 0.5, std 0.5.",
            path,
            preprocessing.size,
            preprocessing.size,
        )
    return config, preprocessing


def _architecture(backbone: Backbone) -> tuple[ViTConfig, Preprocessing]:
    if backbone.config is not None and backbone.preprocessing is not None:
        return backbone.config, backbone.preprocessing
    with _embedded(backbone) as path:
        return _describe(path)


@contextmanager
def _embedded(backbone: Backbone) -> Iterator[Path]:
    asset = resources.files("coda_prompt") / "assets" / backbone.file
    with resources.as_file(asset) as path:
        yield path


def _looks_like_path(text: str) -> bool:
    return text.endswith(".safetensors") or Path(text).name != text or Path(text).is_file()

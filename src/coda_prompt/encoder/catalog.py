"""Encoders by name: what they are for, their licence, and where they come from.

An encoder is written `NAME`, `NAME@SIZE` (other input size), `NAME=PATH` (its weights in a local
file), `PATH` (weights, a graph or a folder) or `OWNER/NAME` (a repository of the hub).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from coda_prompt.errors import BadOption, UnknownName
from coda_prompt.images.preprocessing import Preprocessing

Entry = TypeVar("Entry")
FILES = (".safetensors", ".onnx")


@dataclass(frozen=True)
class CatalogEntry:
    """An encoder with a name."""

    name: str
    description: str
    licence: str
    networks: tuple[str, ...] = ()
    """Embedded encoders that it consists of: itself, or several; of the hub's, none."""
    file: str | None = None
    """Weights of a ViT; None: it is no ViT, or several networks."""
    repository: str | None = None
    """Hub repository of `file`, from which its graphs are made once; None: it is embedded."""
    preprocessing: Preprocessing | None = None
    """Of the weights on the hub; embedded files state it themselves."""
    classes: int = 0
    """Rows of the classifier in the weights on the hub, which is not used; 0: none."""


def _embedded(
    name: str, description: str, licence: str, file: str | None = None, *networks: str
) -> CatalogEntry:
    return CatalogEntry(name, f"{description}; no download", licence, networks or (name,), file)


def _on_hub(
    name: str,
    repository: str,
    preprocessing: Preprocessing,
    megabytes: int,
    description: str,
    licence: str = "Apache-2.0",
    classes: int = 0,
) -> CatalogEntry:
    description = f"{description}; about {megabytes} MB"
    file, repository = "model.safetensors", f"timm/{repository}"
    return CatalogEntry(name, description, licence, (), file, repository, preprocessing, classes)


_MEAN_STD_HALF = Preprocessing()
_IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_IMAGENET_256 = replace(_IMAGENET, size=256)
_MEAN_STD_CLIP = Preprocessing(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
_RESEARCH = "trained on ImageNet: non-commercial research and education"
_PHOTO = f"MIT and Apache-2.0; {_RESEARCH}"
_B16, _DINO = "vit_base_patch16_224", "self-supervised on ImageNet-1k"
_DINOV2 = "self-supervised on LVD-142M"
_DINOV3 = "self-supervised on LVD-1689M, DINOv3 licence, unverified"
_ENTRIES = (
    _embedded("pocket", "small ViT for drawings", "Apache-2.0; trained on drawings under CC BY 4.0",
              "pocket-vit.safetensors"),
    _embedded("photo", "photo-vit and photo-lite side by side, for photographs", _PHOTO,
              None, "photo-vit", "photo-lite"),
    _embedded("photo-vit", "ViT-S/14 for photographs", _PHOTO, "photo-vit.safetensors"),
    _embedded("photo-lite", "small CNN for photographs, licensed for commercial use", "Apache-2.0"),
    _on_hub("vit-b16-in1k", f"{_B16}.augreg_in21k_ft_in1k", _MEAN_STD_HALF, 346,
            "ViT-B/16 of the paper, ImageNet-21k then ImageNet-1k", classes=1000),
    _on_hub("vit-b16-in21k", f"{_B16}.augreg_in21k", _MEAN_STD_HALF, 410,
            "ViT-B/16, ImageNet-21k only", classes=21843),
    _on_hub("deit-tiny", "deit_tiny_patch16_224.fb_in1k", _IMAGENET, 23,
            "DeiT-Tiny/16, ImageNet-1k", classes=1000),
    _on_hub("deit-small", "deit_small_patch16_224.fb_in1k", _IMAGENET, 88,
            "DeiT-Small/16, ImageNet-1k", classes=1000),
    _on_hub("dino-s16", "vit_small_patch16_224.dino", _IMAGENET, 87, f"DINO ViT-S/16, {_DINO}"),
    _on_hub("dino-b16", f"{_B16}.dino", _IMAGENET, 343, f"DINO ViT-B/16, {_DINO}"),
    _on_hub("dinov2-s14", "vit_small_patch14_dinov2.lvd142m", _IMAGENET, 88,
            f"DINOv2 ViT-S/14, {_DINOV2}"),
    _on_hub("dinov2-s14-reg", "vit_small_patch14_reg4_dinov2.lvd142m", _IMAGENET, 88,
            f"DINOv2 ViT-S/14 with 4 registers, {_DINOV2}"),
    _on_hub("dinov3-s16", "vit_small_patch16_dinov3.lvd1689m", _IMAGENET_256, 86,
            f"DINOv3 ViT-S/16, {_DINOV3}", "DINOv3 licence"),
    _on_hub("dinov3-b16", "vit_base_patch16_dinov3.lvd1689m", _IMAGENET_256, 343,
            f"DINOv3 ViT-B/16, {_DINOV3}", "DINOv3 licence"),
    _on_hub("mae-b16", f"{_B16}.mae", _IMAGENET, 343,
            f"MAE ViT-B/16, {_DINO}, licence CC BY-NC 4.0", "CC BY-NC 4.0"),
    _on_hub("clip-b16-openai", "vit_base_patch16_clip_224.openai", _MEAN_STD_CLIP, 345,
            "OpenAI's CLIP ViT-B/16 before the projection, unverified", "MIT", 512),
    _on_hub("clip-b16-laion2b", "vit_base_patch16_clip_224.laion2b", _MEAN_STD_CLIP, 345,
            "OpenCLIP ViT-B/16 on LAION-2B before the projection, unverified", "MIT", 512),
)  # fmt: skip

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def parse_name(
    text: str, known: Mapping[str, Entry]
) -> tuple[Entry | None, int | None, Path | None]:
    """Split `NAME`, `NAME@SIZE`, `NAME=PATH`, `NAME@SIZE=PATH` or `PATH` into its parts.

    Raises:
        BadOption: The size is not a number.
        UnknownName: It is neither a name in `known` nor a path.
    """
    before, equals, path = text.partition("=")
    name, at, size = before.partition("@")
    if name not in known:
        misnamed = bool(equals) and Path(before).name == before and not Path(text).is_file()
        if misnamed or not _looks_like_path(text):
            raise UnknownName("backbone", name, known)
        return None, None, Path(text)
    if (at and not re.fullmatch("[0-9]{1,5}", size)) or (equals and not path):
        problem = f"'{text}' is none of NAME, NAME@SIZE, NAME=PATH and PATH"
        raise BadOption("the backbone", "name", problem)
    return known[name], int(size) if at else None, Path(path) if equals else None


def _looks_like_path(text: str) -> bool:
    return text.endswith(FILES) or Path(text).name != text or Path(text).exists()

"""ViT weights in safetensors files with timm's parameter names.

The metadata of files written here describe the architecture (`vit`) and the preprocessing
(`pixels`) as JSON; for other files both can be inferred.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from coda_prompt.errors import CorruptFile, MissingData, WeightsMismatch, join_names
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research.vit.vit import ViT, ViTConfig, resize_positions
from coda_prompt.storage.files import write_atomically

log = logging.getLogger(__name__)

Description = TypeVar("Description", ViTConfig, Preprocessing)
Value = TypeVar("Value")
Layout = dict[str, tuple[int, ...]]
"""Names and shapes of tensors."""

PICKLED = (".pth", ".pt", ".bin", ".ckpt")
"""Endings of PyTorch checkpoints."""
CHECKPOINT_ENTRIES = ("model", "state_dict", "model_state_dict", "teacher", "student", "module")
"""Where checkpoints have their weights, first match first."""
_FIRST_MLP = "blocks.0.mlp.fc1.weight"


def read_weights(path: Path, vit: ViT) -> dict[str, Tensor]:
    """Read float32 weights for a ViT.

    A classifier head and DINOv2's mask token are ignored. DINOv2's own parameter names are accepted
    as well as timm's, and the position embedding is resampled to the grid of the ViT.

    Raises:
        WeightsMismatch: a parameter is missing or unknown, or has another shape.
        CorruptFile: the file is damaged or has other than floating-point weights.
        MissingData: the file does not exist or cannot be read.
    """
    tensors = _drop_unused(path, _read_tensors(path))
    config, expected = vit.config, _shapes(vit)
    for name in _absent_biases(config) - tensors.keys():
        tensors[name] = torch.zeros(expected[name])
    if "reg_token" in expected and "register_tokens" in tensors:
        tensors["reg_token"] = tensors.pop("register_tokens")
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unexpected:
        kinds = (("missing", missing), ("unexpected", unexpected))
        parts = [f"{kind} {join_names(sorted(keys))}" for kind, keys in kinds if keys]
        raise WeightsMismatch(path, f"does not fit the architecture: {'; '.join(parts)}")
    weights = {name: _as_float32(path, name, tensors[name]) for name in expected}
    _resample_positions(weights, config)
    for name, shape in expected.items():
        if weights[name].shape != shape:
            problem = (
                f"'{name}' has shape {tuple(weights[name].shape)}, the architecture needs {shape}"
            )
            raise WeightsMismatch(path, problem)
    return weights


def load_weights(vit: ViT, path: Path) -> None:
    """Load a file into a ViT; a ViT on the meta device takes over the tensors without a copy."""
    vit.load_state_dict(read_weights(path, vit), assign=vit.cls_token.is_meta)


def write_weights(path: Path, vit: ViT, preprocessing: Preprocessing) -> None:
    """Write weights with a description of architecture and preprocessing, atomically."""
    metadata = {
        "format": "pt",
        "vit": json.dumps(dataclasses.asdict(vit.config)),
        "pixels": json.dumps(dataclasses.asdict(preprocessing)),
    }
    tensors = {name: tensor.contiguous() for name, tensor in vit.state_dict().items()}
    write_atomically(path, save(tensors, metadata))


def convert_checkpoint(source: Path, target: Path) -> None:
    """Write the tensors of a PyTorch checkpoint as a safetensors file, without running its code.

    The weights may be in an entry such as `model` or `state_dict`, and have a common prefix such as
    `module.` or `backbone.` in their names.

    Raises:
        CorruptFile: It is not a checkpoint of a ViT, or has other objects than tensors.
        MissingData: It does not exist.
    """
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise MissingData(source, "file not found", "Check the path of the checkpoint.") from error
    except Exception as error:  # damaged files raise anything
        problem = "cannot be read: it is not a PyTorch checkpoint"
        if "GLOBAL" in str(error):
            problem = "cannot be read: it has Python objects that are no tensors"
        remedy = "Name a file with weights only: torch.save(model.state_dict(), PATH)."
        raise CorruptFile(source, problem, remedy) from error
    while isinstance(content, Mapping) and not any(name.endswith("cls_token") for name in content):
        inner = [content[key] for key in CHECKPOINT_ENTRIES if key in content]
        content = inner[0] if inner else None
    if not isinstance(content, Mapping):
        raise CorruptFile(source, "has no weights of a ViT (no cls_token)")
    prefix = min((name for name in content if name.endswith("cls_token")), key=len)[:-9]
    tensors = {
        name.removeprefix(prefix): value.detach().clone().contiguous()
        for name, value in content.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }
    write_atomically(target, save(tensors, {"format": "pt"}))


def read_description(path: Path) -> tuple[ViTConfig | None, Preprocessing | None]:
    """Return architecture and preprocessing from the file's metadata; None if not stated."""
    with _open(path) as file:
        metadata = file.metadata() or {}
    return (
        _parse_description(path, ViTConfig, metadata["vit"]) if "vit" in metadata else None,
        _parse_description(path, Preprocessing, metadata["pixels"])
        if "pixels" in metadata
        else None,
    )


def read_layout(path: Path) -> tuple[Layout, int]:
    """Return the shapes of a ViT's tensors for any square grid, and the rows of its classifier."""
    with _open(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    classes = shapes.get("head.weight", (0,))[0]
    layout = _drop_unused(path, shapes)
    if "register_tokens" in layout:
        layout["reg_token"] = layout.pop("register_tokens")
    return _for_any_grid(layout), classes


def expected_layout(config: ViTConfig) -> Layout:
    """Return what `read_layout` finds in a file of this architecture."""
    absent = _absent_biases(config)
    with torch.device("meta"):
        shapes = _shapes(ViT(config))
    return _for_any_grid({name: s for name, s in shapes.items() if name not in absent})


def _absent_biases(config: ViTConfig) -> set[str]:
    """Return biases that files of CLIP and DINOv3 do not have; they are zero."""
    attention = (f"blocks.{index}.attn.qkv.bias" for index in range(config.depth))
    return {*(attention if config.rotary else ()), *(["patch_embed.proj.bias"] * config.pre_norm)}


def _for_any_grid(layout: Layout) -> Layout:
    shape = layout.get("pos_embed", ())
    if len(shape) == 3 and (_is_square(shape[1]) or _is_square(shape[1] - 1)):
        return layout | {"pos_embed": (shape[0], 0, shape[2])}
    return layout


def _shapes(vit: ViT) -> Layout:
    return {name: tuple(tensor.shape) for name, tensor in vit.state_dict().items()}


def infer_config(path: Path) -> ViTConfig:
    """Infer the architecture from shapes, assuming heads of 64 channels and eps 1e-6."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _read_tensors(path).items()}
    for name, axes in (("patch_embed.proj.weight", 4), ("pos_embed", 3), (_FIRST_MLP, 2)):
        if len(shapes.get(name, ())) != axes:
            raise WeightsMismatch(path, f"it has no '{name}' with {axes} axes, unlike a ViT")
    width, channels, patch, patch_width = shapes["patch_embed.proj.weight"]
    rows = shapes["pos_embed"][1]
    position_for_class = not _is_square(rows)
    if not _is_square(rows - position_for_class) or patch != patch_width:
        problem = f"{rows} position rows and {patch}x{patch_width} patches are not a square image"
        raise WeightsMismatch(path, problem)
    if width % 64:
        raise WeightsMismatch(path, f"width {width} is not a multiple of 64, the size of a head")
    registers = shapes.get("reg_token", shapes.get("register_tokens", ()))
    return ViTConfig(
        image_size=math.isqrt(rows) * patch,
        patch_size=patch,
        channels=channels,
        width=width,
        depth=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        heads=width // 64,
        mlp_width=shapes[_FIRST_MLP][0],
        registers=registers[1] if len(registers) == 3 else 0,
        layer_scale="blocks.0.ls1.gamma" in shapes,
        position_for_class=position_for_class,
    )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if not path.is_file():
        remedy = "Use the path of a .safetensors file or the name of a backbone."
        raise MissingData(path, "there is no such file", remedy)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        if path.suffix in PICKLED:
            remedy = f"Convert it: coda convert {path} {path.with_suffix('.safetensors')}"
            raise CorruptFile(path, "is not a safetensors file", remedy) from error
        raise CorruptFile(path, f"is truncated or not a safetensors file ({error})") from error
    except OSError as error:
        raise MissingData(path, f"cannot be read ({error})", "Check its permissions.") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors, memory-mapped."""
    with _open(path) as file:
        names: list[str] = file.keys()
        return {name: file.get_tensor(name) for name in names}


def _drop_unused(path: Path, tensors: dict[str, Value]) -> dict[str, Value]:
    """Drop the classifier head and DINOv2's mask token, which features do not depend on."""
    heads = sorted(name for name in tensors if name.startswith(("head.", "head_dist.")))
    if heads:
        log.info("%s: ignoring the classifier head (%s)", path, ", ".join(heads))
    if "mask_token" in tensors:
        log.info("%s: ignoring mask_token, which is used in pre-training only", path)
    return {
        re.sub(r"gamma_([12])$", r"ls\1.gamma", name): tensors[name]  # as in timm's DINOv3
        for name in tensors.keys() - {*heads, "mask_token"}
    }


def _as_float32(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise CorruptFile(path, f"'{name}' has {tensor.dtype}, not floating-point weights")
    # A copy: a memory-mapped tensor would change when the file changes.
    return tensor.to(torch.float32, copy=True)


def _resample_positions(weights: dict[str, Tensor], config: ViTConfig) -> None:
    """Resample `pos_embed` to the grid of `config` if it is a square grid."""
    if config.rotary:
        return
    token, position = weights["cls_token"], weights["pos_embed"]
    if token.shape != (1, 1, config.width) or position.shape[::2] != (1, config.width):
        return
    if not config.position_for_class and _is_square(position.shape[1] - 1):
        # DINOv2's own files have a row for the class token; timm adds it to the token itself.
        weights["cls_token"] = token + position[:, :1]
        position = position[:, 1:]
    if _is_square(position.shape[1] - config.position_for_class):
        position = resize_positions(position, config)
    weights["pos_embed"] = position


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


MAX_VALUES = {"depth": 256, "image_size": 2048, "size": 2048, "channels": 64}
MIN_VALUES = {"registers": 0}
"""Limits for the metadata: a model is allocated before its tensors are compared."""


def _parse_description(path: Path, kind: type[Description], text: str) -> Description:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(path, f"its metadata is not JSON ({error})") from error
    if not isinstance(fields, Mapping):
        raise CorruptFile(path, f"its metadata does not describe a {kind.__name__}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if name not in defaults or type(value) is not type(defaults[name]):
            problem = f"its metadata has an invalid {kind.__name__} field: {name} = {value!r}"
            raise CorruptFile(path, problem)
        if type(value) is int and not MIN_VALUES.get(name, 1) <= value <= MAX_VALUES.get(
            name, 1 << 16
        ):
            raise CorruptFile(path, f"its metadata has an impossible {name} = {value}")
    return kind(**values)

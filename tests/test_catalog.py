"""Backbones by name or path: valid and invalid files, downloads and pinned versions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from small import coda
from torch import Tensor

from coda_prompt import errors
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research.vit.catalog import (
    CATALOG,
    LoadedBackbone,
    convert_checkpoint,
    load_backbone,
    load_weights,
    read_weights,
    write_weights,
)
from coda_prompt.research.vit.vit import ViT, ViTConfig, resize_positions
from coda_prompt.research.vit.weights import expected_layout

TIMM = Path(__file__).parent / "fixtures" / "timm"

Shapes = dict[str, tuple[int, ...]]

# timm's keys and shapes, for one block of each width and for each whole model.
VIT_TINY_BLOCK: Shapes = {
    "norm1.weight": (192,),
    "norm1.bias": (192,),
    "attn.qkv.weight": (576, 192),
    "attn.qkv.bias": (576,),
    "attn.proj.weight": (192, 192),
    "attn.proj.bias": (192,),
    "norm2.weight": (192,),
    "norm2.bias": (192,),
    "mlp.fc1.weight": (768, 192),
    "mlp.fc1.bias": (768,),
    "mlp.fc2.weight": (192, 768),
    "mlp.fc2.bias": (192,),
}
DINOV2_SMALL_BLOCK: Shapes = {
    "norm1.weight": (384,),
    "norm1.bias": (384,),
    "attn.qkv.weight": (1152, 384),
    "attn.qkv.bias": (1152,),
    "attn.proj.weight": (384, 384),
    "attn.proj.bias": (384,),
    "ls1.gamma": (384,),
    "norm2.weight": (384,),
    "norm2.bias": (384,),
    "mlp.fc1.weight": (1536, 384),
    "mlp.fc1.bias": (1536,),
    "mlp.fc2.weight": (384, 1536),
    "mlp.fc2.bias": (384,),
    "ls2.gamma": (384,),
}
VIT_BASE_BLOCK: Shapes = {
    "norm1.weight": (768,),
    "norm1.bias": (768,),
    "attn.qkv.weight": (2304, 768),
    "attn.qkv.bias": (2304,),
    "attn.proj.weight": (768, 768),
    "attn.proj.bias": (768,),
    "norm2.weight": (768,),
    "norm2.bias": (768,),
    "mlp.fc1.weight": (3072, 768),
    "mlp.fc1.bias": (3072,),
    "mlp.fc2.weight": (768, 3072),
    "mlp.fc2.bias": (768,),
}


def twelve(block: Shapes) -> Shapes:
    return {f"blocks.{index}.{name}": shape for index in range(12) for name, shape in block.items()}


DEIT_TINY: Shapes = {
    "cls_token": (1, 1, 192),
    "pos_embed": (1, 197, 192),
    "patch_embed.proj.weight": (192, 3, 16, 16),
    "patch_embed.proj.bias": (192,),
    **twelve(VIT_TINY_BLOCK),
    "norm.weight": (192,),
    "norm.bias": (192,),
    "head.weight": (1000, 192),
    "head.bias": (1000,),
}
MAE_BASE: Shapes = {
    "cls_token": (1, 1, 768),
    "pos_embed": (1, 197, 768),
    "patch_embed.proj.weight": (768, 3, 16, 16),
    "patch_embed.proj.bias": (768,),
    **twelve(VIT_BASE_BLOCK),
    "norm.weight": (768,),
    "norm.bias": (768,),
}
VIT_BASE: Shapes = {**MAE_BASE, "head.weight": (1000, 768), "head.bias": (1000,)}
DINOV2_SMALL: Shapes = {
    "cls_token": (1, 1, 384),
    "pos_embed": (1, 1370, 384),
    "patch_embed.proj.weight": (384, 3, 14, 14),
    "patch_embed.proj.bias": (384,),
    **twelve(DINOV2_SMALL_BLOCK),
    "norm.weight": (384,),
    "norm.bias": (384,),
}
DINOV2_SMALL_REGISTERS: Shapes = {
    **DINOV2_SMALL,
    "reg_token": (1, 4, 384),
    "pos_embed": (1, 1369, 384),
}
DINOV2_SMALL_REGISTERS_ORIGINAL: Shapes = {
    **DINOV2_SMALL,
    "register_tokens": (1, 4, 384),
    "mask_token": (1, 384),
}
LAYOUTS = {
    "vit-b16-in1k": VIT_BASE,
    "vit-b16-in21k": {**MAE_BASE, "head.weight": (21843, 768), "head.bias": (21843,)},
    "deit-tiny": DEIT_TINY,
    "dino-b16": MAE_BASE,
    "dinov2-s14": DINOV2_SMALL,
    "dinov2-s14-reg": DINOV2_SMALL_REGISTERS,
    "mae-b16": MAE_BASE,
}

SMALL_CONFIG = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=1, mlp_width=96)


def zeros(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def noise(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def small_vit(config: ViTConfig = SMALL_CONFIG) -> ViT:
    return ViT(config).initialise(torch.Generator().manual_seed(0)).requires_grad_(False).eval()


Checkpoint = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    """Write tensors to a safetensors file that is removed after the test: ViT-B is large."""
    written: list[Path] = []

    def write(tensors: dict[str, Tensor], name: str = "given.safetensors") -> Path:
        written.append(tmp_path / name)
        save_file(tensors, written[-1])
        return written[-1]

    yield write
    for path in written:
        path.unlink(missing_ok=True)


# The catalogue


def test_catalog_has_the_documented_backbones_and_is_immutable() -> None:
    assert {
        "pocket",
        "photo",
        "vit-b16-in1k",
        "vit-b16-in21k",
        "deit-tiny",
        "deit-small",
        "dino-s16",
        "dino-b16",
        "dinov2-s14",
        "dinov2-s14-reg",
        "mae-b16",
    } <= CATALOG.keys()
    assert all(name == backbone.name for name, backbone in CATALOG.items())
    with pytest.raises(TypeError):
        CATALOG["mine"] = CATALOG["pocket"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        CATALOG["pocket"].name = "mine"  # type: ignore[misc]


def test_paper_backbone_has_the_full_timm_name_and_mean_and_std_of_one_half() -> None:
    backbone = CATALOG["vit-b16-in1k"]
    assert backbone.repository == "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
    assert backbone.preprocessing == Preprocessing(
        224, 3, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic"
    )
    assert backbone.config == ViTConfig()


def test_facebook_backbones_use_the_mean_and_std_of_imagenet() -> None:
    imagenet = Preprocessing(224, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic")
    for name, backbone in CATALOG.items():
        if name.startswith(("deit", "dino", "mae")):
            size = 256 if name.startswith("dinov3") else 224
            assert backbone.preprocessing == replace(imagenet, size=size)


def test_unknown_name_suggests_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(errors.UnknownName, match="Did you mean 'dinov2-s14'"):
        load_backbone("dino2-s14", cache=tmp_path)


def test_importing_the_catalog_does_not_import_huggingface_hub() -> None:
    check = (
        "import sys, coda_prompt.research.vit.catalog; sys.exit('huggingface_hub' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_catalog_agrees_with_timm() -> None:
    timm = json.loads((TIMM / "catalog.json").read_text())
    downloaded = [backbone for backbone in CATALOG.values() if backbone.repository is not None]
    assert {f"timm/{name}" for name in timm} == {backbone.repository for backbone in downloaded}
    for backbone in downloaded:
        assert backbone.repository is not None
        assert backbone.config is not None
        assert backbone.preprocessing is not None
        declared = timm[backbone.repository.removeprefix("timm/")]
        assert declared["hf_hub_id"] == backbone.repository
        assert tuple(declared["mean"]) == backbone.preprocessing.mean
        assert tuple(declared["std"]) == backbone.preprocessing.std
        assert declared["interpolation"] == backbone.preprocessing.interpolation
        assert declared["heads"] == backbone.config.heads
        assert declared["norm_eps"] == backbone.config.norm_eps
        shapes = declared["other_shapes"] | {
            f"blocks.{block}.{name}": shape
            for block in range(declared["depth"])
            for name, shape in declared["block_shapes"].items()
        }
        assert (declared["activation"] == "QuickGELU") == backbone.config.quick_gelu
        assert declared["activation"] in ("GELU", "QuickGELU")
        layout = LAYOUTS.get(backbone.name, dict(shapes))
        assert shapes.keys() == {key for key in layout if not key.startswith("head.")}
        if "pos_embed" in shapes:
            position = (1, backbone.config.grid**2 + backbone.config.position_for_class)
            assert shapes["pos_embed"] == [*position, backbone.config.width]
            shapes["pos_embed"][1] = 0
        ours = expected_layout(backbone.config)
        names = {key.replace("gamma_", "ls") + ".gamma" * ("gamma_" in key): key for key in shapes}
        assert {name: tuple(shapes[key]) for name, key in names.items()} == ours


# Files with timm's layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoint_with_timm_keys_loads(name: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(zeros(LAYOUTS[name], torch.float16))
    loaded = load_backbone(f"{name}={path}")
    assert loaded.vit.config == CATALOG[name].config
    assert loaded.preprocessing == CATALOG[name].preprocessing
    assert not loaded.vit.training
    for parameter in loaded.vit.parameters():
        assert not parameter.requires_grad
        assert parameter.dtype == torch.float32
        assert not parameter.any()


def test_every_weight_is_loaded_under_its_name(checkpoint: Checkpoint) -> None:
    tensors = noise(DEIT_TINY)
    loaded = load_backbone(f"deit-tiny={checkpoint(tensors)}")
    weights = loaded.vit.state_dict()
    assert weights.keys() == tensors.keys() - {"head.weight", "head.bias"}
    assert all(torch.equal(weights[name], tensors[name]) for name in weights)


def test_classifier_head_is_ignored_and_logged(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    heads = {"head_dist.weight": (1000, 192), "head_dist.bias": (1000,)}
    path = checkpoint(zeros({**DEIT_TINY, **heads}))
    with caplog.at_level(logging.INFO, "coda_prompt"):
        load_backbone(f"deit-tiny={path}")
    for key in ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias"):
        assert key in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_float32(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in noise(DEIT_TINY).items()}
    weights = load_backbone(f"deit-tiny={checkpoint(tensors)}").vit.state_dict()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, tensors[name].float())


def test_dinov2_positions_are_resampled_from_37_to_16(checkpoint: Checkpoint) -> None:
    tensors = noise(DINOV2_SMALL)
    loaded = load_backbone(f"dinov2-s14={checkpoint(tensors)}")
    position = loaded.vit.pos_embed
    assert position.shape == (1, 1 + 16 * 16, 384)
    assert torch.equal(position[:, :1], tensors["pos_embed"][:, :1])
    assert torch.equal(position, resize_positions(tensors["pos_embed"], loaded.vit.config))
    assert torch.equal(
        loaded.vit.get_parameter("blocks.3.ls2.gamma"), tensors["blocks.3.ls2.gamma"]
    )
    assert loaded.vit.features(torch.rand(1, 3, 224, 224)).shape == (1, 384)


def test_original_dinov2_file_with_registers_equals_the_timm_file(
    checkpoint: Checkpoint,
) -> None:
    original = noise(DINOV2_SMALL_REGISTERS_ORIGINAL)
    converted = {
        name: tensor
        for name, tensor in original.items()
        if name not in ("mask_token", "register_tokens")
    }
    converted["reg_token"] = original["register_tokens"]
    converted["cls_token"] = original["cls_token"] + original["pos_embed"][:, :1]
    converted["pos_embed"] = original["pos_embed"][:, 1:]

    ours = load_backbone(f"dinov2-s14-reg={checkpoint(original, 'own.safetensors')}")
    timms = load_backbone(f"dinov2-s14-reg={checkpoint(converted, 'timm.safetensors')}")
    assert ours.vit.fingerprint() == timms.vit.fingerprint()
    assert torch.equal(ours.vit.get_parameter("reg_token"), original["register_tokens"])


def test_original_dinov2_file_without_registers_loads_except_for_the_mask_token(
    checkpoint: Checkpoint,
) -> None:
    path = checkpoint(zeros({**DINOV2_SMALL, "mask_token": (1, 384)}))
    assert load_backbone(f"dinov2-s14={path}").vit.config.registers == 0


# Files that do not fit


def edited(**changes: tuple[int, ...] | None) -> dict[str, Tensor]:
    shapes = {**DEIT_TINY, **changes}
    return zeros({name: shape for name, shape in shapes.items() if shape is not None})


def test_missing_key_is_named(checkpoint: Checkpoint) -> None:
    path = checkpoint(edited(**{"blocks.7.attn.proj.bias": None}))
    with pytest.raises(errors.WeightsMismatch, match=r"missing blocks\.7\.attn\.proj\.bias\."):
        load_backbone(f"deit-tiny={path}")


def test_unknown_key_is_named(checkpoint: Checkpoint) -> None:
    path = checkpoint(edited(**{"blocks.3.attn.q_norm.weight": (64,)}))
    with pytest.raises(
        errors.WeightsMismatch, match=r"unexpected blocks\.3\.attn\.q_norm\.weight\."
    ):
        load_backbone(f"deit-tiny={path}")


def test_decoder_of_a_masked_autoencoder_is_rejected(checkpoint: Checkpoint) -> None:
    path = checkpoint(edited(mask_token=(1, 1, 512), **{"decoder_embed.weight": (512, 192)}))
    with pytest.raises(errors.WeightsMismatch, match=r"unexpected decoder_embed\.weight\."):
        load_backbone(f"deit-tiny={path}")


def test_registers_are_rejected_if_the_architecture_has_none(checkpoint: Checkpoint) -> None:
    path = checkpoint(zeros(DINOV2_SMALL_REGISTERS_ORIGINAL))
    with pytest.raises(errors.WeightsMismatch, match=r"unexpected register_tokens\."):
        load_backbone(f"dinov2-s14={path}")


def test_wrong_shape_error_names_the_key_and_both_shapes(checkpoint: Checkpoint) -> None:
    path = checkpoint(edited(**{"blocks.0.mlp.fc1.weight": (700, 192)}))
    with pytest.raises(errors.WeightsMismatch) as caught:
        load_backbone(f"deit-tiny={path}")
    for fact in ("blocks.0.mlp.fc1.weight", "(700, 192)", "(768, 192)", str(path)):
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    "shape", [(1, 198, 192), (1, 196, 192), (1, 1, 192), (1, 197, 64), (197, 192), (0,)]
)
def test_positions_of_a_non_square_grid_are_rejected(
    shape: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    path = checkpoint(edited(pos_embed=shape))
    with pytest.raises(errors.WeightsMismatch, match="pos_embed"):
        load_backbone(f"deit-tiny={path}")


def test_integer_weights_are_rejected(checkpoint: Checkpoint) -> None:
    tensors = zeros(DEIT_TINY) | {"norm.bias": torch.zeros(192, dtype=torch.int8)}
    with pytest.raises(errors.CorruptFile, match=r"norm\.bias.*int8"):
        load_backbone(f"deit-tiny={checkpoint(tensors)}")


def test_truncated_file_is_corrupt(checkpoint: Checkpoint) -> None:
    path = checkpoint(zeros(DEIT_TINY))
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(errors.CorruptFile, match="is truncated or not a safetensors file"):
        load_backbone(f"deit-tiny={path}")


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage" * 99, b"PK\x03\x04" + b"\x00" * 999])
def test_other_file_type_is_corrupt(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(errors.CorruptFile, match=r"weights\.pth"):
        load_backbone(str(path))


@pytest.mark.parametrize("name", ["absent.safetensors", "."])
def test_missing_file_is_missing_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.MissingData, match="there is no such file"):
        load_backbone(str(tmp_path / name))


# Files that say what they are, and files that do not


def test_written_backbone_describes_itself(tmp_path: Path) -> None:
    config = ViTConfig(
        image_size=28, patch_size=4, channels=1, width=24, depth=2, heads=3, mlp_width=48, stem=(8,)
    )
    pixels = Preprocessing(28, 1, (0.1,), (0.3,), "bilinear")
    vit, path = small_vit(config), tmp_path / "own.safetensors"
    write_weights(path, vit, pixels)

    loaded = load_backbone(str(path))
    assert (loaded.vit.config, loaded.preprocessing) == (config, pixels)
    assert loaded.vit.fingerprint() == vit.fingerprint()
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.name == str(path)
    assert loaded.revision is None
    assert list(tmp_path.iterdir()) == [path]


def test_written_backbone_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_weights(tmp_path / "own.safetensors", small_vit(), Preprocessing(32))
    finally:
        os.umask(before)
    assert (tmp_path / "own.safetensors").stat().st_mode & 0o777 == 0o644


def test_metadata_takes_precedence_over_the_named_backbone(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    write_weights(path, small_vit(), Preprocessing(32))
    loaded = load_backbone(f"vit-b16-in1k={path}")
    assert (loaded.vit.config, loaded.preprocessing) == (SMALL_CONFIG, Preprocessing(32))


def test_failed_write_preserves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_weights(path, small_vit(), Preprocessing(32))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_can_be_loaded_into_an_existing_vit(tmp_path: Path) -> None:
    path, vit = tmp_path / "own.safetensors", small_vit()
    write_weights(path, vit, Preprocessing(32))
    other = ViT(SMALL_CONFIG)
    before = other.cls_token
    load_weights(other, path)
    assert other.cls_token is before
    assert other.fingerprint() == vit.fingerprint()
    assert read_weights(path, ViT(SMALL_CONFIG)).keys() == vit.state_dict().keys()


def test_loaded_backbone_is_independent_of_its_file(checkpoint: Checkpoint) -> None:
    path = checkpoint(noise(DEIT_TINY))
    loaded = load_backbone(f"deit-tiny={path}")
    before = loaded.vit.fingerprint()
    with open(path, "r+b") as file:
        file.seek(-4_000_000, os.SEEK_END)
        file.write(b"\x01" * 4_000_000)
    assert loaded.vit.fingerprint() == before


@pytest.mark.parametrize(
    ("metadata", "fact"),
    [
        ({"vit": "{"}, "not JSON"),
        ({"vit": "[1]"}, "does not describe a ViTConfig"),
        ({"vit": '{"widht": 64}'}, "widht"),
        ({"vit": '{"width": "64"}'}, "width = '64'"),
        ({"pixels": '{"mean": 0.5}'}, "mean = 0.5"),
    ],
)
def test_invalid_metadata_is_corrupt(metadata: dict[str, str], fact: str, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(save(small_vit().state_dict(), metadata))
    with pytest.raises(errors.CorruptFile, match=fact):
        load_backbone(str(path))


@pytest.mark.parametrize(
    ("shapes", "name", "same_as"),
    [
        (DEIT_TINY, "deit-tiny", "deit-tiny"),
        (VIT_BASE, "vit-b16-in1k", "vit-b16-in1k"),
        (LAYOUTS["vit-b16-in21k"], "vit-b16-in21k", "vit-b16-in21k"),
        (MAE_BASE, None, "mae-b16"),  # or dino-b16, with the same preprocessing
        (DINOV2_SMALL, "dinov2-s14", "dinov2-s14"),
        (DINOV2_SMALL_REGISTERS_ORIGINAL, "dinov2-s14-reg", "dinov2-s14-reg"),
    ],
)
def test_known_file_is_recognised_by_its_tensors(
    shapes: Shapes,
    name: str | None,
    same_as: str,
    checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = checkpoint(zeros(shapes, torch.float16))
    loaded = load_backbone(str(path))
    assert (loaded.name, loaded.path) == (name or str(path), path)
    assert loaded.vit.config == CATALOG[same_as].config
    assert loaded.preprocessing == CATALOG[same_as].preprocessing
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]


def timm_zeros(name: str) -> dict[str, Tensor]:
    """An empty checkpoint with timm's own keys, in half precision."""
    declared = json.loads((TIMM / "catalog.json").read_text())[name]
    shapes = declared["other_shapes"] | {
        f"blocks.{block}.{key}": shape
        for block in range(declared["depth"])
        for key, shape in declared["block_shapes"].items()
    }
    return zeros(shapes, torch.float16)


def test_dinov3_file_is_recognised_and_runs(checkpoint: Checkpoint) -> None:
    path = checkpoint(timm_zeros("vit_small_patch16_dinov3.lvd1689m"))
    loaded = load_backbone(str(path))
    assert (loaded.name, loaded.preprocessing.size) == ("dinov3-s16", 256)
    assert loaded.vit.features(torch.rand(1, 3, 256, 256)).shape == (1, 384)
    assert load_backbone(f"dinov3-s16@64={path}").vit.config.grid == 4


def test_clip_file_has_to_be_named_because_two_kinds_differ_in_activation(
    checkpoint: Checkpoint,
) -> None:
    path = checkpoint(timm_zeros("vit_base_patch16_clip_224.openai"))
    with pytest.raises(errors.WeightsMismatch, match=f"NAME={path}"):
        load_backbone(str(path))
    for name, quick in (("clip-b16-openai", True), ("clip-b16-laion2b", False)):
        loaded = load_backbone(f"{name}={path}")
        assert loaded.vit.config.quick_gelu == quick
        assert loaded.preprocessing.mean == (0.48145466, 0.4578275, 0.40821073)


def test_architecture_of_an_unknown_file_is_inferred_with_a_warning(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    config = ViTConfig(image_size=42, patch_size=14, width=64, depth=2, heads=1, mlp_width=96,
                       registers=4, layer_scale=True, position_for_class=False)  # fmt: skip
    path = checkpoint(small_vit(config).state_dict())
    loaded = load_backbone(str(path))
    assert loaded.vit.config == config
    assert loaded.preprocessing == Preprocessing(42, 3, (0.5,) * 3, (0.5,) * 3)
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    for fact in ("width=64", "mean=(0.5, 0.5, 0.5)", f"NAME={path}"):
        assert fact in warning


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"pos_embed": None}, "no 'pos_embed'"),
        ({"pos_embed": (1, 198, 192)}, "198 position rows"),
        ({"patch_embed.proj.weight": (200, 3, 16, 16)}, "width 200"),
        ({"patch_embed.proj.weight": (192, 768)}, "no 'patch_embed.proj.weight' with 4 axes"),
    ],
)
def test_file_of_unknown_architecture_asks_for_a_named_backbone(
    changes: dict[str, tuple[int, ...] | None], fact: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(errors.WeightsMismatch, match=fact) as caught:
        load_backbone(str(checkpoint(edited(**changes))))
    assert "Specify the backbone these weights belong to" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error", "fact"),
    [
        ("deit-tin=/some/file", errors.UnknownName, "Did you mean 'deit-tiny'"),
        ("deit-tiny=", errors.BadOption, "NAME=PATH"),
        ("deit-tiny@large", errors.BadOption, "NAME@SIZE"),
        ("deit-tiny=/no/such/file", errors.MissingData, "there is no such file"),
        ("pocket@30", errors.BadOption, "not a multiple"),
    ],
)
def test_unusable_backbone_says_how_to_write_it(
    text: str, error: type[errors.CodaError], fact: str
) -> None:
    with pytest.raises(error, match=fact):
        load_backbone(text)


def test_named_size_resamples_positions(checkpoint: Checkpoint) -> None:
    path = checkpoint(noise(DEIT_TINY))
    loaded = load_backbone(f"deit-tiny@64={path}")
    assert (loaded.name, loaded.preprocessing.size) == ("deit-tiny@64", 64)
    assert loaded.vit.pos_embed.shape == (1, 1 + 4 * 4, 192)
    assert loaded.vit.features(torch.rand(1, 3, 64, 64)).shape == (1, 192)
    with pytest.raises(errors.BadOption, match="multiple of its patches of 16"):
        load_backbone(f"deit-tiny@100={path}")


@pytest.mark.parametrize("wrapped", [False, True])
def test_pth_file_says_how_to_convert_it_and_the_result_loads(
    wrapped: bool, tmp_path: Path
) -> None:
    path, target = tmp_path / "deit.pth", tmp_path / "deit.safetensors"
    tensors = noise(DEIT_TINY)
    content = {f"module.{name}": value for name, value in tensors.items()}
    torch.save({"state_dict": content, "epoch": 3} if wrapped else tensors, path)
    with pytest.raises(errors.CorruptFile, match=f"Convert it: coda convert {path} {target}"):
        load_backbone(f"deit-tiny={path}")
    assert coda("convert", str(path), str(target)).returncode == 0
    loaded = load_backbone(str(target))
    assert loaded.name == "deit-tiny"
    assert torch.equal(loaded.vit.cls_token, tensors["cls_token"])


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-was-run",)


def test_conversion_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"cls_token": Malicious()}}, "bad.pth")
    torch.save({"model": {"weight": torch.ones(1)}}, "other.pth")
    Path("text.pth").write_text("no checkpoint")
    for name, problem in (
        ("bad", "cannot be read: it has Python objects"),
        ("other", "no cls_token"),
        ("text", "cannot be read: it is not a PyTorch checkpoint"),
    ):
        with pytest.raises(errors.CorruptFile, match=problem) as refused:
            convert_checkpoint(Path(f"{name}.pth"), Path("out.safetensors"))
        assert "weights_only" not in str(refused.value), "advice of torch to run the code"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pth", "other.pth", "text.pth"]


def test_embedded_backbone_needs_no_network_and_describes_itself() -> None:
    loaded = load_backbone("pocket", endpoint="http://127.0.0.1:9")
    assert loaded.revision is None
    assert loaded.vit.config.image_size == loaded.preprocessing.size
    images = torch.rand(
        2, loaded.preprocessing.channels, loaded.preprocessing.size, loaded.preprocessing.size
    )
    assert loaded.vit.features(images).shape == (2, loaded.vit.config.width)


# The hub, played by a server on the loopback interface

REPOSITORY = "timm/deit_tiny_patch16_224.fb_in1k"
FOLDER = "models--timm--deit_tiny_patch16_224.fb_in1k"
FIRST, SECOND = "1" * 40, "2" * 40


@dataclass
class Hub:
    """Files by commit, the commit of `main`, and the requests received."""

    endpoint: str = ""
    main: str = FIRST
    commits: dict[str, bytes] = field(default_factory=dict)
    declared_sha256: str | None = None
    requests: list[str] = field(default_factory=list)

    def answer(self, request: str) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(request)
        repository, _, rest = request.split(" ")[1].removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        commit = self.main if revision == "main" else revision
        if (repository, file) != (REPOSITORY, "model.safetensors"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if commit not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        content = self.commits[commit]
        sha256 = self.declared_sha256 or hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{sha256}"'}, content


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's retries
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            status, headers, content = state.answer(f"{self.command} {self.path}")
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET = respond  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def contents() -> tuple[bytes, bytes]:
    """Two versions of the weights of DeiT-Tiny, in half precision."""
    first, second = (
        save({name: tensor.half() for name, tensor in noise(DEIT_TINY, seed).items()})
        for seed in (1, 2)
    )
    return first, second


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def use(hub: Hub, cache: Path) -> LoadedBackbone:
    return load_backbone("deit-tiny", cache=cache, endpoint=hub.endpoint)


def unreachable() -> Hub:
    return Hub(endpoint="http://127.0.0.1:9")


def record_of(cache: Path) -> Any:
    return json.loads((cache / "coda-prompt-backbones.json").read_text())


def test_first_use_downloads_the_file_and_pins_commit_and_hash(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    loaded = use(hub, tmp_path)
    assert loaded.name == "deit-tiny"
    assert loaded.revision == FIRST
    assert loaded.sha256 == sha256(contents[0])
    assert record_of(tmp_path) == {
        f"{REPOSITORY}/model.safetensors": {"revision": FIRST, "sha256": sha256(contents[0])}
    }
    assert f"GET /{REPOSITORY}/resolve/main/model.safetensors" in hub.requests
    key = "blocks.5.mlp.fc1.weight"
    expected = noise(DEIT_TINY, 1)[key].half().float()
    assert torch.equal(loaded.vit.get_parameter(key), expected)


def test_second_use_needs_no_network(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    first = use(hub, tmp_path)
    hub.requests.clear()
    again, offline = use(hub, tmp_path), use(unreachable(), tmp_path)
    assert hub.requests == []
    assert again.vit.fingerprint() == offline.vit.fingerprint() == first.vit.fingerprint()
    assert offline.revision == FIRST


@pytest.mark.posix
def test_cached_file_works_offline_and_is_pinned(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    use(hub, tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere" / FOLDER, tmp_path / "here" / FOLDER, symlinks=True)
    assert use(unreachable(), tmp_path / "here").revision == FIRST
    assert record_of(tmp_path / "here") == record_of(tmp_path / "elsewhere")


def test_new_commit_on_the_hub_does_not_change_the_pinned_version(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    use(hub, tmp_path)
    hub.commits[SECOND], hub.main = contents[1], SECOND
    shutil.rmtree(tmp_path / FOLDER)
    hub.requests.clear()
    loaded = use(hub, tmp_path)
    assert (loaded.revision, loaded.sha256) == (FIRST, sha256(contents[0]))
    assert {request.split("/resolve/")[1] for request in hub.requests} == {
        f"{FIRST}/model.safetensors"
    }


def test_other_content_under_the_pinned_commit_is_rejected(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    use(hub, tmp_path)
    hub.commits[FIRST] = contents[1]
    shutil.rmtree(tmp_path / FOLDER)
    with pytest.raises(errors.HashMismatch) as caught:
        use(hub, tmp_path)
    for fact in (
        sha256(contents[0])[:16],
        sha256(contents[1])[:16],
        str(tmp_path / FOLDER),
        "coda-prompt-backbones.json",
        f"{REPOSITORY}/model.safetensors",
    ):
        assert fact in str(caught.value)


def test_modified_cached_file_is_rejected(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    use(hub, tmp_path)
    cached = tmp_path / FOLDER / "snapshots" / FIRST / "model.safetensors"
    cached.resolve().write_bytes(contents[1])
    with pytest.raises(errors.HashMismatch, match=f"delete {tmp_path / FOLDER}"):
        use(hub, tmp_path)
    # The same where the file system has no links, so that only the record knows better.
    cached.unlink()
    cached.write_bytes(contents[1])
    with pytest.raises(errors.HashMismatch, match="differs from the file that was used first"):
        use(hub, tmp_path)


def test_download_with_a_wrong_hash_is_not_pinned(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits, hub.declared_sha256 = {FIRST: contents[0]}, sha256(contents[1])
    with pytest.raises(errors.HashMismatch, match="The download is damaged"):
        use(hub, tmp_path)
    assert not (tmp_path / "coda-prompt-backbones.json").exists()


def test_error_without_a_hub_is_fast_and_names_the_file_its_path_and_the_embedded_backbones(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(errors.BackboneUnavailable) as caught:
        use(unreachable(), tmp_path)
    assert time.monotonic() - started < 3
    assert not caplog.records  # no retries
    for fact in (
        "--backbone deit-tiny=PATH",
        f"http://127.0.0.1:9/{REPOSITORY}/resolve/main/model.safetensors",
        str(tmp_path / FOLDER),
        "'pocket' and 'photo'",
    ):
        assert fact in str(caught.value)
    assert not (tmp_path / "coda-prompt-backbones.json").exists()


def test_hub_that_does_not_answer_fails_within_three_seconds(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(*_: object, **__: object) -> None:
        threading.Event().wait(60)

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    started = time.monotonic()
    with pytest.raises(errors.BackboneUnavailable, match="no answer within"):
        use(hub, tmp_path)
    assert time.monotonic() - started < 3


def test_pinned_commit_missing_on_the_hub_error_says_how_to_unpin(
    hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path
) -> None:
    hub.commits = {FIRST: contents[0]}
    use(hub, tmp_path)
    hub.commits, hub.main = {SECOND: contents[1]}, SECOND
    shutil.rmtree(tmp_path / FOLDER)
    with pytest.raises(errors.BackboneUnavailable, match="remove its entry from") as caught:
        use(hub, tmp_path)
    assert f"/resolve/{FIRST}/" in str(caught.value)


def test_other_pins_are_preserved(hub: Hub, contents: tuple[bytes, bytes], tmp_path: Path) -> None:
    hub.commits = {FIRST: contents[0]}
    other = {"revision": SECOND, "sha256": "ab" * 32}
    record = tmp_path / "coda-prompt-backbones.json"
    record.write_text(json.dumps({"timm/other/model.safetensors": other}))
    use(hub, tmp_path)
    entries = record_of(tmp_path)
    assert entries["timm/other/model.safetensors"] == other
    assert len(entries) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"revision": "x"}}'])
def test_damaged_pins_file_is_named(content: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "coda-prompt-backbones.json").write_text(content)
    with pytest.raises(errors.CorruptFile, match=r"coda-prompt-backbones\.json.*pinned again"):
        use(hub, tmp_path)
    assert hub.requests == []


def test_backbone_loads_with_a_warning_if_the_pins_file_cannot_be_written(
    hub: Hub,
    contents: tuple[bytes, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.commits = {FIRST: contents[0]}

    def read_only(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr("coda_prompt.encoder.download.write_atomically", read_only)
    assert use(hub, tmp_path).revision == FIRST
    assert "is not pinned" in caplog.text

"""Encoders that are made from weights at the first use, kept, and found again without torch."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from small import coda, tiny_vit

from coda_prompt.encoder import made
from coda_prompt.encoder.encoder import Encoder, cached_encoder, load_encoder
from coda_prompt.errors import BadOption, CorruptFile, MissingData, MissingExtra, UnknownName
from coda_prompt.images.preprocessing import Preprocessing, eval_view
from coda_prompt.research.vit.catalog import write_weights

GREY = Preprocessing(16, 1, (0.5,), (0.5,))
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40), np.uint8))
COMMIT = "1" * 40


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_weights(tmp_path / "own.safetensors", tiny_vit(), GREY)
    return tmp_path / "own.safetensors"


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coda_prompt.research.export", None)


def in_cache(cache: Path, repository: str, files: list[Path]) -> None:
    """Put files into the hub's cache as its client does."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, folder / "blobs" / digest)
        (folder / "snapshots" / COMMIT / path.name).symlink_to(folder / "blobs" / digest)


def test_weights_of_a_file_are_made_into_an_encoder_once(
    cache: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_encoder(str(weights))
    assert (first.name, first.path, first.kind) == ("own.safetensors", weights, "drawing")
    features, view = first.encode(IMAGE).features, eval_view(IMAGE, GREY, "squash")
    expected = tiny_vit().features(torch.from_numpy(view)[None])[0]
    assert torch.cosine_similarity(torch.from_numpy(features), expected, dim=0) > 0.99
    monkeypatch.setitem(sys.modules, "coda_prompt.research.export", None)  # as without torch
    moved = weights.rename(weights.with_name("moved.safetensors"))
    again = load_encoder(str(moved))
    assert np.array_equal(again.encode(IMAGE).features, features)
    assert again.fingerprint == first.fingerprint
    found = cached_encoder(first.fingerprint)
    assert found is not None
    assert np.array_equal(found.encode(IMAGE).features, features)
    assert cached_encoder("0" * 64) is None
    assert [each.name for each in cache.iterdir()] == ["coda-prompt-encoders"]
    assert len(list((cache / "coda-prompt-encoders").iterdir())) == 1


def test_making_an_encoder_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(CorruptFile, match=r"bad\.safetensors"):
        load_encoder(str(tmp_path / "bad.safetensors"))
    assert list((cache / "coda-prompt-encoders").iterdir()) == []


@pytest.mark.usefixtures("without_torch", "cache")
def test_without_torch_the_first_use_says_what_to_install(weights: Path) -> None:
    for text in (str(weights), "photo-vit@84", "vit-b16-in21k"):
        with pytest.raises(MissingExtra, match=r"pip install 'coda-prompt\[research\]'"):
            load_encoder(text)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made; `pocket` stands for all of it, because making takes seconds."""
    texts: list[str] = []

    def export(text: str, folder: Path) -> None:
        texts.append(text)
        load_encoder("pocket").save(folder)

    monkeypatch.setattr(made, "_exporter", lambda _: export)
    return texts


def test_an_embedded_encoder_for_another_size_is_made_once(
    cache: Path, exported: list[str]
) -> None:
    names = [load_encoder(text).name for text in ("photo-vit@84", "photo-vit@98", "photo-vit@84")]
    assert names == ["photo-vit@84", "photo-vit@98", "photo-vit@84"]
    assert exported == ["photo-vit@84", "photo-vit@98"]
    assert len(list((cache / "coda-prompt-encoders").iterdir())) == 2
    assert load_encoder("photo-vit@84").prior() is None


def test_names_that_cannot_be(cache: Path, weights: Path, tmp_path: Path) -> None:
    for text in ("photo@224", "photo-lite@160", f"photo={weights}"):
        with pytest.raises(BadOption, match="has one size and no weights"):
            load_encoder(text)
    with pytest.raises(UnknownName, match="Did you mean 'photo-vit'"):
        load_encoder("photo-vt")
    with pytest.raises(MissingData, match="there is no such file"):
        load_encoder(str(tmp_path / "none.safetensors"))
    with pytest.raises(MissingData, match="not on this machine"):
        load_encoder("somebody/encoder", download=False)
    with pytest.raises(MissingData, match="not on this machine"):
        load_encoder("deit-tiny", download=False)


@pytest.mark.posix
@pytest.mark.usefixtures("without_torch")
def test_a_repository_with_a_ready_encoder_needs_no_torch(cache: Path, tmp_path: Path) -> None:
    embedded = load_encoder("pocket")
    embedded.save(tmp_path / "ready")
    in_cache(cache, "somebody/encoder", list((tmp_path / "ready").iterdir()))
    loaded = load_encoder("somebody/encoder", download=False)
    assert (loaded.name, loaded.revision, loaded.path) == ("somebody/encoder", COMMIT, None)
    assert loaded.fingerprint == embedded.fingerprint
    assert same_features(loaded, embedded)


@pytest.mark.posix
def test_an_encoder_of_the_hub_is_found_again_without_its_weights(
    cache: Path, weights: Path, exported: list[str]
) -> None:
    model = weights.rename(weights.with_name("model.safetensors"))
    in_cache(cache, "timm/deit_tiny_patch16_224.fb_in1k", [model])
    first = load_encoder("deit-tiny", download=False)
    shutil.rmtree(cache / "models--timm--deit_tiny_patch16_224.fb_in1k")
    again = load_encoder("deit-tiny", download=False)
    assert exported == ["deit-tiny"]
    assert (first.name, first.revision) == (again.name, again.revision) == ("deit-tiny", COMMIT)


def test_export_writes_a_folder_that_is_a_backbone(tmp_path: Path) -> None:
    done = coda("backbones", "export", "pocket", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    exported, embedded = load_encoder(str(tmp_path / "out")), load_encoder("pocket")
    assert json.loads(done.stdout)["fingerprint"] == exported.fingerprint == embedded.fingerprint
    assert same_features(exported, embedded)
    refused = coda("backbones", "export", "pocket", str(tmp_path / "out"))
    assert (refused.returncode, "is not empty" in refused.stderr) == (2, True)


def same_features(first: Encoder, second: Encoder) -> bool:
    return np.array_equal(first.encode(IMAGE).features, second.encode(IMAGE).features)


def test_backbones_are_listed_without_torch() -> None:
    program = (
        "import sys; from coda_prompt.cli.catalog import app; app(['backbones', '--json'], "
        "standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)["rows"]]
    assert {"pocket", "photo", "photo-vit", "photo-lite", "deit-tiny"} <= set(names)

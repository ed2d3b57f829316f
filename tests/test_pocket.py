"""The embedded dataset and backbone."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from coda_prompt.errors import CorruptFile
from coda_prompt.research.streams import pocket
from coda_prompt.research.streams.pocket import STRENGTH, pocket_source
from coda_prompt.research.streams.renditions import STYLES, render, style_index
from coda_prompt.research.vit.catalog import load_backbone

ASSETS = resources.files("coda_prompt") / "assets"


SHIPPED = {
    "pocket-drawings.npz": "dfa81f6d4c0779215c9fb6ea104f7400068e7a2c6d8ec09a2b3f27b2d67dd96b",
    "pocket-vit.safetensors": "7aa34708e6c475aa0efdac3d5e071ce2abb8bf40c6d8e8dc7d521f51ff2f343d",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_assets_have_the_published_hashes(name: str) -> None:
    assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == SHIPPED[name]
    if name == "pocket-vit.safetensors":
        assert SHIPPED[name] in (ASSETS / "pocket-vit.md").read_text(), "the card names its file"


def arrays() -> dict[str, np.ndarray]:
    with (ASSETS / "pocket-drawings.npz").open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files}


def test_no_pretraining_class_is_in_the_benchmark() -> None:
    found = arrays()
    benchmark, pretraining = set(found["classes"]), set(found["pretraining_classes"])
    assert (len(benchmark), len(pretraining)) == (100, 245)
    assert not benchmark & pretraining


def test_each_class_has_80_training_and_20_test_drawings() -> None:
    source = pocket_source(strength=0)
    assert np.bincount(source.train.labels).tolist() == [80] * 100
    assert np.bincount(source.test.labels).tolist() == [20] * 100
    drawings = arrays()["drawings"].reshape(100, 100, 28, 28)
    assert np.array_equal(np.asarray(source.train.image(81)), drawings[1, 1])
    assert np.array_equal(np.asarray(source.test.image(21)), drawings[1, 81])


def test_styles_are_about_equally_frequent() -> None:
    source = pocket_source()
    assert source.domain_names == tuple(STYLES)
    for split in (source.train, source.test):
        shares = np.bincount(split.domains, minlength=10) / len(split)
        assert shares.min() > 0.07
        assert shares.max() < 0.13


def test_style_depends_on_the_name_only() -> None:
    assert len({style_index(f"cat/{number}") for number in range(100)}) == len(STYLES)
    source = pocket_source()
    domains = np.concatenate([source.train.domains, source.test.domains]).astype("<i8")
    digest = hashlib.sha256(domains.tobytes()).hexdigest()
    assert digest == "62ed4218214fc1b4247f03facceffd56559925868fb454864d80af2f04a58cf2"


def test_pocket_benchmark_is_unchanged() -> None:
    """The ink of one drawing in each style, up to rounding on other processors."""
    assert STRENGTH == 0.25
    assert list(STYLES) == [
        "plain", "pale", "noisy", "thick", "hatched", "blurred", "broken", "turned", "wavy",
        "shaded",
    ]  # fmt: skip
    source = pocket_source()
    eighth = [int(np.flatnonzero(source.train.domains == style)[7]) for style in range(10)]
    ink = [int(np.asarray(source.train.image(place)).astype(int).sum()) for place in eighth]
    published = [20494, 34252, 36351, 61414, 17786, 26616, 36953, 29002, 33730, 41425]
    assert ink == pytest.approx(published, abs=8)
    assert pocket_source(0.5).fingerprint() != pocket_source(0.6).fingerprint()


def test_pickled_asset_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "pocket-drawings.npz", drawings=np.array([{}]), classes=np.array(["a"]))
    monkeypatch.setattr(pocket.resources, "files", lambda _: Parent(tmp_path))
    with pytest.raises(CorruptFile, match="allow_pickle"):
        pocket_source()


class Parent:
    """A package with its assets in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder


@pytest.mark.parametrize("style", list(STYLES))
def test_strength_scales_every_style_from_zero(style: str) -> None:
    drawings = arrays()["drawings"][:200:10]
    number = np.full(len(drawings), list(STYLES).index(style))
    untouched, half, full = (render(drawings, number, strength) for strength in (0, 0.5, 1))
    difference = [np.abs(image.astype(float) - drawings).mean() for image in (half, full)]
    assert np.abs(untouched.astype(int) - drawings).max() <= 1
    if style != "plain":
        assert 0.5 < difference[0] < difference[1]


def test_embedded_backbone_separates_unseen_classes() -> None:
    """Ridge regression on its features of 20 unseen classes is far better than on pixels."""
    backbone = load_backbone("pocket")
    source = pocket_source(strength=0)
    scores = []
    for features in (
        lambda images: backbone.vit.features(images),
        lambda images: images.flatten(1),
    ):
        inputs, targets = [], []
        for split in (source.train, source.test):
            chosen = np.flatnonzero(split.labels < 20)
            images = np.stack([np.asarray(split.image(index)) for index in chosen])
            tensor = torch.from_numpy(images).float().div(255)[:, None]
            with torch.no_grad():
                inputs.append(features(tensor))
            targets.append(torch.from_numpy(split.labels[chosen]))
        centre = inputs[0].mean(dim=0)
        train, test = inputs[0] - centre, inputs[1] - centre
        gram = train.T @ train + 100 * torch.eye(train.shape[1])
        weights = torch.linalg.solve(
            gram, train.T @ torch.nn.functional.one_hot(targets[0]).float()
        )
        scores.append(float(((test @ weights).argmax(dim=1) == targets[1]).float().mean()))
    assert scores[0] > 0.70
    assert scores[0] > scores[1] + 0.2

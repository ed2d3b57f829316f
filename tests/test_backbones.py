"""The backbone of a model: chosen by its images, or read from a local file that may move."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, drawings
from PIL import Image
from safetensors.torch import save_file
from small import TINY, coda, tiny_vit

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BackboneMismatch, BadOption, MissingData
from coda_prompt.images.kinds import is_drawing
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.learner.folder import MODEL, ModelFolder
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.vit.catalog import CATALOG, load_backbone, write_weights
from coda_prompt.research.vit.vit import ViT
from coda_prompt.storage.tensors import read_tensors, write_tensors

PLAIN = pocket_source(0.0)


def scene(seed: int, size: int = 96, colour: bool = True) -> Image.Image:
    """A synthetic photograph: shaded blobs of all sizes, and fine grain."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((size, size, 3))
    for cells in (3, 6, 12, 24):
        tones = random.uniform(0, 255, (cells, cells, 3)).astype(np.uint8)
        layer = Image.fromarray(tones).resize((size, size), Image.Resampling.BICUBIC)
        pixels += np.asarray(layer) * (3 / cells)
    pixels = pixels / pixels.max() * 255 + random.normal(0, 4, pixels.shape)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return image if colour else image.convert("L")


def sketches(count: int) -> list[np.ndarray]:
    """White on black, 28 x 28."""
    images: Any = PLAIN.train
    return [
        images.images[np.flatnonzero(images.labels == row % 100)[row // 100]]
        for row in range(count)
    ]


def sheet(sketch: np.ndarray, seed: int) -> Image.Image:
    """The same drawing with ink on paper in uneven light, photographed: a JPEG of 200 x 200."""
    random = np.random.default_rng(seed)
    large = Image.fromarray(255 - sketch).resize((200, 200), Image.Resampling.BICUBIC)
    down, across = np.mgrid[0:200, 0:200] / 200
    light = 0.7 + 0.1 * np.stack([down + across] * 3, axis=2)
    ink = np.array([0.1, 0.1, 0.4])
    paper = ink + (1 - ink) * np.asarray(large)[:, :, None] / 255
    pixels = 255 * (paper * light + random.normal(0, 0.02, paper.shape)).clip(0, 1)
    content = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(content, "JPEG", quality=85)
    return Image.open(content)


def on_white(sketch: np.ndarray) -> Image.Image:
    """Red ink on a transparent background, 100 x 100."""
    alpha = Image.fromarray(sketch).resize((100, 100), Image.Resampling.BICUBIC)
    image = Image.new("RGBA", (100, 100), "red")
    image.putalpha(alpha)
    return image


def test_drawings_and_photographs_are_told_apart() -> None:
    plain = sketches(100)
    kinds = {
        "white on black": [Image.fromarray(each) for each in plain],
        "black on white": [Image.fromarray(255 - each) for each in plain],
        "large": [Image.fromarray(each).resize((400, 300)) for each in plain],
        "red on transparent": [on_white(each) for each in plain],
        "photographed sheet": [sheet(each, seed) for seed, each in enumerate(plain)],
        "blank": [Image.new(mode, (30, 50)) for mode in ("1", "L", "P", "RGB", "RGBA", "I;16")],
        "one pixel": [Image.new("L", (1, 1))],
    }
    for kind, images in kinds.items():
        assert np.mean([is_drawing(image) for image in images]) > 0.9, kind
    for size, colour in ((32, True), (96, True), (300, True), (96, False)):
        found = [is_drawing(scene(seed, size, colour)) for seed in range(100)]
        assert np.mean(found) < 0.1, (size, colour)


def test_a_product_photographed_on_white_is_no_drawing() -> None:
    for seed in range(20):
        pixels = np.full((96, 96, 3), 255, np.uint8)
        pixels[36:60, 20:76] = np.asarray(scene(seed, 96, True))[36:60, 20:76]
        assert not is_drawing(Image.fromarray(pixels))


def write_folder(root: Path, **classes: list[Image.Image]) -> Path:
    for name, images in classes.items():
        (root / name).mkdir(parents=True)
        for number, image in enumerate(images):
            image.save(root / name / f"{number}.png")
    return root


def sketch_images(count: int) -> list[Image.Image]:
    return [Image.fromarray(each) for each in sketches(count)]


def test_auto_takes_pocket_for_drawings_and_keeps_it() -> None:
    classifier = ContinualClassifier(method="ncm")
    learned = classifier.learn(*drawings(range(2), 10))
    assert learned.chosen is not None
    assert learned.chosen.startswith("pocket: ")
    assert learned.chosen.endswith(" of 20 sampled images are drawings")
    photographs = [scene(seed) for seed in range(10)]
    later = classifier.learn(photographs, ["a"] * 5 + ["b"] * 5)
    assert (later.chosen, classifier.backbone_name) == (None, "pocket")
    assert any("10 of 10 sampled images look like photographs" in each for each in later.warnings)


def test_auto_takes_photo_for_photographs_and_the_model_records_it(tmp_path: Path) -> None:
    photographs = {"a": [scene(n) for n in range(6)], "b": [scene(n, 60) for n in range(6, 12)]}
    folder = write_folder(tmp_path / "photographs", **photographs)
    learned = coda("learn", str(tmp_path / "model"), str(folder))
    assert "photo: 12 of 12 sampled images are photographs" in learned.stderr
    assert "slda on photo" in learned.stderr
    assert ModelFolder(tmp_path / "model").description().backbone.name == "photo"
    more = write_folder(tmp_path / "more", c=sketch_images(6))
    later = coda("learn", str(tmp_path / "model"), str(more))
    assert "6 of 6 sampled images look like drawings, but 'photo'" in " ".join(later.stderr.split())
    shown = " ".join(coda("info", str(tmp_path / "model")).stdout.split())
    assert "backbone photo, for photographs" in shown


def test_photo_runs_at_other_multiples_of_14() -> None:
    plain, large = load_backbone("photo-vit"), load_backbone("photo-vit@168")
    assert (plain.preprocessing.size, large.preprocessing.size) == (112, 168)
    image = torch.rand(1, 3, 168, 168, generator=torch.Generator().manual_seed(0))
    small = torch.nn.functional.interpolate(image, 112, mode="area")
    features = [plain.vit.features(small), large.vit.features(image)]
    assert torch.cosine_similarity(*features).item() > 0.5


@pytest.mark.parametrize("name", ["photo-vit", "pocket"])
def test_known_fingerprints_are_those_of_the_embedded_weights(name: str) -> None:
    backbone = load_backbone(name)
    assert vars(backbone)["fingerprint"] == backbone.vit.fingerprint()  # known without hashing


def test_fingerprint_depends_on_the_image_size() -> None:
    resized = load_backbone("photo-vit@84")
    assert "fingerprint" not in vars(resized)
    assert resized.fingerprint != load_backbone("photo-vit").fingerprint


def test_mixed_folder_takes_the_majority_with_a_warning(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "mixed", a=sketch_images(12), b=[scene(seed) for seed in range(8)]
    )
    finished = coda("learn", str(tmp_path / "model"), str(folder), "--method", "ncm")
    said = " ".join(finished.stderr.split())
    assert "pocket: 12 of 20 sampled images are drawings" in said
    assert "8 of 20 sampled images look like photographs, but 'pocket'" in said


def test_named_backbone_overrides_the_choice() -> None:
    classifier = ContinualClassifier("pocket", method="ncm")
    learned = classifier.learn([scene(seed) for seed in range(10)], ["a"] * 5 + ["b"] * 5)
    assert (learned.chosen, classifier.backbone_name) == (None, "pocket")


# Local files


def write_deit(path: Path, seed: int = 0) -> Path:
    """A DeiT-Tiny checkpoint as timm writes it: its keys and a classifier, no metadata."""
    config = CATALOG["deit-tiny"].config
    assert config is not None
    vit = ViT(config).initialise(torch.Generator().manual_seed(seed))
    head = {"head.weight": torch.zeros(1000, 192), "head.bias": torch.zeros(1000)}
    tensors = {name: tensor.half() for name, tensor in (vit.state_dict() | head).items()}
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deit(tmp_path_factory.mktemp("deit") / "given.safetensors")


@pytest.fixture(scope="module")
def deit_model(deit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on the file, given by its path alone."""
    folder = tmp_path_factory.mktemp("models") / "model"
    classifier = ContinualClassifier(str(deit), "ncm")
    classifier.learn(*drawings(range(2), 5))
    classifier.save(folder)
    return folder


def moved(model: Path, target: Path) -> Path:
    """A copy of the model whose backbone is not where it was."""
    folder = target / "model"
    shutil.copytree(model, folder)
    file = read_tensors(folder / MODEL)
    assert file.description is not None
    file.description["backbone"]["path"] = "/gone/given.safetensors"
    write_tensors(folder / MODEL, file.tensors, file.description)
    return folder


def test_a_file_of_the_catalogue_is_recognised(deit: Path, deit_model: Path) -> None:
    record = ModelFolder(deit_model).description().backbone
    assert (record.name, record.path) == ("deit-tiny", str(deit))
    again = ContinualClassifier.load(deit_model, backbone=str(deit))
    assert (again.backbone_name, again.classes_) == ("deit-tiny", list(NAMES[:2]))
    assert again.model.encoder.pixels[0].mean == (0.485, 0.456, 0.406)
    assert again.model.encoder.pixels[0].size == 224


def test_a_file_is_named_with_backbone(deit: Path, deit_model: Path, tmp_path: Path) -> None:
    """A model that says where its backbone is does not have it opened."""
    for model in (deit_model, moved(deit_model, tmp_path)):
        with pytest.raises(MissingData, match="--backbone PATH"):
            ContinualClassifier.load(model)
    image = tmp_path / "image.png"
    Image.fromarray(drawings([0], 1)[0][0]).save(image)
    commands: dict[str, tuple[str, ...]] = {
        "predict": (str(image),),
        "evaluate": (str(write_folder(tmp_path / "test", **{NAMES[0]: sketch_images(2)})),),
    }
    missing = coda("predict", str(model), str(image))
    assert missing.returncode == 2
    assert "given.safetensors" in missing.stderr
    for command, arguments in commands.items():
        for name in (str(deit), f"deit-tiny={deit}"):
            finished = coda(command, str(model), *arguments, "--backbone", name)
            assert finished.returncode == 0, finished.stderr
    shown = " ".join(coda("info", str(model)).stdout.split())
    assert "backbone deit-tiny, for photographs" in shown
    assert "/gone/given.safetensors (name it with --backbone)" in shown
    assert coda("info", str(model), "--backbone", str(deit)).returncode == 0


def test_lesson_on_a_moved_file_records_where_it_is(
    deit: Path, deit_model: Path, tmp_path: Path
) -> None:
    model = moved(deit_model, tmp_path)
    folder = write_folder(tmp_path / "more", third=sketch_images(5))
    finished = coda("learn", str(model), str(folder), "--backbone", f"deit-tiny={deit}")
    assert finished.returncode == 0, finished.stderr
    assert ModelFolder(model).description().backbone.path == str(deit)


def test_other_file_is_refused_by_its_fingerprint(deit_model: Path, tmp_path: Path) -> None:
    other = write_deit(tmp_path / "other.safetensors", seed=1)
    with pytest.raises(BackboneMismatch):
        ContinualClassifier.load(deit_model, backbone=str(other))
    for command in (("info", str(deit_model)), ("export", str(deit_model), "model.onnx")):
        refused = coda(*command, "--backbone", str(other), cwd=tmp_path)
        assert refused.returncode == 2
        assert "Load the model with the backbone it was trained on" in refused.stderr
    for name in ("pocket", f"pocket={other}", "deit-small"):
        with pytest.raises(BadOption, match="was made with deit-tiny"):
            ContinualClassifier.load(deit_model, backbone=name)


@pytest.mark.parametrize("change", [{"rotary": True, "registers": 2}, {"pre_norm": True}])
def test_prompts_are_learned_on_rotary_and_pre_norm_backbones(
    change: dict[str, Any], tmp_path: Path
) -> None:
    vit = tiny_vit(config=dataclasses.replace(TINY, **change))
    write_weights(tmp_path / "own.safetensors", vit, Preprocessing(16, 1, (0.5,), (0.5,)))
    backbone = str(tmp_path / "own.safetensors")
    classifier = ContinualClassifier(backbone, "coda-p", epochs=1)
    images, names = drawings(range(2), 6)
    classifier.learn(images, names)
    classifier.save(tmp_path / "model")
    again = ContinualClassifier.load(tmp_path / "model", backbone=backbone)
    assert np.array_equal(again.predict_proba(images), classifier.predict_proba(images))

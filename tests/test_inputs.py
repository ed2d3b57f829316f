"""Accepted image inputs: what each becomes, and what is refused with which sentence."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, drawings, taught
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from coda_prompt import ContinualClassifier
from coda_prompt.errors import (
    BadImages,
    BadOption,
    CodaWarning,
    MissingData,
    WrongType,
)
from coda_prompt.images import reading as image_files
from coda_prompt.images.inputs import as_image, image_items, image_paths
from coda_prompt.images.labelled import labelled
from coda_prompt.images.reading import FULL_SIZE, open_image

COLOURS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "a b.png"
    Image.fromarray(COLOURS).save(path)
    return path


def pixels(data: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(as_image(item)) for item in image_items(data, **options)]


def test_one_image_in_every_form(png: Path) -> None:
    content = png.read_bytes()
    tensor = torch.from_numpy(COLOURS).permute(2, 0, 1)
    forms = [
        png, str(png), png.as_uri(), content, bytearray(content), io.BytesIO(content),
        Image.fromarray(COLOURS), COLOURS, COLOURS / 255.0, tensor, tensor / 255,
    ]  # fmt: skip
    for form in forms:
        (found,) = pixels(form)
        assert np.array_equal(found, COLOURS), type(form)
        (found,) = pixels(iter([form]))
        assert np.array_equal(found, COLOURS), f"a generator of {type(form)}"
    with png.open("rb") as file:
        assert np.array_equal(pixels(file)[0], COLOURS)


@pytest.mark.parametrize("dtype", [str, object])
def test_an_array_of_paths_is_many_images(png: Path, dtype: type) -> None:
    found = pixels(np.array([str(png), str(png)], dtype=dtype))
    assert len(found) == 2
    np.testing.assert_array_equal(found[0], COLOURS)


def test_layouts_are_told_apart() -> None:
    first = COLOURS.transpose(2, 0, 1)
    stack = np.stack([COLOURS, COLOURS])
    for data in ([first], stack, stack.transpose(0, 3, 1, 2), torch.from_numpy(stack)):
        for found in pixels(data):
            assert np.array_equal(found, COLOURS)
    assert len(pixels(np.zeros((9, 5, 7), np.uint8))) == 9
    with pytest.raises(BadOption, match=r"one image of C x H x W or 3 grey images; pass"):
        image_items(first)
    assert len(labelled(np.zeros((3, 5, 7), np.uint8), ["a", "b", "b"]).split) == 3


def test_bgr_has_to_be_declared(png: Path) -> None:
    frame = COLOURS[:, :, ::-1]
    for data in (frame, [frame], torch.from_numpy(frame.copy()).permute(2, 0, 1)):
        (found,) = pixels(data, channels="bgr")
        assert np.array_equal(found, COLOURS)
    with pytest.raises(BadOption, match="bgr is for arrays"):
        image_items(png, "bgr")
    split = labelled([frame], "a", channels="bgr").split
    assert np.array_equal(np.asarray(split.image(0)), COLOURS)


def test_a_loader_and_a_generator_of_pairs_are_learned_and_predicted() -> None:
    images, labels = drawings(range(2), 6)
    rows = torch.tensor([NAMES.index(label) for label in labels])
    loader = DataLoader(TensorDataset(torch.from_numpy(images)[:, None], rows), batch_size=5)
    classifier = ContinualClassifier("pocket", "ncm", verbose=False)
    assert classifier.learn(loader).images == {"0": 6, "1": 6}
    assert classifier.predict(loader).shape == (12,)
    other = ContinualClassifier("pocket", "ncm", verbose=False)
    assert other.learn(zip(images, labels, strict=True)).new == tuple(NAMES[:2])
    assert np.array_equal(other.predict(image for image in images), other.predict(images))


def test_a_hugging_face_dataset_is_predicted(png: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image()})
    rows = datasets.Dataset.from_dict({"picture": [str(png), str(png)]}, features=features)
    assert [found.tolist() for found in pixels(rows)] == [COLOURS.tolist()] * 2


def test_other_types_are_refused_with_what_is_accepted(tmp_path: Path) -> None:
    classifier = taught(range(2), method="ncm")
    for wrong in (None, 3, {"a": 1}):
        with pytest.raises(TypeError, match=r"Accepted: a path or file:// URL, bytes"):
            classifier.predict(wrong)
    with pytest.raises(WrongType, match=r"as an image\. Accepted"):
        classifier.predict([3])
    with pytest.raises(TypeError, match=r"Accepted: a folder of class folders"):
        classifier.learn(5)
    with pytest.raises(TypeError, match="class names, one for each image"):
        classifier.learn([COLOURS], 5)
    with pytest.raises(BadOption, match=r"s3://.* is not downloaded; .*hub:URL"):
        labelled("s3://bucket/photos")
    with pytest.raises(BadOption, match="is not downloaded"):
        classifier.predict("https://example.org/image.jpg")


def test_one_name_labels_all_images(png: Path) -> None:
    images = labelled([png, png], "lemon")
    assert (images.names, len(images.split)) == (("lemon",), 2)


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "bad.png").write_bytes(b"no image")
    with pytest.raises(MissingData, match="class 'empty' has no image"):
        labelled(tmp_path)


def test_evaluation_skips_classes_that_were_not_learned(drawing_folders: Path) -> None:
    classifier = ContinualClassifier("pocket", "ncm", verbose=False)
    classifier.learn(drawing_folders / "task-1")
    evaluation = classifier.evaluate(drawing_folders / "test", skip_bad=True)
    assert set(evaluation.classes) == set(classifier.classes_)
    assert all("It has not been learned" in reason for reason in evaluation.left_out)
    assert evaluation.left_out


def test_size_of_a_reduced_photograph_is_that_of_the_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (900, 600)).save(tmp_path / "photo.jpg", exif=exif)
    image = open_image(tmp_path / "photo.jpg", 128)
    assert image.width < 600
    assert image.info[FULL_SIZE] == (600, 900)
    assert labelled([tmp_path / "photo.jpg"], "a").samples[0].size == (600, 900)


# --- HEIC


def test_skipped_heic_files_are_mentioned(
    tmp_path: Path, png: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "supports_heic", lambda: False)
    image_files.image_suffixes.cache_clear()
    (tmp_path / "phone.HEIC").write_bytes(b"a phone's photograph")
    hints: list[str] = []
    assert image_paths([tmp_path], hints.append) == [str(png)]
    assert hints == ["a HEIC file is skipped; to read them: pip install 'coda-prompt[heic]'"]
    with pytest.warns(CodaWarning, match=r"coda-prompt\[heic\]"):
        taught(range(2), method="ncm").predict(tmp_path)
    (tmp_path / "data" / "a").mkdir(parents=True)
    png.rename(tmp_path / "data" / "a" / "1.png")
    (tmp_path / "phone.HEIC").rename(tmp_path / "data" / "a" / "2.heic")
    assert any("coda-prompt[heic]" in remark for remark in labelled(tmp_path / "data").remarks)
    with pytest.raises(BadImages, match=r"coda-prompt\[heic\]"):
        taught(range(2), method="ncm").learn([tmp_path / "data" / "a" / "2.heic"], "a")


def test_heic_is_read_if_the_decoder_is_installed(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(Image.new("RGB", (64, 48), "red")).save(tmp_path / "a.heic")
    image_files.image_suffixes.cache_clear()
    assert as_image(image_paths([tmp_path])[0]).size == (64, 48)

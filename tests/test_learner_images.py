"""Images and folders as people have them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from drawings import SOURCE, taught
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import (
    BadImages,
    MissingData,
)


def picture(kind: str, path: Path) -> None:
    grey = SOURCE.train.image(0)
    if kind == "corrupt":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"no image" * 20)
    elif kind == "truncated":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:1500])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no image")
    elif kind == "bomb":
        Image.new("1", (20_000, 20_000)).save(path)
    elif kind == "cmyk":
        grey.convert("CMYK").save(path.with_suffix(".jpg"))
    elif kind == "16 bit":
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(path)
    elif kind == "palette":
        grey.convert("P").save(path)
    elif kind == "alpha":
        grey.convert("RGBA").save(path)
    elif kind == "animated":
        grey.save(path.with_suffix(".gif"), save_all=True, append_images=[grey] * 3)
    else:
        raise ValueError(kind)


BAD = ["corrupt", "truncated", "empty", "text", "bomb"]
GOOD = ["cmyk", "16 bit", "palette", "alpha", "animated"]


def test_all_unreadable_files_are_listed_before_learning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for number in range(5):
            SOURCE.train.image(number).save(folder / f"{number}.png")
    for kind in BAD:
        picture(kind, tmp_path / "data" / "a" / f"bad {kind}.png")
    for kind in GOOD:
        picture(kind, tmp_path / "data" / "b" / f"good {kind}.png")
    with pytest.raises(BadImages) as refused:
        ContinualClassifier(method="ncm").learn(tmp_path / "data")
    assert len(refused.value.problems) == len(BAD)
    for kind in BAD:
        assert f"bad {kind}.png" in str(refused.value)
    classifier = ContinualClassifier(method="ncm")
    learned = classifier.learn(tmp_path / "data", skip_bad=True)
    assert learned.images == {"a": 5, "b": 10}
    assert len(learned.left_out) == len(BAD)
    shown = coda("learn", str(tmp_path / "model"), str(tmp_path / "data"))
    assert shown.returncode == 2
    assert not (tmp_path / "model").exists(), "nothing is left of a model that was not learned"
    assert "--skip-bad" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.posix
def test_skip_bad_leaves_out_unreadable_images(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("a", "b", "all bad"):
        (data / name).mkdir(parents=True)
        for number in range(5):
            SOURCE.train.image(number).save(data / name / f"{number}.png")
    for number in range(30):
        picture("text", data / "a" / f"bad {number}.png")
    for file in (data / "all bad").iterdir():
        picture("empty", file)
    (data / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (data / "b" / "knot.png").symlink_to(data / "b" / "knot.png")
    SOURCE.train.image(0).save(data / "loose.png")
    (data / "empty").mkdir()
    for name in ("photo.svg", "PHOTO.SVG", "note"):
        (data / "a" / name).write_bytes(b"x")
    with pytest.raises(MissingData, match="class 'empty' has no image"):
        ContinualClassifier(method="ncm").learn(data)
    (data / "empty").rmdir()
    with pytest.raises(BadImages) as refused:
        ContinualClassifier(method="ncm").learn(data)
    (data / "empty").mkdir()
    assert "gone.png" in str(refused.value)
    assert "knot.png" in str(refused.value)
    assert all(f"bad {number}.png" in str(refused.value) for number in range(30)), "all are listed"
    learned = ContinualClassifier(method="ncm").learn(data, skip_bad=True)
    assert learned.images == {"a": 5, "b": 5}
    assert len(learned.left_out) == 37
    printed = " ".join(learned.warnings)
    assert "'all bad' has no image that can be read" in printed
    assert "1 images beside the class folders" in printed
    assert "'empty' has no image" in printed
    assert "2 with .svg, 1 with no ending" in printed
    shown = coda("learn", str(tmp_path / "model"), str(data), "--skip-bad")
    assert shown.returncode == 0
    assert len(re.findall(r"left out:\s+/", shown.stderr)) == 37


def test_unreadable_images_in_memory_are_listed_and_skipped(tmp_path: Path) -> None:
    picture("truncated", tmp_path / "cut off.png")
    lazy = Image.open(tmp_path / "cut off.png")
    images = [SOURCE.train.image(0), lazy, SOURCE.train.image(1)]
    with pytest.raises(BadImages, match="image 1"):
        ContinualClassifier(method="ncm").learn(images, ["a", "a", "b"])
    learned = ContinualClassifier(method="ncm").learn(images, ["a", "a", "b"], skip_bad=True)
    assert learned.images == {"a": 1, "b": 1}


def test_predictions_of_files_folders_and_patterns(tmp_path: Path) -> None:
    taught(range(2)).save(tmp_path / "model")
    for name in ("x1", "x2"):
        (tmp_path / name).mkdir()
        SOURCE.test.image(0).save(tmp_path / name / "good.png")
    odd = os.fsdecode(b"not-\xff-unicode.png")
    SOURCE.test.image(0).save(tmp_path / "plain.png")
    os.rename(tmp_path / "plain.png", tmp_path / odd)
    asked = ["predict", "model", "x*", "nowhere.png", odd, "--json"]
    refused = coda(*asked, cwd=tmp_path)
    assert refused.returncode == 2
    assert "nowhere.png: there is no such file" in refused.stderr
    shown = coda(*asked, "--skip-bad", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    paths = [row["path"] for row in json.loads(shown.stdout)]
    assert paths == ["x1/good.png", "x2/good.png", "not-\\xff-unicode.png"]
    listed = coda("predict", "model", "-", "--csv", cwd=tmp_path, input="x1/good.png\r\nx2\r\n")
    assert len(listed.stdout.splitlines()) == 3


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    taught(range(2)).save(tmp_path / "model")
    SOURCE.test.image(0).save(tmp_path / "red\x1b[31m.png")
    shown = coda(
        "predict", "model", "red\x1b[31m.png", "gone\x1b[2J.png", "--skip-bad", cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout + shown.stderr
    (tmp_path / "data" / "a\nb").mkdir(parents=True)
    with pytest.raises(MissingData, match="control"):
        ContinualClassifier(method="ncm").learn(tmp_path / "data")


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    classifier = taught(range(6))
    upright = SOURCE.test.image(3).convert("RGB").resize((56, 56))
    upright.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    first, second = classifier.predict_proba([tmp_path / "upright.png", tmp_path / "side.png"])
    np.testing.assert_allclose(first, second, atol=1e-6)
    opened = classifier.predict_proba(Image.open(tmp_path / "side.png"))[0]
    np.testing.assert_allclose(first, opened, atol=1e-6)


def test_every_colour_mode_gives_the_same_answer(tmp_path: Path) -> None:
    classifier = taught(range(6))
    grey = SOURCE.test.image(5)
    kinds = {
        "grey": grey,
        "rgb": grey.convert("RGB"),
        "opaque": grey.convert("RGBA"),
        "16 bit": Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
        "palette": grey.convert("P"),
    }
    chances = classifier.predict_proba(list(kinds.values()))
    for own in chances[1:]:
        np.testing.assert_allclose(own, chances[0], atol=1e-6)
    clear = Image.new("RGBA", (28, 28), (0, 0, 0, 0))
    white = Image.new("L", (28, 28), 255)
    np.testing.assert_allclose(*classifier.predict_proba([clear, white]), atol=1e-6)


@pytest.mark.posix
@pytest.mark.parametrize("trouble", ["empty class", "no class", "file", "missing", "parts", "loop"])
def test_unusable_folders_are_refused(trouble: str, tmp_path: Path) -> None:
    root = tmp_path / "dätä with space"
    good = root / "ä class"
    good.mkdir(parents=True)
    for number in range(3):
        SOURCE.train.image(number).save(good / f"{number} ü.png")
    classifier = ContinualClassifier(method="ncm")
    if trouble == "loop":
        (good / "again").symlink_to(root)
        assert classifier.learn(root).images == {"ä class": 3}
        return
    place = root
    if trouble == "empty class":
        (root / "nothing").mkdir()
    elif trouble == "no class":
        place = good
    elif trouble == "file":
        place = good / "0 ü.png"
    elif trouble == "missing":
        place = root / "nowhere"
    else:
        shutil.move(str(good), str(root / "train"))
    with pytest.raises(MissingData):
        classifier.learn(place)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_error_names_the_unreadable_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0)
    with pytest.raises(MissingData, match="cannot be read"):
        ContinualClassifier(method="ncm").learn(tmp_path)

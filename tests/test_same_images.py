"""Lessons of images that do not vary: their statistics are singular, and nothing may break."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.learner.model import CLASSIFIERS, PROMPTED

BLACK, WHITE = np.zeros((16, 16), np.uint8), np.full((16, 16), 255, np.uint8)
GREY = np.random.default_rng(0).integers(90, 110, (4, 16, 16)).astype(np.uint8)


def classifier_of(name: str, **options: bool) -> ContinualClassifier:
    shortly = {"epochs": 1, "batch_size": 8} if name in PROMPTED else {}
    return ContinualClassifier("pocket", name, verbose=False, **shortly, **options)


def check_finite(classifier: ContinualClassifier) -> None:
    images = [BLACK, WHITE, *GREY]
    assert np.isfinite(classifier.predict_proba(images)).all()
    answers = classifier.predictions(images, unknown="auto", unknown_rate=0.3)
    assert all(each.typicality is not None and 0 <= each.typicality <= 1 for each in answers)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_method_learns_images_that_are_all_the_same(name: str, tmp_path: Path) -> None:
    classifier = classifier_of(name)
    learned = classifier.learn([BLACK] * 6 + [WHITE] * 6, ["black"] * 6 + ["white"] * 6)
    assert "all images of 'black', 'white' are the same" in learned.hints[0]
    check_finite(classifier)
    if name != "coda-p":
        assert classifier.predict([BLACK, WHITE]).tolist() == ["black", "white"]
    classifier.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", verbose=False)
    loaded.learn([*GREY, WHITE], ["grey"] * 4 + ["white"])
    check_finite(loaded)


@pytest.mark.parametrize("name", ["ranpac", "slda", "ncm"])
def test_removable_models_learn_images_that_are_all_the_same(name: str) -> None:
    classifier = classifier_of(name, removable=True)
    classifier.learn([BLACK] * 6 + [WHITE] * 6, ["black"] * 6 + ["white"] * 6)
    check_finite(classifier)
    classifier.learn(list(GREY), "grey")
    classifier.forget("black")
    check_finite(classifier)


@pytest.mark.parametrize("name", ["ranpac", "slda", "ncm"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_classes_of_the_same_image_cannot_be_told_apart(name: str, count: int) -> None:
    classifier = classifier_of(name)
    learned = classifier.learn([BLACK] * 2 * count, ["a"] * count + ["b"] * count)
    expected = "all images of this lesson are the same: 'a', 'b' cannot be told apart"
    assert learned.hints == (expected,)
    assert classifier.predict_proba([BLACK])[0] == pytest.approx(0.5, abs=0.1)


def test_the_command_learns_constant_photographs(tmp_path: Path) -> None:
    for name, value in (("black", 0), ("white", 255)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(6):
            image = Image.new("RGB", (48, 48), (value,) * 3)
            image.save(tmp_path / "images" / name / f"{number}.png")
    done = coda("learn", "m", "images", "--backbone", "photo-vit", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all images of 'black', 'white' are the same" in json.loads(done.stdout)["hints"][0]
    asked = coda("predict", "m", "images", "--json", cwd=tmp_path)
    assert [each["best"] for each in json.loads(asked.stdout)] == ["black"] * 6 + ["white"] * 6

"""Images of another kind than those taught: a hint after the lesson, in reports and predictions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from small import coda

from coda_prompt import ContinualClassifier

CLASSES, TAUGHT = 3, 12


def photograph(row: int, number: int) -> Image.Image:
    """Blurred coloured noise with a shape: shaded everywhere, as photographs are."""
    random = np.random.default_rng([row, number])
    ground = Image.fromarray(random.integers(0, 256, (9, 9, 3)).astype(np.uint8))
    image = ground.resize((96, 96), Image.Resampling.BICUBIC)
    add_shape(image, row, random, fill=tuple(random.integers(0, 256, 3).tolist()))
    return image.filter(ImageFilter.GaussianBlur(2))


def cartoon(row: int, number: int) -> Image.Image:
    """Flat bright colours and black outlines."""
    random = np.random.default_rng([row, number])
    image = Image.new("RGB", (96, 96), tuple(random.choice([0, 255, 128], 3).tolist()))
    for _ in range(4):
        colour = tuple(random.choice([0, 255, 64], 3).tolist())
        add_shape(image, row, random, fill=colour, outline=(0, 0, 0), width=4)
    return image


def sketch(row: int, number: int) -> Image.Image:
    image = Image.new("RGB", (96, 96), (255, 255, 255))
    add_shape(image, row, np.random.default_rng(number), outline=(0, 0, 0), width=2)
    return image


def add_shape(image: Image.Image, row: int, random: np.random.Generator, **style: Any) -> None:
    """Draw a rectangle, an ellipse or a piece of one."""
    draw, (x, y) = ImageDraw.Draw(image), random.integers(8, 40, 2).tolist()
    box = (x, y, x + 44, y + 44)
    if row == 2:
        draw.chord(box, 0, 200, **style)
    else:
        (draw.rectangle, draw.ellipse)[row](box, **style)


def fill(root: Path, draw: Any, first: int = 0, rows: range = range(CLASSES)) -> None:
    for row in rows:
        (root / f"class-{row}").mkdir(parents=True)
        for number in range(first, first + TAUGHT):
            draw(row, number).save(root / f"class-{row}" / f"{number}.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of photographs, test photographs and sketches."""
    root = tmp_path_factory.mktemp("kinds")
    fill(root / "photographs", photograph)
    fill(root / "test", photograph, first=100)
    fill(root / "sketches", sketch)
    made_of = ("--backbone", "photo-vit", "--method", "ncm", "-q")
    taught = coda("learn", "m", "photographs", *made_of, cwd=root)
    assert taught.returncode == 0, taught.stderr
    return root


def test_evaluation_says_that_images_differ(folder: Path) -> None:
    def findings(images: str) -> list[str]:
        found: list[str] = json.loads(coda("evaluate", "m", images, "--json", cwd=folder).stdout)[
            "findings"
        ]
        return found

    assert findings("test") == []
    kind, typical = findings("sketches")
    assert "36 of 36 sampled images look like drawings" in kind
    assert "the images taught before are mostly photographs" in kind
    assert "of 36 images are not typical of the images taught before (about 2 would" in typical
    shown = coda("evaluate", "m", "sketches", cwd=folder).stdout
    assert "hint: 36 of 36 sampled images look like drawings" in " ".join(shown.split())


def test_predictions_say_that_images_differ(folder: Path) -> None:
    asked = coda("predict", "m", "sketches", "--json", cwd=folder)
    assert "36 of 36 sampled images look like drawings" in " ".join(asked.stderr.split())
    assert len(json.loads(asked.stdout)) == 36
    assert "look like" not in coda("predict", "m", "test", cwd=folder).stderr


def test_a_lesson_says_that_known_classes_look_different(folder: Path, tmp_path: Path) -> None:
    """Also of coloured images, which are no drawings."""
    fill(tmp_path / "cartoons", cartoon)

    def hints(images: Path) -> str:
        model = shutil.copytree(folder / "m", tmp_path / f"m-{images.name}")
        learned = json.loads(coda("learn", str(model), str(images), "--json").stdout)
        return " ".join(learned["hints"])

    expected = "images of known classes are not typical of the images taught before"
    assert expected in hints(tmp_path / "cartoons")
    assert expected not in hints(folder / "test")


def test_a_lesson_says_that_its_images_are_of_another_kind(folder: Path, tmp_path: Path) -> None:
    fill(tmp_path / "new", sketch)
    classifier = ContinualClassifier.load(folder / "m", verbose=False)
    (warning,) = classifier.learn(tmp_path / "new").warnings
    assert "36 of 36 sampled images look like drawings, but 'photo-vit' was trained on" in warning

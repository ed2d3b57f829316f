"""The confusion matrix, and hints after a lesson."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drawings import drawings, taught
from PIL import Image

from coda_prompt.errors import BadOption
from coda_prompt.learner.confusion import Confusion, ConfusionMatrix, draw_confusion
from coda_prompt.learner.hints import DUPLICATE, MAX_SHOWN, lesson_hints
from coda_prompt.learner.unknown import UnknownDetector

WIDTH = 16


def classes(count: int, *rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes with distant means, and their labels."""
    means = 4 * torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    labels = torch.tensor(rows).repeat_interleave(count)
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed))
    return means[labels] + noise.double(), labels


def hints(
    features: torch.Tensor, labels: torch.Tensor, before: UnknownDetector | None = None
) -> str:
    names = [f"class{row}" for row in range(10)]
    return "\n".join(lesson_hints(features, labels, names, before, lambda index: f"{index}.png"))


def test_matrix_counted_by_hand() -> None:
    truth, predicted = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 2, 2, 2, 0])
    matrix = ConfusionMatrix.count(truth, predicted, ["cat", "never seen", "dog"])
    assert matrix.classes == ("cat", "dog")
    assert matrix.counts == ((1, 2), (1, 1))
    assert matrix.confused() == (
        Confusion("cat", "dog", 2, pytest.approx(2 / 3)),
        Confusion("dog", "cat", 1, 0.5),
    )


def test_picture_of_the_matrix(tmp_path: Path) -> None:
    matrix = ConfusionMatrix(("cat", "dog"), ((3, 1), (0, 4)))
    draw_confusion(matrix, tmp_path / "confusion.png")
    assert Image.open(tmp_path / "confusion.png").width > 300
    with pytest.raises(BadOption, match=r"does not end in \.png"):
        draw_confusion(matrix, tmp_path / "confusion.jpg")
    with pytest.raises(BadOption, match="there is no folder"):
        draw_confusion(matrix, tmp_path / "none" / "confusion.png")


def test_clean_lessons_have_no_hints() -> None:
    before = UnknownDetector(WIDTH).learned(*classes(20, 0, 1, 2), 3)
    before.state()  # adds the lesson
    assert hints(*classes(20, 3, 4, 5, seed=1), before) == ""
    assert hints(*classes(3, 3, 4)) == ""


def test_duplicates_are_named() -> None:
    features, labels = classes(10, 0, 1)
    features[7] = features[3] * 1.0001
    assert hints(features, labels) == "near-duplicates: 3.png and 7.png"
    features[15], features[2] = features[3], features[1]
    assert hints(features, labels).splitlines()[0] == (
        "near-duplicates: 3.png and 7.png and 15.png (of different classes); 1.png and 2.png"
    )


def test_a_burst_is_one_group() -> None:
    features, labels = classes(12, 0, 1)
    step = 0.05 * torch.ones(WIDTH).double()
    for position in range(1, 10):  # neighbours are nearly the same, the first and the last are not
        features[position] = features[0] + position * step
    assert torch.cosine_similarity(features[0], features[9], dim=0) < DUPLICATE
    assert hints(features, labels) == "near-duplicates: 0.png and 1.png and 2.png and 7 more"


def test_mislabelled_images_are_named() -> None:
    features, labels = classes(20, 0, 1, 2)
    labels[5] = 2
    assert hints(features, labels) == "5.png looks like 'class0' and was taught as 'class2'"


def test_a_few_unusual_images_of_a_large_lesson_are_not_called_mislabelled() -> None:
    features, labels = classes(100, 0, 1, 2, 3, 4, 5)
    others, _ = classes(100, 1, 2, 3, 4, 5, 0)
    unusual = torch.arange(0, 600, 200)
    features[unusual] = others[unusual]  # 0.5 %, as lessons without wrong labels have
    assert hints(features, labels) == ""
    wrong = torch.arange(0, 600, 50)
    features[wrong] = others[wrong]
    assert hints(features, labels).count("was taught as") == MAX_SHOWN


def test_images_of_another_kind_get_no_hints_from_features() -> None:
    photographs = np.random.RandomState(0).randint(0, 256, (24, 64, 64, 3)).astype(np.uint8)
    photographs[1::2] = photographs[::2]
    learned = taught(range(2)).learn(photographs, ["a"] * 12 + ["b"] * 12)
    assert any("look like photographs" in warning for warning in learned.warnings)
    assert learned.hints == ()


def test_new_class_that_looks_like_an_old_one() -> None:
    before = UnknownDetector(WIDTH).learned(*classes(20, 0, 1, 2), 3)
    before.state()
    features, labels = classes(15, 1, 4, seed=1)
    labels[labels == 1] = 3
    assert hints(features, labels, before).startswith("'class3' looks like 'class1': if they are")


def test_learning_names_a_copied_drawing_and_the_confusions() -> None:
    classifier = taught(range(3))
    images, names = drawings(range(3, 5), 8)
    images = images.copy()
    images[1] = images[0]
    images[2] = images[0]  # at most one of the three is held out
    learned = classifier.learn(images, names, validation=0.2)
    assert any("near-duplicates: " in hint for hint in learned.hints)
    evaluation = classifier.evaluate(*drawings(range(5), 5, test=True))
    counts = torch.tensor(evaluation.confusion.counts)
    assert counts.sum() == evaluation.images
    assert evaluation.accuracy == pytest.approx(float(counts.trace() / counts.sum()))
    assert all(each.true != each.predicted for each in evaluation.confused)


def test_files_that_were_learned_before(drawing_folders: Path) -> None:
    classifier = taught(range(2))
    folder = drawing_folders / "task-1"
    classifier.verbose = False
    assert not any("learned before" in each for each in classifier.learn(folder).warnings)
    assert any("learned before, in lesson 2" in each for each in classifier.learn(folder).warnings)

"""Unknown images: how well and how often they are rejected, and the same answer everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, drawings, taught
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption
from coda_prompt.learner.evaluation import auroc, false_positive_rate


@pytest.fixture(scope="module")
def classifier() -> ContinualClassifier:
    return taught(range(6), range(6, 10))


def test_images_that_are_no_drawings_are_unknown(classifier: ContinualClassifier) -> None:
    random = np.random.RandomState(0)
    noise = random.randint(0, 256, (20, 28, 28)).astype(np.uint8)
    inverted = 255 - drawings(range(6), 4, test=True)[0]
    for images in (noise, inverted):
        answers = classifier.predictions(images, unknown="auto")
        assert np.mean([each.unknown for each in answers]) > 0.9


def test_separation_computed_by_hand() -> None:
    known, unknown = np.array([3.0, 2.0, 1.0, 2.0]), np.array([2.0, 0.0])
    assert auroc(known, unknown) == pytest.approx((1.0 + 0.75 + 0.5 + 0.75) / 4)
    known = np.arange(100.0)  # 95 % of them are 5 or more
    assert false_positive_rate(known, np.array([4.0, 5.0, 50.0, 1.0])) == 0.5


def other_drawings(count: int = 100) -> Any:
    """Drawings of classes that no model of this file has learned."""
    return drawings(range(50, 100), 2, test=True)[0][:count]


def test_predictions_reject_drawings_of_other_classes(classifier: ContinualClassifier) -> None:
    images, _ = drawings(range(10), 10, test=True)
    known = classifier.predictions(images, unknown="auto")
    others = classifier.predictions(other_drawings(), unknown="auto")
    rejected = np.mean([each.unknown for each in known])
    assert rejected < 0.15
    assert np.mean([each.unknown for each in others]) > rejected + 0.1
    for each in others:
        assert (each.label is None) == each.unknown
        assert each.best in NAMES
        assert each.typicality is not None
        assert each.unknown == (each.typicality < 0.05)
    strict = classifier(images, unknown="auto", unknown_rate=0.4)
    assert sum(each.unknown for each in strict) > sum(each.unknown for each in known)
    assert "unknown, best guess" in repr(strict)
    assert classifier.predictions(images[:1])[0].typicality is None


@pytest.mark.parametrize("method", ["slda", "coda-p"])
def test_typicality_does_not_change_the_probabilities(method: str) -> None:
    options: dict[str, Any] = {"epochs": 1} if method == "coda-p" else {}
    learned = taught(range(4), method=method, **options)
    known, others = (
        learned.predictions(images, unknown="auto")
        for images in (drawings(range(4), 8, test=True)[0], other_drawings(40))
    )
    shares = [np.mean([each.typicality for each in part]) for part in (known, others)]  # type: ignore[misc]
    assert shares[0] > shares[1] + 0.1
    plain = learned.predict_proba(other_drawings(40))
    assert np.allclose([each.probability for each in others], plain.max(axis=1), atol=1e-5)


def test_saved_model_gives_the_same_answers(
    classifier: ContinualClassifier, tmp_path: Path
) -> None:
    images, _ = drawings(range(12), 3, test=True)
    classifier.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model")
    assert loaded.predictions(images, unknown="auto") == classifier.predictions(
        images, unknown="auto"
    )
    loaded.undo()
    first = taught(range(6))
    images = images[:9]
    assert loaded.predictions(images, unknown="auto") == first.predictions(images, unknown="auto")


def test_rules_that_cannot_be_applied_are_refused(classifier: ContinualClassifier) -> None:
    image = drawings([0], 1)[0]
    with pytest.raises(BadOption, match="0 is less than 1"):
        classifier.predictions(image, top=0)
    with pytest.raises(BadOption, match="'never' is not 'auto'"):
        classifier.predictions(image, unknown="never")  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="between 0 and 1"):
        classifier.predictions(image, unknown="auto", unknown_rate=1.0)
    few = ContinualClassifier("pocket", verbose=False)
    few.learn(*drawings(range(5), 2))
    with pytest.raises(BadOption, match="19 images or more"):
        few.predictions(image, unknown="auto")


def test_class_called_unknown_is_told_from_unknown_images(tmp_path: Path) -> None:
    images, names = drawings(range(2), 20)
    learned = ContinualClassifier("pocket", "slda")
    learned.learn(images, ["unknown" if name == NAMES[0] else name for name in names])
    (answer,) = learned.predictions(drawings([0], 1)[0], top=1)
    assert (answer.label, answer.unknown) == ("unknown", False)
    (answer,) = learned.predictions(drawings([0], 1)[0], top=1, unknown_below=1.0)
    assert (answer.label, answer.unknown, answer.best) == (None, True, "unknown")


def test_command_line_and_evaluation(
    classifier: ContinualClassifier, tmp_path: Path, drawing_folders: Path
) -> None:
    classifier.save(tmp_path / "model")
    (tmp_path / "other").mkdir()
    for number, each in enumerate(other_drawings(30)):
        Image.fromarray(each).save(tmp_path / "other" / f"{number:02}.png")
    shown = coda("predict", "model", "other", "--unknown", "auto", "--json", cwd=tmp_path)
    answers = json.loads(shown.stdout)
    assert any(each["unknown"] for each in answers)
    assert all(each["label"] is None and each["best"] for each in answers if each["unknown"])
    for row in range(10):
        source = drawing_folders / "test" / NAMES[row]
        shutil.copytree(source, tmp_path / "test" / NAMES[row])
    arguments = ("evaluate", "model", "test", "--unknown-folder", "other")
    shown = coda(*arguments, "--json", "--picture", "confusion.png", cwd=tmp_path)
    evaluation = json.loads(shown.stdout)
    assert evaluation["unknown"]["auroc"] > 0.6
    assert evaluation["unknown"]["images"] == 30
    assert 0 < evaluation["unknown"]["false_positive_rate"] <= 1
    assert np.sum(evaluation["confusion"]["counts"]) == evaluation["images"]
    assert Image.open(tmp_path / "confusion.png").width > 300
    refused = coda("evaluate", "model", "test", "--picture", "confusion.jpg", cwd=tmp_path)
    assert refused.returncode == 2
    assert ".png" in refused.stderr


def test_typicality_follows_edits() -> None:
    learned, images = taught([0, 1, 2], [3, 4]), drawings([0, 1], 4, test=True)[0]
    learned.merge_classes([NAMES[1], NAMES[3]], "both")
    learned.forget(NAMES[2])
    learned.relabel(drawings([0], 2)[0], ["new", "new"], taught_as=NAMES[0])
    joined = ContinualClassifier.merge([learned, taught([5])])
    for each in (learned, joined):
        shares = [one.typicality for one in each.predictions(images, unknown="auto")]
        assert all(share is not None and 0 < share <= 1 for share in shares)
        assert np.mean([share or 0 for share in shares]) > 0.2


@pytest.mark.parametrize("method", ["ncm", "ranpac"])
def test_the_method_does_not_decide_what_is_unknown(
    method: str, classifier: ContinualClassifier
) -> None:
    other, images = taught(range(6), range(6, 10), method=method), drawings(range(10), 2)[0]
    shares = [
        [one.typicality for one in each.predictions(images, unknown="auto")]
        for each in (classifier, other)
    ]
    np.testing.assert_allclose(shares[0], shares[1], atol=1e-6)

"""Unknown images: the score, the rate of rejections, and the same answer everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, drawings, taught
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption, CorruptFile
from coda_prompt.learner.separation import auroc, false_positive_rate
from coda_prompt.learner.unknown import PREFIX, UnknownDetector, UnknownRule

WIDTH = 24


def gaussians(classes: range, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes with random means and the same covariance, and their labels."""
    means = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(7)).double() * 1.5
    labels = torch.tensor([row for row in classes for _ in range(count)])
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return means[labels] + noise, labels


def detector(*lessons: range, count: int = 40) -> UnknownDetector:
    learned = UnknownDetector(WIDTH)
    for number, classes in enumerate(lessons):
        learned = learned.learned(*gaussians(classes, count, number), classes.stop)
    return learned


def test_known_classes_are_more_typical_than_others() -> None:
    scorer = detector(range(8)).scorer()
    known, _ = gaussians(range(8), 50, seed=100)
    other, _ = gaussians(range(20, 28), 50, seed=101)
    assert auroc(scorer.standardised(known), scorer.standardised(other)) > 0.9


def test_rejections_have_the_rate_after_every_lesson() -> None:
    """Later lessons change all scores; images of the first one are not seen again."""
    learned, fresh = UnknownDetector(WIDTH), gaussians(range(6), 200, seed=100)[0]
    for number, classes in enumerate((range(6), range(6, 12), range(12, 20))):
        learned = learned.learned(*gaussians(classes, 40, number), classes.stop)
        share = learned.scorer()(fresh)
        for rate in (0.05, 0.2):  # fitted on 240 images at first: standard error 0.014 and 0.026
            assert float((share < rate).double().mean()) == pytest.approx(rate, abs=0.01 + rate / 4)


def test_learning_leaves_the_detector_before_unchanged() -> None:
    before = detector(range(3))
    state = {name: tensor.clone() for name, tensor in before.state().items()}
    before.learned(*gaussians(range(3, 5), 10), 5)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.state().items())


def test_one_class_and_one_image_per_class_give_finite_scores() -> None:
    for classes, count in ((range(1), 10), (range(5), 1), (range(1), 1)):
        scorer = detector(classes, count=count).scorer()
        assert torch.isfinite(scorer.standardised(gaussians(range(9), 3)[0])).all()
    one = detector(range(1), count=30).scorer()
    known, other = gaussians(range(1), 50, 100)[0], gaussians(range(20, 21), 50, 101)[0]
    assert auroc(one.standardised(known), one.standardised(other)) > 0.9


def test_an_image_alone_in_its_class_is_not_counted() -> None:
    assert detector(range(5), count=1).images == 0
    with pytest.raises(BadOption, match="19 images or more"):
        detector(range(5), count=1).check_rate(0.05)


def test_typicality_is_a_share_of_the_images() -> None:
    scorer = detector(range(4)).scorer()
    shares = scorer.typicality(torch.tensor([-1e9, -1.0, 0.0, 1.0, 1e9]).double())
    assert (shares.diff() >= 0).all()
    assert shares[0] == pytest.approx(1 / 161)
    assert shares[-1] == pytest.approx(1)


def test_state_of_other_classes_or_another_backbone_is_refused() -> None:
    state = detector(range(4)).state()
    assert UnknownDetector.from_state(WIDTH, 4, {"other": torch.zeros(1)}) is None
    restored = UnknownDetector.from_state(WIDTH, 4, state)
    assert restored is not None
    assert restored.images == 160
    for width, classes in ((WIDTH, 5), (WIDTH + 1, 4)):
        with pytest.raises(CorruptFile, match="do not fit"):
            UnknownDetector.from_state(width, classes, state)


def test_separation_computed_by_hand() -> None:
    known, unknown = torch.tensor([3.0, 2.0, 1.0, 2.0]), torch.tensor([2.0, 0.0])
    assert auroc(known, unknown) == pytest.approx((1.0 + 0.75 + 0.5 + 0.75) / 4)
    known = torch.arange(100.0)  # 95 % of them are 5 or more
    assert false_positive_rate(known, torch.tensor([4.0, 5.0, 50.0, 1.0])) == 0.5


@pytest.fixture(scope="module")
def classifier() -> ContinualClassifier:
    return taught(range(6), range(6, 10))


def strange_images(count: int) -> Any:
    """Drawings in black on white; the learned ones are white on black."""
    return 255 - drawings(range(10), 2, test=True)[0][:count]


def test_predictions_reject_strange_images(classifier: ContinualClassifier) -> None:
    images, _ = drawings(range(10), 10, test=True)
    known = classifier.predictions(images, unknown="auto")
    strange = classifier.predictions(strange_images(20), unknown="auto")
    assert np.mean([each.unknown for each in known]) < 0.15
    assert np.mean([each.unknown for each in strange]) > 0.9
    for each in strange:
        assert (each.label is None) == each.unknown
        assert each.best in NAMES
        assert each.typicality is not None
        assert each.unknown == (each.typicality < 0.05)
    strict = classifier.predictions(images, unknown="auto", unknown_rate=0.4)
    assert sum(each.unknown for each in strict) > sum(each.unknown for each in known)
    assert classifier.predictions(images[:1])[0].typicality is None


@pytest.mark.parametrize("method", ["ncm", "slda", "coda-p"])
def test_every_method_recognises_unknown_images(method: str) -> None:
    options: dict[str, Any] = {"epochs": 1} if method == "coda-p" else {}
    learned = taught(range(4), method=method, **options)
    images = strange_images(10)
    strange = learned.predictions(images, unknown="auto")
    assert np.mean([each.unknown for each in strange]) > 0.8
    plain = learned.predict_proba(images)
    best = [each.probability for each in strange]
    assert np.allclose(best, plain.max(axis=1), atol=1e-5)


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


def test_models_without_statistics_refuse_auto_and_keep_working(
    classifier: ContinualClassifier, tmp_path: Path
) -> None:
    network = classifier.network
    old = taught(range(6))
    old.network.detector = None
    old.network.set_tasks(old.network.tasks)
    old._saved = None
    old.save(tmp_path / "old")
    loaded = ContinualClassifier.load(tmp_path / "old")
    assert not any(name.startswith(PREFIX) for name in loaded._model().tensors)
    images, _ = drawings(range(6), 2, test=True)
    with pytest.raises(BadOption, match=r"earlier version.*--unknown-below"):
        loaded.predictions(images, unknown="auto")
    assert loaded.predictions(images, unknown_below=1.0)[0].unknown
    loaded.learn(*drawings(range(6, 8)))
    assert loaded.network.detector is None
    assert network.detector is not None


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadOption, match="'never' is not 'auto'"):
        UnknownRule.parse("never")
    with pytest.raises(BadOption, match="between 0 and 1"):
        UnknownRule.parse("auto", 1.0)


def test_class_called_unknown_is_told_from_unknown_images(tmp_path: Path) -> None:
    images, names = drawings(range(2), 20)
    learned = ContinualClassifier(width=256)
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
    for number, each in enumerate(strange_images(12)):
        Image.fromarray(each).save(tmp_path / "other" / f"{number}.png")
    shown = coda("predict", "model", "other", "--unknown", "auto", "--json", cwd=tmp_path)
    answers = json.loads(shown.stdout)
    assert sum(each["unknown"] for each in answers) > 10
    assert all(each["label"] is None and each["best"] for each in answers if each["unknown"])
    test = str(drawing_folders / "test")
    arguments = ("evaluate", "model", test, "--unknown-folder", "other")
    shown = coda(*arguments, "--json", "--picture", "confusion.png", cwd=tmp_path)
    evaluation = json.loads(shown.stdout)
    assert evaluation["unknown"]["auroc"] > 0.95
    assert evaluation["unknown"]["images"] == 12
    assert Image.open(tmp_path / "confusion.png").width > 300
    counts = np.array(evaluation["confusion"]["counts"])
    assert counts.sum() == evaluation["images"]
    correct = np.trace(counts)
    assert evaluation["accuracy"] == pytest.approx(correct / counts.sum())
    wrong = {(each["true"], each["predicted"]) for each in evaluation["confused"]}
    assert all(true != predicted for true, predicted in wrong)
    refused = coda("evaluate", "model", test, "--picture", "confusion.jpg", cwd=tmp_path)
    assert refused.returncode == 2
    assert ".png" in refused.stderr

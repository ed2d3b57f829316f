"""What lessons and evaluations tell: confusions, hints, held-out images, probabilities, shares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, SOURCE, drawings, taught
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption
from coda_prompt.learner.card import share_of
from coda_prompt.learner.checks import CHECKS, add_check, read_checks
from coda_prompt.learner.evaluation import confused_classes, confusion_matrix, draw_confusion
from coda_prompt.learner.findings import DUPLICATE, MAX_SHOWN, lesson_hints
from coda_prompt.learner.held_out import summarize
from coda_prompt.learner.records import WatchedAccuracy
from coda_prompt.learner.results import Confusion, ConfusionMatrix
from coda_prompt.statistics import calibration
from coda_prompt.statistics.moments import Moments

WIDTH = 16


def classes(count: int, *rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Features of classes with distant means, and their labels."""
    means = 4 * np.random.default_rng(3).standard_normal((10, WIDTH))
    labels = np.repeat(rows, count)
    return means[labels] + np.random.default_rng(seed).standard_normal((len(labels), WIDTH)), labels


def hints(features: Any, labels: Any, before: Moments | None = None) -> str:
    names, before = [f"class{row}" for row in range(10)], before or Moments.empty(WIDTH)
    return "\n".join(lesson_hints(features, labels, names, before, lambda index: f"{index}.png"))


def moments(*rows: int) -> Moments:
    return Moments.empty(WIDTH).grown(10).added(*classes(20, *rows))


def test_matrix_counted_by_hand() -> None:
    truth, predicted = np.array([0, 0, 0, 2, 2]), np.array([0, 2, 2, 2, 0])
    matrix = confusion_matrix(truth, predicted, ["cat", "never seen", "dog"])
    assert matrix.classes == ("cat", "dog")
    assert matrix.counts == ((1, 2), (1, 1))
    assert confused_classes(matrix) == (
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
    assert hints(*classes(20, 3, 4, 5, seed=1), moments(0, 1, 2)) == ""
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
    step = 0.05 * np.ones(WIDTH)
    for position in range(1, 10):  # neighbours are nearly the same, the first and the last are not
        features[position] = features[0] + position * step
    first, last = (each / np.linalg.norm(each) for each in features[[0, 9]])
    assert first @ last < DUPLICATE
    assert hints(features, labels) == "near-duplicates: 0.png and 1.png and 2.png and 7 more"


def test_mislabelled_images_are_named() -> None:
    features, labels = classes(20, 0, 1, 2)
    labels[5] = 2
    assert hints(features, labels) == "5.png looks like 'class0' and was taught as 'class2'"


def test_a_few_unusual_images_of_a_large_lesson_are_not_called_mislabelled() -> None:
    features, labels = classes(100, 0, 1, 2, 3, 4, 5)
    others, _ = classes(100, 1, 2, 3, 4, 5, 0)
    unusual = np.arange(0, 600, 200)
    features[unusual] = others[unusual]  # 0.5 %, as lessons without wrong labels have
    assert hints(features, labels) == ""
    wrong = np.arange(0, 600, 50)
    features[wrong] = others[wrong]
    assert hints(features, labels).count("was taught as") == MAX_SHOWN


def test_images_of_another_kind_get_no_hints_from_features() -> None:
    photographs = np.random.RandomState(0).randint(0, 256, (24, 64, 64, 3)).astype(np.uint8)
    photographs[1::2] = photographs[::2]
    learned = taught(range(2)).learn(photographs, ["a"] * 12 + ["b"] * 12)
    assert any("look like photographs" in warning for warning in learned.warnings)
    assert learned.hints == ()


def test_new_class_that_looks_like_an_old_one() -> None:
    features, labels = classes(15, 1, 4, seed=1)
    labels[labels == 1] = 3
    assert hints(features, labels, moments(0, 1, 2)).startswith(
        "'class3' looks like 'class1': if they are"
    )


def test_learning_names_a_copied_drawing_and_the_confusions() -> None:
    classifier = taught(range(3))
    images, names = drawings(range(3, 5), 8)
    images = images.copy()
    images[1] = images[0]
    images[2] = images[0]  # at most one of the three is held out
    learned = classifier.learn(images, names, validation=0.2)
    assert any("near-duplicates: " in hint for hint in learned.hints)
    evaluation = classifier.evaluate(*drawings(range(5), 5, test=True))
    counts = np.array(evaluation.confusion.counts)
    assert counts.sum() == evaluation.images
    assert evaluation.accuracy == pytest.approx(float(counts.trace() / counts.sum()))
    assert all(each.true != each.predicted for each in evaluation.confused)


def test_files_that_were_learned_before(drawing_folders: Path) -> None:
    classifier = taught(range(2))
    folder = drawing_folders / "task-1"
    classifier.verbose = False
    assert not any("learned before" in each for each in classifier.learn(folder).warnings)
    assert any("learned before, in lesson 2" in each for each in classifier.learn(folder).warnings)


# -- predictions of held-out images


def classifier() -> ContinualClassifier:
    return taught(range(4), range(4, 8), method="ncm")


def test_summary_agrees_with_the_accuracy_of_each_lesson() -> None:
    for task in classifier().model.tasks:
        summary = summarize([task])
        assert sum(each.images for each in summary.classes) == task.held_out
        right = sum(each.images * each.accuracy for each in summary.classes)
        assert right / task.held_out == pytest.approx(task.accuracy)
        wrong = sum(pair.images for pair in summary.confused)
        assert wrong == task.held_out - round(right)
        assert wrong > 0, "the test needs a confused pair"
        assert all(pair.true in task.new for pair in summary.confused)
        counts = [pair.images for pair in summary.confused]
        assert counts == sorted(counts, reverse=True)


def test_edits_change_the_names_of_the_predictions() -> None:
    model = classifier()
    before = summarize(model.model.tasks)
    confused = before.confused[0]
    model.rename(confused.true, "renamed")
    assert summarize(model.model.tasks).confused[0].true == "renamed"
    model.merge_classes(["renamed", confused.predicted], "united")
    after = {each.label: each for each in summarize(model.model.tasks).classes}
    images = {each.label: each.images for each in before.classes}
    assert after["united"].images == images[confused.true] + images[confused.predicted]
    assert all(
        {pair.true, pair.predicted} != {"united"} for pair in summarize(model.model.tasks).confused
    )
    model.forget("united")
    text = str([task.predictions for task in model.model.tasks])
    assert not any(
        name in text for name in ("united", "renamed", confused.true, confused.predicted)
    )


def test_cost_measured_after_saving_is_part_of_the_history(tmp_path: Path) -> None:
    model = classifier()
    model.save(tmp_path)
    assert read_checks(tmp_path).lessons == {}
    measured = WatchedAccuracy(classes=4, images=20, before=0.9, after=0.8)
    add_check(tmp_path, 2, model.model.tasks[1], measured)
    first, second = ContinualClassifier.load(tmp_path).history().entries
    assert first.older_before is None
    assert (second.older_before, second.older_after) == (0.9, 0.8)
    (tmp_path / CHECKS).write_text("{damaged")
    assert ContinualClassifier.load(tmp_path).history().entries[1].older_before is None
    assert NAMES[0] not in (tmp_path / CHECKS).read_text()


def test_positions_of_held_out_images_are_those_of_the_counts() -> None:
    model = ContinualClassifier(method="ncm", verbose=False)
    images, labels = drawings([0, 1], 10)
    learned = model.learn(images, labels)
    assert len(learned.held_out_images) == learned.held_out == 4
    counts = model.model.tasks[0].predictions
    held_out = [labels[index] for index in learned.held_out_images]
    assert {name: sum(row.values()) for name, row in counts.items()} == {
        name: held_out.count(name) for name in labels
    }


# -- probabilities


def test_few_correct_images_do_not_make_the_model_certain() -> None:
    logits = np.eye(3)
    found = calibration.fit_temperature(logits, np.arange(3), default=0.1)
    assert 0.03 < found < 0.2
    assert calibration.merge_temperatures([], default=0.1) == 0.1
    assert calibration.merge_temperatures([(0.2, 30), (5.0, 0)], 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize("method", ["slda", "ranpac", "ncm"])
def test_probabilities_of_small_lessons_are_neither_certain_nor_flat(method: str) -> None:
    classifier = ContinualClassifier("pocket", method, verbose=False)
    for rows in ([0, 1, 2], [3, 4, 5]):
        classifier.learn(*drawings(rows, count=10))
    images, names = drawings(range(6), test=True)
    assert 0.4 < np.median(classifier.predict_proba(images).max(axis=1)) < 0.995
    assert classifier.evaluate(images, names).calibration_error < 0.2


def test_calibration_error_computed_by_hand() -> None:
    sure = np.array([[0.95, 0.05]] * 4 + [[0.65, 0.35]] * 4)
    labels = np.array([0, 0, 0, 1, 0, 1, 1, 1])
    expected = 0.5 * abs(0.75 - 0.95) + 0.5 * abs(0.25 - 0.65)
    error = calibration.expected_calibration_error(np.log(sure), labels, 1.0)
    assert error == pytest.approx(expected)


@pytest.mark.parametrize("method", ["slda", "ranpac"])
def test_probabilities_are_calibrated(method: str) -> None:
    """Scores are no logits: without the temperature they are far from believable."""
    classifier = ContinualClassifier("pocket", method, verbose=False)
    classifier.learn(*drawings(range(10), count=60))
    images, names = drawings(range(10), test=True)
    labels = np.array([classifier.classes_.index(name) for name in names])
    chances = classifier.predict_proba(images)
    raw = np.log(np.maximum(chances, 1e-300)) * classifier.temperature
    uncalibrated = calibration.expected_calibration_error(raw, labels, 1.0)
    found = classifier.evaluate(images, names).calibration_error
    assert found < uncalibrated
    assert found < 0.12


# -- shares of few images


def fill(root: Path, rows: range, images: range) -> None:
    for row in rows:
        (root / SOURCE.class_names[row]).mkdir(parents=True, exist_ok=True)
        for number in images:
            image = SOURCE.train.image(640 * row + number)
            image.save(root / SOURCE.class_names[row] / f"{number}.png")


def test_shares() -> None:
    assert [share_of(1.0, 1), share_of(2 / 3, 9), share_of(0.5, 10)] == [
        "1 of 1",
        "6 of 9",
        "50.0 %",
    ]
    assert [share_of(None, 3), share_of(0.25, 0)] == ["-", "25.0 %"]


def test_commands_count_few_images(tmp_path: Path) -> None:
    fill(tmp_path / "first", range(2), range(5))
    fill(tmp_path / "second", range(2, 3), range(5))
    fill(tmp_path / "test", range(2), range(10, 12))
    fill(tmp_path / "other", range(4, 5), range(3))

    def shown(*arguments: str) -> str:
        done = coda(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.replace("│", " ").split())

    learned = shown("learn", "m", "first", "--method", "ncm")
    assert re.search(r"on 2 held-out images: \d of 2 right among all 2 classes, \d of 2", learned)
    again = shown("learn", "m", "second", "--check", "test")
    assert re.search(r"on 1 held-out image: \d of 1 right among all 3 classes, 1 of 1", again)
    assert re.search(r"checked classes: \d of 4 -> \d of 4", again)
    history = shown("history", "m")
    assert re.search(r"5 \d of 1 1 of 1 \d of 4 -> \d of 4", history)
    evaluated = shown("evaluate", "m", "test", "--unknown-folder", "other", "--unknown-rate", "0.4")
    assert re.search(r"4 images: \d of 4 correct", evaluated)
    assert re.search(r"of the known images, \d of 4 and, of the unknown ones, \d of 3", evaluated)
    card = (tmp_path / "m" / "README.md").read_text()
    assert re.search(r"\| 5 \| \d of 1 \| 1 of 1 \|", card)
    percentages = re.findall(r"[\d.]+ %", learned + again + history + evaluated + card)
    assert set(percentages) <= {"95 %", "40.0 %"}, "the rates of the rule for unknown images"

"""A classifier that keeps learning: what it learns, tells and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, arrays, assert_same, drawings, taught
from PIL import Image

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption, Interrupted, NotLearned, UnknownName
from coda_prompt.images.inputs import image_paths
from coda_prompt.images.labelled import labelled
from coda_prompt.learner.findings import image_findings
from coda_prompt.learner.results import Progress
from coda_prompt.statistics.calibration import expected_calibration_error


def test_three_lines_of_python(drawing_folders: Path) -> None:
    classifier = ContinualClassifier()
    classifier.learn(drawing_folders / "task-1")
    names = classifier.predict(image_paths([drawing_folders / "test" / NAMES[0]]))
    assert (names == NAMES[0]).mean() > 0.5
    assert classifier.classes_ == list(NAMES[:4])


def test_every_kind_of_data_gives_the_same_model(drawing_folders: Path) -> None:
    """A folder, paths, PIL images, arrays, tensors and a dataset with the same images."""
    reference = ContinualClassifier(method="ncm")
    reference.learn(drawing_folders / "task-1")
    paths = image_paths([drawing_folders / "task-1"])
    names = [Path(path).parent.name for path in paths]
    pictures = [Image.open(path) for path in paths]
    arrays = np.stack([np.asarray(picture) for picture in pictures])

    class Pairs(torch.utils.data.Dataset[Any]):
        classes = NAMES[:4]

        def __len__(self) -> int:
            return len(pictures)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return pictures[index], self.classes.index(names[index])

    kinds: list[tuple[Any, ...]] = [
        (str(drawing_folders / "task-1"),),
        (paths, names),
        (pictures, names),
        (arrays, names),
        (arrays / 255.0, names),
        (torch.from_numpy(arrays)[:, None], np.array(names)),
        (Pairs(),),
    ]
    for data in kinds:
        other = ContinualClassifier(method="ncm")
        other.learn(*data)
        assert_same(reference, other)


def test_known_classes_are_continued() -> None:
    classifier = taught(range(3), method="ncm")
    images, names = drawings([0, 5], count=40)
    learned = classifier.learn(images, names, validation=0)
    assert learned.new == (NAMES[5],)
    assert learned.continued == (NAMES[0],)
    assert classifier.classes_ == [*NAMES[:3], NAMES[5]]
    assert classifier.tasks_[1]["continued"] == [NAMES[0]]
    assert arrays(classifier)["unknown.counts"].tolist() == [20 + 40, 20, 20, 40]


def test_integer_labels_stay_integers(tmp_path: Path) -> None:
    classifier = ContinualClassifier(method="ncm")
    images, _ = drawings(range(2))
    classifier.learn(images, [7] * 20 + [10] * 20)
    assert classifier.classes_ == [7, 10]
    answers = classifier.predict(images)
    assert answers.dtype == np.int64
    assert set(answers.tolist()) == {7, 10}
    classifier.save(tmp_path)
    loaded = ContinualClassifier.load(tmp_path)
    assert loaded.predict(images).tolist() == answers.tolist()
    loaded.learn(drawings([2])[0], np.full(20, 8))
    assert loaded.classes_ == [7, 10, 8]
    assert loaded.evaluate(images, [7] * 20 + [10] * 20).classes.keys() == {"7", "10"}
    loaded.rename("10", "ten")
    assert loaded.classes_ == ["7", "ten", "8"], "one class is no integer any more"
    classifier.learn(drawings([2])[0], "other")
    assert classifier.classes_ == ["7", "10", "other"]
    assert set(classifier.predict(images).tolist()) <= {"7", "10", "other"}


def test_predict_proba_follows_the_order_of_classes() -> None:
    classifier = taught(range(4), range(4, 6))
    images, names = drawings(range(6), test=True)
    chances = classifier.predict_proba(images)
    assert chances.shape == (len(names), 6)
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-9)
    chosen = [classifier.classes_[row] for row in chances.argmax(axis=1)]
    assert chosen == classifier.predict(images).tolist()
    right = np.mean([a == b for a, b in zip(chosen, names, strict=True)])
    assert classifier.score(images, names) == pytest.approx(right)


def test_evaluation_by_class_and_by_task() -> None:
    classifier = taught(range(4), range(4, 6))
    images, names = drawings(range(6), test=True)
    found = classifier.evaluate(images, names)
    chosen = classifier.predict(images)
    for name, own in found.classes.items():
        mine = [a == b for a, b in zip(chosen, names, strict=True) if b == name]
        assert own.images == 20
        assert own.accuracy == pytest.approx(np.mean(mine))
    assert [task.classes for task in found.tasks] == [NAMES[:4], NAMES[4:6]]
    for task in found.tasks:
        assert task.accuracy_own >= task.accuracy
    assert found.accuracy == pytest.approx(
        np.mean([own.accuracy for own in found.classes.values()])
    )


def test_old_tasks_retain_accuracy_among_their_own_classes() -> None:
    """Over all classes a task has more to be mistaken for; among its own it stays what it was."""
    classifier = ContinualClassifier(method="slda")
    then = []
    for first in (0, 5, 10):
        classifier.learn(*drawings(range(first, first + 5), count=40))
        own = classifier.evaluate(*drawings(range(first, first + 5), test=True)).tasks
        then.append(own[-1].accuracy_own)
    found = classifier.evaluate(*drawings(range(15), test=True))
    for task, before in zip(found.tasks, then, strict=True):
        assert task.accuracy_own >= before - 0.05


def test_the_default_beats_nearest_class_means_on_one_class_per_lesson() -> None:
    accuracies = []
    for options in ({}, {"method": "ncm"}):
        classifier = ContinualClassifier("pocket", **options)
        for row in range(12):
            classifier.learn(*drawings([row], 40), validation=0)
        accuracies.append(classifier.score(*drawings(range(12), test=True)))
    assert accuracies[0] >= accuracies[1] + 0.03


@pytest.mark.parametrize("method", ["slda", "ranpac"])
def test_new_class_with_few_images_is_predicted_beside_large_ones(method: str) -> None:
    tests = drawings(range(10), test=True)
    classifier = ContinualClassifier("pocket", method)
    classifier.learn(*drawings(range(10), 80), validation=0)
    before = classifier.score(*tests)
    classifier.learn(*drawings([20, 21], 5), validation=0)
    assert classifier.score(*drawings([20, 21], test=True)) > 0.3
    assert classifier.score(*tests) > before - 0.08


def test_held_out_images_are_measured_and_then_learned() -> None:
    """Measured by a classifier of the other images; learned as if none had been held out."""
    earlier, (images, labels) = taught(range(12), method="ncm"), drawings(range(12, 16))
    held_out = np.zeros(len(images), bool)
    learned = (classifier := taught(range(12), method="ncm")).learn(images, labels)
    held_out[list(learned.held_out_images)] = True
    assert held_out.sum() == learned.held_out == 16
    chosen = [label for label, out in zip(labels, held_out, strict=True) if not out]
    earlier.learn(images[~held_out], chosen, validation=0)
    truth = np.array([earlier.classes_.index(labels[at]) for at in np.flatnonzero(held_out)])
    chances = earlier.predict_proba(images[held_out])
    assert learned.accuracy == pytest.approx((chances.argmax(axis=1) == truth).mean())
    own = chances[:, 12:].argmax(axis=1) + 12
    assert learned.accuracy_own == pytest.approx((own == truth).mean())
    assert learned.accuracy_own > learned.accuracy
    scores = np.log(chances) * earlier.temperature
    error = expected_calibration_error(scores, truth, classifier.temperature)
    assert learned.calibration_error == pytest.approx(error, abs=1e-6)
    whole = taught(range(12), method="ncm")
    whole.learn(images, labels, validation=0)
    assert_same(classifier, whole)
    assert classifier.temperature == whole.temperature


def test_checked_images_measure_forgetting(drawing_folders: Path) -> None:
    classifier = ContinualClassifier()
    classifier.learn(drawing_folders / "task-1")
    before = classifier.evaluate(*drawings(range(4), 8, test=True)).classes
    learned = classifier.learn(drawing_folders / "task-2", check=drawing_folders / "test")
    assert set(learned.forgotten) == set(NAMES[:4]), "classes not known before are not checked"
    after = classifier.evaluate(*drawings(range(4), 8, test=True)).classes
    for name, (then, now) in learned.forgotten.items():
        assert then == pytest.approx(before[name].accuracy)
        assert now == pytest.approx(after[name].accuracy)


def test_forgetting_is_reported() -> None:
    classifier = taught(range(2), method="ncm")
    check = list(zip(*drawings(range(2), test=True), strict=True))
    again, _ = drawings([0], test=True)
    learned = classifier.learn(again, ["the same under another name"] * len(again), check=check)
    then, now = learned.forgotten[NAMES[0]]
    assert now < then


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"cat": 4, "dog": 9}, "fewer than 5"),
        ({"cat": 1, "dog": 9}, "learned from one image"),
        ({"Bird": 9, "dog": 9}, "'bird' and 'Bird'"),
        ({"alarm clock": 9, "alarm_clocks": 9}, "'alarm clock' and 'alarm_clocks'"),
        ({"cat": 10, "dog": 12, "type 1": 10, "type 2": 10}, None),
    ],
)
def test_doubtful_images_are_warned_about(counts: dict[str, int], words: str | None) -> None:
    classifier = ContinualClassifier("pocket", "ncm", verbose=False)
    learned = classifier.learn(drawings([9], 6)[0], "bird")
    assert learned.warnings == (
        "this is the only class so far: every image will be assigned to it",
    )
    images = [drawings([row], count)[0] for row, count in enumerate(counts.values())]
    labels = [name for name, count in counts.items() for _ in range(count)]
    found = classifier.learn(np.concatenate(images), labels).warnings
    assert any(words in each for each in found) if words else not found


def test_a_trained_head_is_biased_towards_a_class_with_more_images() -> None:
    labelled_images = labelled(*drawings([0, 1], 44))
    few = labelled_images.selected(np.arange(40, 88))
    for method, expected in (("coda-p", 1), ("slda", 0)):
        model = ContinualClassifier("pocket", method).model
        found = image_findings(model, few, few.samples, None)
        assert sum("be biased towards" in each for each in found) == expected


def test_images_that_the_backbone_is_not_for_are_warned_about() -> None:
    small = ContinualClassifier("photo-vit", "ncm", verbose=False)
    grey = np.random.default_rng(0).integers(0, 255, (6, 28, 28, 3), np.uint8)
    found = small.learn(grey, "a").warnings
    assert any("are about 28 px, but the backbone expects 112 px" in each for each in found)
    photographs = np.random.default_rng(0).integers(0, 255, (6, 128, 128, 3), np.uint8)
    found = ContinualClassifier("pocket", "ncm", verbose=False).learn(photographs, "a").warnings
    assert any("for photographs make a model with --backbone photo" in each for each in found)


def test_auto_chooses_by_the_images_of_the_first_lesson() -> None:
    classifier = ContinualClassifier(verbose=False)
    learned = classifier.learn(*drawings(range(2), 6))
    assert learned.chosen == "pocket: 10 of 12 sampled images are drawings"
    assert classifier.backbone_name == "pocket"
    assert classifier.learn(*drawings([2], 6)).chosen is None


def test_subset_of_a_dataset_uses_its_class_names() -> None:
    images, names = drawings(range(2), 4)

    class Named(torch.utils.data.Dataset):  # type: ignore[type-arg]
        classes = NAMES[:2]

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return images[index], NAMES.index(names[index])

    part = torch.utils.data.Subset(Named(), [0, 1, 4, 5])
    assert ContinualClassifier(method="ncm").learn(part).images == {NAMES[0]: 2, NAMES[1]: 2}


def test_options_that_cannot_be_used_are_refused_and_nothing_is_learned() -> None:
    classifier = ContinualClassifier("pocket")
    with pytest.raises(BadOption, match="nothing to train"):
        classifier.learn(*drawings(range(2)), epochs=3)
    for share in (-0.1, 1.0):
        with pytest.raises(BadOption, match="validation"):
            classifier.learn(*drawings(range(2)), validation=share)
    for method in ("er-5000", "ft++", "l2p++", "rancap"):
        with pytest.raises(UnknownName, match="method"):
            ContinualClassifier("pocket", method).learn(*drawings(range(2)))
    with pytest.raises(UnknownName, match="no such backbone"):
        ContinualClassifier("no such backbone").learn(*drawings(range(2)))
    assert classifier.classes_ == []


def test_interrupted_learn_leaves_the_classifier_unchanged() -> None:
    classifier = taught(range(3))
    polls = iter(range(100))
    with pytest.raises(Interrupted):
        classifier.learn(*drawings([3, 4]), stop=lambda: next(polls) == 7)
    assert_same(classifier, taught(range(3)))
    assert not classifier.can_undo
    fresh = ContinualClassifier()
    with pytest.raises(KeyboardInterrupt):
        fresh.learn(*drawings([3, 4]), on_progress=_interrupt)
    assert fresh.classes_ == []


def _interrupt(progress: Progress) -> None:
    if progress.done == 7:
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["slda", "ncm"])
def test_lessons_add_up(method: str) -> None:
    """Images of a class in two lessons, in one, or another order of classes: equal scores.

    Images are left out of their lesson alone to correct the temperature, so it differs a little.
    """
    images, labels = drawings(range(6))
    first = np.arange(len(images)) % 20 < 10
    names = np.array(labels)
    parts = ContinualClassifier("pocket", method)
    parts.learn(images[first], names[first])
    parts.learn(images[~first], names[~first])
    turned = ContinualClassifier("pocket", method)
    turned.learn(images[::-1], names[::-1])
    whole = taught(range(6), method=method)
    tests = drawings(range(6), test=True)[0]
    expected = whole.predict_proba(tests)
    scores = [np.log(each.predict_proba(tests)) * each.temperature for each in (parts, whole)]
    differences = [each - each.max(axis=1, keepdims=True) for each in scores]
    np.testing.assert_allclose(*differences, rtol=0, atol=1e-3)
    assert turned.classes_ == whole.classes_[::-1]
    np.testing.assert_allclose(turned.predict_proba(tests)[:, ::-1], expected, rtol=0, atol=1e-4)
    assert parts.temperature == pytest.approx(whole.temperature, rel=0.3)


def test_predicting_before_learning_raises_not_learned() -> None:
    with pytest.raises(NotLearned, match="has not learned any class"):
        ContinualClassifier(method="ncm").predict(drawings([0])[0])
    with pytest.raises(NotLearned, match=NAMES[7]):
        taught(range(2), method="ncm").evaluate(*drawings([7]))


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (np.zeros((2, 28, 28), np.uint8), ["a"]),
        (np.zeros((2, 28, 28), np.uint8), [1.5, 2.5]),
        (np.full((2, 28, 28), 3.0), ["a", "b"]),
        (np.zeros((2, 28), np.uint8), ["a", "b"]),
        (3, None),
        ([], None),
        ([1, 2, 3], None),
        ("a folder", ["a"]),
        (["a.png", "b.png"], None),
        ([Image.new("LAB", (28, 28))], ["a"]),
        ([Image.new("L", (0, 0))], ["a"]),
        ([Image.new("L", (28, 28))], ["a\x1b[2J"]),
        ([Image.new("L", (28, 28))], ["a\u202eb"]),
    ],
)
def test_data_that_cannot_be_learned_are_refused(data: Any, labels: Any) -> None:
    with pytest.raises((BadOption, TypeError)):
        ContinualClassifier(method="ncm").learn(data, labels)

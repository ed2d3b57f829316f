"""A classifier that keeps learning: what it learns, tells and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, assert_same, drawings, taught, tensors
from PIL import Image

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption, NotLearned
from coda_prompt.images.inputs import image_paths
from coda_prompt.images.labelled import Labelled, MemorySplit, labelled
from coda_prompt.learner import advice
from coda_prompt.learner.calibration import expected_calibration_error
from coda_prompt.learner.lesson import make_task
from coda_prompt.learner.network import Network


def test_three_lines_of_python(drawing_folders: Path) -> None:
    classifier = ContinualClassifier()
    classifier.learn(drawing_folders / "task-1")
    names = classifier.predict(image_paths([drawing_folders / "test" / NAMES[0]]))
    assert (names == NAMES[0]).mean() > 0.5
    assert classifier.classes_ == list(NAMES[:4])


def test_every_kind_of_data_gives_the_same_model(drawing_folders: Path) -> None:
    """A folder, paths, PIL images, arrays, tensors and a dataset with the same images."""
    reference = ContinualClassifier(method="ranpac", width=256)
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
        other = ContinualClassifier(method="ranpac", width=256)
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
    assert tensors(classifier)["counts.frozen"].tolist() == [16 + 40, 16, 16, 40]


def test_integer_labels_become_strings() -> None:
    classifier = ContinualClassifier(method="ncm")
    images, _ = drawings(range(2))
    classifier.learn(images, [7] * 20 + [10] * 20)
    assert classifier.classes_ == ["7", "10"]
    assert set(classifier.predict(images)) <= {"7", "10"}


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
    classifier = ContinualClassifier(method="ranpac", width=512)
    then = []
    for first in (0, 5, 10):
        classifier.learn(*drawings(range(first, first + 5), count=40))
        own = classifier.evaluate(*drawings(range(first, first + 5), test=True)).tasks
        then.append(own[-1].accuracy_own)
    found = classifier.evaluate(*drawings(range(15), test=True))
    for task, before in zip(found.tasks, then, strict=True):
        assert task.accuracy_own >= before - 0.05


def test_ranpac_beats_nearest_class_mean_on_one_class_per_task() -> None:
    """Twelve classes of 40 drawings, with the method that learn takes by default."""
    accuracies = []
    for options in ({"width": 512}, {"method": "ncm"}):
        classifier = ContinualClassifier(**options)
        for row in range(12):
            classifier.learn(*drawings([row], count=40), validation=0)
        accuracies.append(classifier.score(*drawings(range(12), test=True)))
    assert accuracies[0] >= accuracies[1] + 0.03


def test_new_class_with_few_images_is_predicted_beside_large_ones() -> None:
    """And where all classes have as many, every class counts alike anyway."""
    old, labels = drawings(range(10), 80)
    tests = drawings(range(10), test=True)
    scores = {}
    for balance in (False, True):
        classifier = ContinualClassifier(balance=balance, width=512)
        classifier.learn(old, labels, validation=0)
        before = classifier.score(*tests)
        scores[balance, "before"] = before
        classifier.learn(*drawings([20, 21], 5), validation=0)
        found = classifier.evaluate(*drawings([20, 21], test=True)).accuracy
        scores[balance, "new"], scores[balance, "old"] = found, classifier.score(*tests)
    assert scores[True, "before"] == pytest.approx(scores[False, "before"], abs=0.006)
    assert scores[True, "new"] > scores[False, "new"] + 0.2
    assert scores[True, "new"] > 0.3
    assert scores[True, "old"] > scores[True, "before"] - 0.08


def test_reported_accuracy_matches_the_held_out_images(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = ContinualClassifier(method="ncm")
    images, labels = drawings(range(12), 20)
    classifier.learn(images, labels, validation=0)
    held_out: list[int] = []

    def recorded(*given: Any) -> Any:
        task = make_task(*given)
        held_out.extend(task.test.indices.tolist())
        return task

    monkeypatch.setattr("coda_prompt.learner.classifier.make_task", recorded)
    images, labels = drawings(range(12, 16), 20)
    learned = classifier.learn(images, labels)
    chances = classifier.predict_proba(images[held_out])
    rows = torch.tensor([classifier.classes_.index(labels[place]) for place in held_out])
    own = torch.from_numpy(chances)[:, 12:]
    assert learned.accuracy == pytest.approx(float((chances.argmax(1) == rows.numpy()).mean()))
    assert learned.accuracy_own == pytest.approx(
        float((own.argmax(1) + 12 == rows).double().mean())
    )
    assert learned.accuracy_own > learned.accuracy
    error = expected_calibration_error(torch.from_numpy(chances).log(), rows, 1.0)
    assert learned.calibration_error == pytest.approx(error, abs=1e-6)


def test_checked_images_measure_forgetting(drawing_folders: Path) -> None:
    classifier = ContinualClassifier(method="ranpac", width=256)
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


def some(counts: dict[str, int], size: int = 28) -> Labelled:
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    images = [Image.new("L", (size, size))] * len(labels)
    return Labelled(MemorySplit(images, labels), tuple(counts))


def network(known: list[str], backbone: str = "pocket") -> Network:
    """A network that has learned the classes `known`."""
    network = ContinualClassifier(backbone, "ncm", device="cpu").network
    network.classes = known
    return network


@pytest.mark.parametrize(
    ("counts", "known", "words"),
    [
        ({"cat": 4, "dog": 9}, [], "fewer than 5"),
        ({"cat": 6, "dog": 90}, [], "be biased towards 'dog'"),
        ({"Cat": 9, "dog": 9}, ["cat"], "'cat' and 'Cat'"),
        ({"alarm clock": 9, "alarm_clocks": 9}, [], "'alarm clock' and 'alarm_clocks'"),
        ({"cat": 9}, [], "the only class"),
    ],
)
def test_data_to_check_is_warned_about(
    counts: dict[str, int], known: list[str], words: str
) -> None:
    found = advice.warnings(network(known), some(counts))
    assert any(words in warning for warning in found)


def test_no_warning_for_good_data() -> None:
    images = some({"cat": 10, "dog": 12, "type 1": 10, "type 2": 10})
    assert advice.warnings(network(["bird"]), images) == []


def test_warnings_about_small_images_and_photographs() -> None:
    small = advice.warnings(network([], "photo@224"), some({"a": 9}))
    assert any("expects 224 px" in warning for warning in small)
    random = np.random.default_rng(0).integers(0, 255, (9, 128, 128, 3), np.uint8)
    photographs = labelled(random, ["a"] * 9)
    found = advice.warnings(network([]), photographs)
    assert any("vit-b16-in21k" in warning for warning in found)


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


def test_closed_form_methods_refuse_epochs() -> None:
    with pytest.raises(BadOption, match="nothing to train"):
        ContinualClassifier().learn(*drawings(range(2)), epochs=3)


def test_temperature_is_fitted_to_held_out_images() -> None:
    classifier = taught(range(6))
    (task,) = classifier.tasks_
    assert task["fitted_on"] == task["held_out"] > 0
    assert task["temperature"] != classifier.network.method.temperature
    images, names = drawings(range(6), test=True)
    rows = [classifier.classes_.index(name) for name in names]

    def surprise() -> float:
        chances = classifier.predict_proba(images)
        return float(-np.log(chances[np.arange(len(rows)), rows]).mean())

    fitted = surprise()
    classifier.predictor.temperature = 1.0
    assert fitted < surprise()


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

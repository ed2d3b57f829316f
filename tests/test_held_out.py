"""Predictions of held-out images in the records of lessons, and what lessons cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawings import NAMES, drawings, taught

from coda_prompt import ContinualClassifier
from coda_prompt.learner.checks import CHECKS, add_check, read_checks
from coda_prompt.learner.held_out import summarize
from coda_prompt.learner.store import WatchedAccuracy


def classifier() -> ContinualClassifier:
    return taught(range(4), range(4, 8), method="ncm")


def test_summary_agrees_with_the_accuracy_of_each_lesson() -> None:
    for task in classifier().network.tasks:
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
    before = summarize(model.network.tasks)
    confused = before.confused[0]
    model.rename(confused.true, "renamed")
    assert summarize(model.network.tasks).confused[0].true == "renamed"
    model.merge_classes(["renamed", confused.predicted], "united")
    after = {each.label: each for each in summarize(model.network.tasks).classes}
    images = {each.label: each.images for each in before.classes}
    assert after["united"].images == images[confused.true] + images[confused.predicted]
    assert all(
        {pair.true, pair.predicted} != {"united"}
        for pair in summarize(model.network.tasks).confused
    )
    model.forget("united")
    text = str([task.predictions for task in model.network.tasks])
    assert not any(
        name in text for name in ("united", "renamed", confused.true, confused.predicted)
    )


def test_cost_measured_after_saving_is_part_of_the_history(tmp_path: Path) -> None:
    model = classifier()
    model.save(tmp_path)
    assert read_checks(tmp_path).lessons == {}
    measured = WatchedAccuracy(classes=4, before=0.9, after=0.8)
    add_check(tmp_path, 2, model.network.tasks[1], measured)
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
    counts = model.network.tasks[0].predictions
    held_out = [labels[index] for index in learned.held_out_images]
    assert {name: sum(row.values()) for name, row in counts.items()} == {
        name: held_out.count(name) for name in labels
    }

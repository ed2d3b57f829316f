"""Temperatures: as torch computed them before, and those that make probabilities right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coda_prompt.statistics.algebra import unit
from coda_prompt.statistics.calibration import (
    expected_calibration_error,
    fit_temperature,
    merge_temperatures,
    softmax,
)
from coda_prompt.statistics.classifier import OPTIONS, Classifier, solve_shared
from coda_prompt.statistics.ridge import solve_ridge

FIXTURE = Path(__file__).parents[1] / "fixtures" / "closed-forms.npz"


def test_numbers_are_those_of_the_torch_code_of_before() -> None:
    with np.load(FIXTURE) as data:
        logits, labels = data["slda"], np.arange(40) % 6
        assert fit_temperature(logits, labels, 1.0) == pytest.approx(data["temperature"], rel=1e-6)
        error = expected_calibration_error(logits, labels, 2.0)
        assert error == pytest.approx(float(data["calibration_error"]), rel=1e-6)


def test_temperature_of_sampled_labels_is_found() -> None:
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((4000, 5)) * 3
    uniform = generator.random((4000, 1))
    labels = (softmax(logits, 2.0).cumsum(axis=1) < uniform).sum(axis=1)
    assert fit_temperature(logits, labels, 1.0) == pytest.approx(2.0, rel=0.05)
    assert expected_calibration_error(logits, labels, 2.0) < 0.03


def test_classes_without_images_change_nothing() -> None:
    generator = np.random.default_rng(0)
    logits, labels = generator.standard_normal((50, 4)), generator.integers(0, 4, 50)
    absent = np.concatenate([logits, np.full((50, 1), -np.inf)], axis=1)
    assert fit_temperature(absent, labels, 1.0) == pytest.approx(fit_temperature(logits, labels, 1))


@pytest.mark.parametrize("name", ["slda", "ranpac"])
@pytest.mark.parametrize("images", [4, 30])
def test_probabilities_of_new_images_are_calibrated(name: str, images: int) -> None:
    """More features than images of all classes: scores of learned images say nothing."""
    width, classes, generator = 256, 30, np.random.default_rng(0)
    scales = np.arange(1, width + 1) ** -0.5
    means = generator.standard_normal((classes, width)) * scales

    def sample(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(classes), count)
        noise = generator.standard_normal((len(labels), width)) * scales
        tail = np.sqrt(generator.gamma(2.0, 0.5, (len(labels), 1)))
        return unit(means[labels] + 0.9 * noise / tail), labels

    options = replace(OPTIONS[name], width=512)
    classifier = Classifier.empty(options, width).learned(*sample(images), classes)
    features, labels = sample(60)
    scores, temperature = classifier.scores(features), classifier.temperature
    assert expected_calibration_error(scores, labels, temperature) < 0.12


@pytest.mark.parametrize("name", ["slda", "ranpac"])
def test_an_image_left_out_is_scored_as_if_it_had_never_been_learned(name: str) -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(80) % 4
    features = generator.standard_normal((80, 12)) + 2 * np.eye(4, 12)[labels]
    options = replace(OPTIONS[name], features="plain", shrinkage=1e-9, ridge="relative")
    empty = Classifier.empty(options, 12)
    moments = empty.moments.added(features, labels)
    found = (
        solve_shared(moments, 0.3)[2]
        if name == "slda"
        else solve_ridge(moments, "relative", balance=True)[1]
    )
    assert found is not None
    scores = found.left_out(features[:3], labels[:3])
    for image in range(3):
        rest = np.arange(80) != image
        without = empty.moments.added(features[rest], labels[rest])
        if name == "slda":
            weight, bias, _ = solve_shared(without, 0.3)
        else:
            weight, _ = solve_ridge(without, "relative", balance=True)
            bias = np.zeros(4)
        expected = weight @ features[image] + bias
        squares = (found.weight * found.means).sum(axis=1)
        learned = found.scores(features[[image]] @ found.weight.T, squares)[0]
        expected, learned, scored = (
            each - each.mean() for each in (expected, learned, scores[image])
        )
        assert abs(scored - expected).max() < 0.5 * abs(learned - expected).max()


def test_temperature_is_the_same_however_lessons_were_split() -> None:
    generator = np.random.default_rng(0)
    features, labels = unit(generator.standard_normal((60, 20))), np.arange(60) % 6
    features[np.arange(60), labels] += 1
    options = replace(OPTIONS["slda"], removable=True)
    once = Classifier.empty(options, 20).learned(features, labels, 6)
    by_class = Classifier.empty(options, 20)
    for row in range(6):
        by_class = by_class.learned(features[labels == row], labels[labels == row], row + 1)
    assert by_class.temperature == pytest.approx(once.temperature, rel=1e-6)


def test_images_left_out_in_lessons_correct_the_temperature() -> None:
    """A fifth of the images has no class: samples would be too confident."""
    generator = np.random.default_rng(0)

    def sample(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 10
        certain = generator.random((count, 1)) < 0.8
        noise = generator.standard_normal((count, 20)) * 0.3
        return unit(2 * np.eye(10, 20)[labels] * certain + noise), labels

    features, labels = sample(400)
    corrected = Classifier.empty(OPTIONS["slda"], 20).learned(features, labels, 10)
    removable = Classifier.empty(replace(OPTIONS["slda"], removable=True), 20)
    features_only = removable.learned(features, labels, 10)  # nothing is stored of single images
    features, labels = sample(4000)
    best = fit_temperature(corrected.scores(features), labels, 1.0)
    assert corrected.temperature == pytest.approx(best, rel=0.2)
    assert features_only.temperature < best / 2


def test_temperatures_of_lessons_are_merged_by_their_images() -> None:
    assert merge_temperatures([(1.0, 10), (4.0, 10)], 0.5) == pytest.approx(2.0)
    assert merge_temperatures([], 0.5) == 0.5

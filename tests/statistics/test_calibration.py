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
from coda_prompt.statistics.classifier import OPTIONS, Classifier

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
@pytest.mark.parametrize("images", [1, 4, 30])
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


def test_temperature_is_the_same_however_lessons_were_split() -> None:
    generator = np.random.default_rng(0)
    features, labels = unit(generator.standard_normal((60, 20))), np.arange(60) % 6
    features[np.arange(60), labels] += 1
    once = Classifier.empty(OPTIONS["slda"], 20).learned(features, labels, 6)
    by_class = Classifier.empty(OPTIONS["slda"], 20)
    for row in range(6):
        by_class = by_class.learned(features[labels == row], labels[labels == row], row + 1)
    assert by_class.temperature == pytest.approx(once.temperature, rel=1e-6)


def test_temperatures_of_lessons_are_merged_by_their_images() -> None:
    assert merge_temperatures([(1.0, 10), (4.0, 10)], 0.5) == pytest.approx(2.0)
    assert merge_temperatures([], 0.5) == 0.5

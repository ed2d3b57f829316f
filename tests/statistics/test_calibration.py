"""Temperatures: as torch computed them before, and those that make probabilities right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coda_prompt.statistics.calibration import (
    expected_calibration_error,
    expected_temperature,
    fit_temperature,
    merge_temperatures,
    softmax,
)

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


def test_expected_temperature_falls_with_the_number_of_images() -> None:
    generator = np.random.default_rng(0)
    means, covariance = generator.standard_normal((8, 16)), np.eye(16)

    def scores(features: np.ndarray) -> np.ndarray:
        return features @ means.T - (means**2).sum(axis=1) / 2

    few, many = (
        expected_temperature(scores, means, np.full(8, count), covariance, 8 * (count - 1), 1.0)
        for count in (2, 200)
    )
    assert few > many > 0
    assert expected_temperature(scores, means[:1], np.array([5]), covariance, 4, 0.3) == 0.3


def test_temperatures_of_lessons_are_merged_by_their_images() -> None:
    assert merge_temperatures([(1.0, 10), (4.0, 10)], 0.5) == pytest.approx(2.0)
    assert merge_temperatures([], 0.5) == 0.5

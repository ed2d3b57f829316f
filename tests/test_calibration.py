"""Probabilities that can be believed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drawings import drawings

from coda_prompt import ContinualClassifier
from coda_prompt.data.resolve import labelled
from coda_prompt.learner import calibration


def test_fitted_temperature_minimizes_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 7 * torch.randn(400, 5, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / 3, dim=1), 1, generator=generator)[:, 0]
    found = calibration.fit_temperature(logits, labels, default=1.0)
    assert found == pytest.approx(3, rel=0.15)

    def loss(temperature: float) -> float:
        likelihood = torch.nn.functional.cross_entropy(logits.double() / temperature, labels)
        return float(likelihood) + 10 / 400 * math.log(temperature) ** 2

    assert all(loss(found) <= loss(found * factor) for factor in (0.9, 0.99, 1.01, 1.1))


def test_few_correct_images_do_not_make_the_model_certain() -> None:
    logits = torch.eye(3)
    found = calibration.fit_temperature(logits, torch.arange(3), default=0.1)
    assert 0.03 < found < 0.2
    assert calibration.merge_temperatures([], default=0.1) == 0.1
    assert calibration.merge_temperatures([(0.2, 30), (5.0, 0)], 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_probabilities_of_small_tasks_are_neither_certain_nor_flat(validation: float) -> None:
    classifier = ContinualClassifier(width=512)
    for row in range(6):
        classifier.learn(*drawings([row], count=10), validation=validation)
    images, names = drawings(range(6), test=True)
    found = classifier.evaluate(images, names)
    sure = np.median(classifier.predict_proba(images).max(axis=1))
    assert 0.4 < sure < 0.99
    assert found.calibration_error < 0.2


def test_calibration_error_computed_by_hand() -> None:
    sure = torch.tensor([[0.95, 0.05]] * 4 + [[0.65, 0.35]] * 4, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1])
    expected = 0.5 * abs(0.75 - 0.95) + 0.5 * abs(0.25 - 0.65)
    error = calibration.expected_calibration_error(sure.log(), labels, 1.0)
    assert error == pytest.approx(expected)


def test_probabilities_are_calibrated() -> None:
    """Scores of RanPAC are no logits: without the temperature they are far from believable."""
    classifier = ContinualClassifier(method="ranpac")
    classifier.learn(*drawings(range(10), count=80))
    images, names = drawings(range(10), test=True)
    found = classifier.evaluate(images, names)
    labels = torch.tensor([classifier.classes_.index(name) for name in names])
    split = labelled(images, names).split
    raw = classifier.predictor.split_logits(split)
    uncalibrated = calibration.expected_calibration_error(raw, labels, 1.0)
    assert found.calibration_error < 0.5 * uncalibrated
    assert found.calibration_error < 0.12

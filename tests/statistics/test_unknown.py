"""Unknown images: distances as torch computed them before, and rates that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coda_prompt.errors import BadOption, CorruptFile
from coda_prompt.statistics.moments import Moments
from coda_prompt.statistics.typicality import BINS, Gaussians, Prior, images_needed
from coda_prompt.statistics.unknown import UnknownDetector, UnknownRule, _Lesson

FIXTURE = Path(__file__).parents[1] / "fixtures" / "closed-forms.npz"
WIDTH = 24


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    with np.load(FIXTURE) as file:
        return dict(file)


@pytest.fixture(scope="module")
def prior(data: dict[str, Any]) -> Prior:
    return Prior(data["prior_covariance"], data["prior_means"])


def sample(
    generator: np.random.Generator, classes: int, images: int, centers: Any
) -> tuple[Any, Any]:
    labels = np.repeat(np.arange(classes), images)
    noise = generator.standard_normal((len(labels), WIDTH)) * np.linspace(0.3, 1.5, WIDTH)
    return (centers[labels] + noise).astype(np.float32), labels


@pytest.mark.parametrize("name", ["unknown", "unknown_prior"])
def test_distances_are_those_of_the_torch_code_of_before(
    name: str, data: dict[str, Any], prior: Prior
) -> None:
    moments = Moments.empty(WIDTH).added(data["features"], data["labels"])
    gaussians = Gaussians.of(moments, prior if name == "unknown_prior" else None)
    np.testing.assert_allclose(gaussians.distances(data["queries"]), data[name], rtol=1e-6)


@pytest.mark.parametrize("with_prior", [False, True])
def test_scores_without_images_are_those_of_statistics_without_them(
    with_prior: bool, data: dict[str, Any], prior: Prior
) -> None:
    features, labels = np.tile(data["features"], (9, 1)), np.tile(data["labels"], 9)
    features = features + np.random.default_rng(0).standard_normal(features.shape)
    used = prior if with_prior else None
    detector = UnknownDetector.empty(WIDTH, prior=used).learned(features, labels, 6)
    lesson = _Lesson(detector, Gaussians.of(detector.moments, used), features, labels)
    left_out = np.arange(len(labels)) % 10 == 3
    rest = UnknownDetector.empty(WIDTH, prior=used)
    moments = rest.moments.added(features[~left_out], labels[~left_out])
    distances = Gaussians.of(moments, used).distances(features[left_out])
    expected = detector._scale().standardised(distances)
    scores = lesson.scores_without(left_out, np.flatnonzero(left_out))
    # without a prior, the rest would be shrunk a little more
    np.testing.assert_allclose(scores, expected, atol=0.01 if with_prior else 0.06)


@pytest.mark.parametrize("images", [4, 15])
def test_new_images_of_known_classes_are_rejected_at_the_rate(images: int) -> None:
    rejected = []
    for draw in range(12):
        generator = np.random.default_rng(draw)
        centers = generator.standard_normal((10, WIDTH))
        detector = UnknownDetector.empty(WIDTH)
        for lesson in (slice(0, 6), slice(6, 10)):
            features, labels = sample(generator, 10, images, centers)
            chosen = np.isin(labels, np.arange(10)[lesson])
            detector = detector.learned(features[chosen], labels[chosen], lesson.stop)
        features, _ = sample(generator, 10, 50, centers)
        rejected.append((detector.scorer().typicality(features) < 0.1).mean())
    assert np.mean(rejected) == pytest.approx(0.1, abs=0.03)


def test_other_classes_are_less_typical() -> None:
    generator = np.random.default_rng(0)
    centers = generator.standard_normal((20, WIDTH)) * 2
    features, labels = sample(generator, 20, 20, centers)
    detector = UnknownDetector.empty(WIDTH).learned(features[:200], labels[:200], 10)
    new, rows = sample(generator, 20, 20, centers)
    typicality = detector.scorer().typicality(new)
    assert typicality[rows < 10].mean() > typicality[rows >= 10].mean() + 0.3


@pytest.mark.parametrize("removable", [False, True])
def test_edits_and_storage(removable: bool, data: dict[str, Any], prior: Prior) -> None:
    features, labels = data["features"], data["labels"]
    whole = UnknownDetector.empty(WIDTH, removable, prior).learned(features, labels, 6)
    assert whole.images == len(labels) - 1  # one image is alone in its class
    arrays = whole.arrays()
    again = UnknownDetector.of_arrays(WIDTH, arrays, 6, removable, prior)
    assert all(np.array_equal(array, again.arrays()[key]) for key, array in arrays.items())
    expected = whole.scorer().typicality(data["queries"])
    np.testing.assert_array_equal(again.scorer().typicality(data["queries"]), expected)

    united = whole.united([1, 3], 1)
    together = UnknownDetector.empty(WIDTH, removable, prior)
    together = together.learned(features, np.array([0, 1, 2, 1, 3, 4])[labels], 5)
    np.testing.assert_allclose(united.scale, together.scale, rtol=1e-5)
    assert united.images == whole.images
    assert whole.without_classes([0]).images == whole.images - 20
    empty = UnknownDetector.empty(WIDTH, removable, prior)
    np.testing.assert_allclose(empty.joined(whole, range(6)).scale, whole.scale, rtol=1e-5)
    moved = whole.moved(features[:2], 0, np.array([1, 1]))
    assert moved.moments.counts.tolist() == [18, 15, 7, 5, 2, 1]


def test_arrays_of_other_classes_or_widths_are_refused(data: dict[str, Any]) -> None:
    detector = UnknownDetector.empty(WIDTH).learned(data["features"], data["labels"], 6)
    arrays = detector.arrays()
    for width, changed, classes in (
        (WIDTH, arrays, 5),
        (WIDTH + 1, arrays, 6),
        (WIDTH, {**arrays, "scale": -detector.scale}, 6),
        (WIDTH, {**arrays, "histogram": detector.histogram[:, 1:]}, 6),
        (WIDTH, {**arrays, "counts": 0 * arrays["counts"]}, 6),
    ):
        with pytest.raises(ValueError, match=r"classes|shape|positive"):
            UnknownDetector.of_arrays(width, changed, classes)


def test_moments_that_contradict_each_other_are_a_corrupt_file(data: dict[str, Any]) -> None:
    detector = UnknownDetector.empty(WIDTH).learned(data["features"], data["labels"], 6)
    arrays = detector.arrays()
    arrays["within"] = np.where(arrays["within"] > 0, arrays["within"], 5 * arrays["within"])
    broken = UnknownDetector.of_arrays(WIDTH, arrays, 6)
    with pytest.raises(CorruptFile, match="contradict"):
        broken.scorer()


def test_one_image_and_images_that_are_the_same_give_finite_scores() -> None:
    for images in (np.ones((1, WIDTH)), np.ones((30, WIDTH))):
        labels = np.zeros(len(images), np.int64)
        detector = UnknownDetector.empty(WIDTH).learned(images, labels, 1)
        assert np.isfinite(detector.scorer().typicality(images)).all()


def test_a_rate_needs_images() -> None:
    assert images_needed(0.05) == 19
    detector = UnknownDetector.empty(WIDTH).learned(np.eye(WIDTH), np.arange(WIDTH) % 2, 2)
    scorer = detector.scorer()
    assert scorer.can_reject(0.05)
    assert scorer.missing_images(0.01) == 99 - WIDTH
    with pytest.raises(BadOption, match="99 images or more"):
        scorer.check_rate(0.01)
    assert scorer.histogram.sum() == WIDTH
    assert len(scorer.histogram) == BINS


def test_rules_that_make_no_sense_are_refused() -> None:
    assert UnknownRule.parse("auto", 0.1).rejects(0.9, 0.05)
    assert not UnknownRule.parse().rejects(0.0, 0.0)
    for wrong in ({"unknown": "yes"}, {"unknown": "auto", "rate": 1.0}, {"below": 2.0}):
        with pytest.raises(BadOption):
            UnknownRule.parse(**wrong)  # type: ignore[arg-type]

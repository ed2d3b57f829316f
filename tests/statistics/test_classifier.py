"""The closed forms: as torch computed them before, and the same however they came about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_prompt.errors import CannotEdit
from coda_prompt.statistics.classifier import OPTIONS, Classifier, ClassifierOptions
from coda_prompt.statistics.features import random_projection

FIXTURE = Path(__file__).parents[1] / "fixtures" / "closed-forms.npz"
"""Features, and what the torch code of commit 33c0cd1 computed from them in float64."""
WIDTH, CLASSES = 24, 6
UNBLENDED = replace(OPTIONS["ranpac"], width=96, blend=False)
BEFORE: dict[str, ClassifierOptions] = {
    "ncm": OPTIONS["ncm"],
    "slda": OPTIONS["slda"],
    "slda_published": replace(OPTIONS["slda"], features="plain", shrinkage=1e-4),
    "ranpac": replace(OPTIONS["ranpac"], width=96),
    "ranpac_removable": replace(OPTIONS["ranpac"], width=96, removable=True),
    "ranpac_balanced": replace(UNBLENDED, ridge=3.0),
    "ranpac_published": replace(UNBLENDED, ridge=3.0, balance=False),
}
EXACT: dict[str, ClassifierOptions] = {
    "ncm": OPTIONS["ncm"],
    "slda": OPTIONS["slda"],
    "slda_removable": replace(OPTIONS["slda"], removable=True),
    "ranpac": UNBLENDED,
    "ranpac_removable": replace(UNBLENDED, removable=True),
}
"""Without blending, which depends on the images of each lesson."""


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    with np.load(FIXTURE) as file:
        return dict(file)


def learned(options: ClassifierOptions, data: dict[str, Any], images: Any) -> Classifier:
    empty = Classifier.empty(options, WIDTH, data["projection"])
    return empty.learned(data["features"][images], data["labels"][images], CLASSES)


def assert_equal(actual: Classifier, expected: Classifier, data: dict[str, Any]) -> None:
    scores = expected.scores(data["queries"])
    np.testing.assert_allclose(
        actual.scores(data["queries"]), scores, atol=2e-6 * abs(scores[np.isfinite(scores)]).max()
    )


@pytest.mark.parametrize("name", BEFORE)
def test_scores_are_those_of_the_torch_code_of_before(name: str, data: dict[str, Any]) -> None:
    classifier = learned(BEFORE[name], data, slice(0, 30))
    classifier = classifier.learned(data["features"][30:], data["labels"][30:], CLASSES)
    expected = data[name]
    scores = classifier.scores(data["queries"])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6 * abs(expected).max())


@pytest.mark.parametrize("name", EXACT)
def test_two_lessons_are_one(name: str, data: dict[str, Any]) -> None:
    even = np.arange(len(data["labels"])) % 2 == 0
    whole = learned(EXACT[name], data, slice(None))
    first, second = learned(EXACT[name], data, even), learned(EXACT[name], data, ~even)
    assert_equal(
        first.learned(data["features"][~even], data["labels"][~even], CLASSES), whole, data
    )
    assert_equal(first.joined(second, range(CLASSES)), whole, data)


@pytest.mark.parametrize("name", EXACT)
def test_united_classes_are_those_taught_under_one_name(name: str, data: dict[str, Any]) -> None:
    united = learned(EXACT[name], data, slice(None)).united([1, 3], 1)
    labels = np.array([0, 1, 2, 1, 3, 4])[data["labels"]]
    assert_equal(
        united,
        learned(EXACT[name], {**data, "labels": labels}, slice(None)).without_classes([5]),
        data,
    )


@pytest.mark.parametrize("name", EXACT)
def test_moved_images_are_those_taught_as_the_other_class(name: str, data: dict[str, Any]) -> None:
    labels = data["labels"].copy()
    labels[[2, 5, 8]] = [1, 1, 3]
    wrong = learned(EXACT[name], data, slice(None))
    moved = wrong.moved(data["features"][[2, 5, 8]], 0, labels[[2, 5, 8]])
    assert_equal(moved, learned(EXACT[name], {**data, "labels": labels}, slice(None)), data)


@pytest.mark.parametrize("name", ["ncm", "slda_removable", "ranpac_removable"])
def test_nothing_of_a_forgotten_class_remains(name: str, data: dict[str, Any]) -> None:
    forgotten = learned(EXACT[name], data, slice(None)).without_classes([1])
    others = data["labels"] != 1
    labels = np.array([0, 0, 1, 2, 3, 4])[data["labels"]]
    never = learned(EXACT[name], {**data, "labels": labels}, others).without_classes([5])
    for key, array in never.arrays().items():
        np.testing.assert_allclose(forgotten.arrays()[key], array, rtol=1e-6, err_msg=key)


def test_a_forgotten_class_leaves_its_share_of_the_pooled_covariance(data: dict[str, Any]) -> None:
    whole = learned(OPTIONS["slda"], data, slice(None))
    forgotten = whole.without_classes([1])
    np.testing.assert_allclose(
        forgotten.moments.covariance()[0], whole.moments.covariance()[0], rtol=1e-9
    )
    assert forgotten.moments.counts.tolist() == [20, 7, 5, 2, 1]


@pytest.mark.parametrize("name", [*BEFORE, *EXACT])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stored_arrays_are_the_same_to_the_bit(name: str, dtype: Any, data: dict[str, Any]) -> None:
    options = (BEFORE | EXACT)[name]
    drawn = random_projection(options.seed, WIDTH, options.width)
    data = {**data, "features": data["features"].astype(dtype), "projection": drawn}
    classifier = learned(options, data, slice(None))
    arrays = classifier.arrays()
    again = Classifier.of_arrays(options, WIDTH, arrays, CLASSES)
    assert all(np.array_equal(array, again.arrays()[key]) for key, array in arrays.items())
    queries = data["queries"].astype(dtype)
    np.testing.assert_array_equal(again.scores(queries), classifier.scores(queries))
    more = data["features"][:9], data["labels"][:9], CLASSES
    np.testing.assert_array_equal(again.learned(*more).weight, classifier.learned(*more).weight)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(EXACT)),
    key=st.integers(0, 5),
    change=st.sampled_from(["missing", "longer", "type", "nan"]),
)
def test_arrays_that_do_not_fit_are_refused(name: str, key: int, change: str) -> None:
    with np.load(FIXTURE) as file:
        data = dict(file)
    arrays = dict(learned(EXACT[name], data, slice(None)).arrays())
    chosen = sorted(arrays)[key % len(arrays)]
    array = arrays.pop(chosen)
    if change == "longer":
        arrays[chosen] = np.concatenate([array, array[:1]])
    elif change == "type":
        arrays[chosen] = array.astype(np.float16)
    elif change == "nan":
        changed = array.copy()
        changed.flat[0] = np.nan if array.dtype.kind == "f" else -1
        arrays[chosen] = changed
    with pytest.raises(ValueError, match=r"missing|shape|values|expected|fit"):
        Classifier.of_arrays(EXACT[name], WIDTH, arrays, CLASSES)


def test_no_single_image_can_be_read_from_a_gram_matrix() -> None:
    generator = np.random.default_rng(0)
    features = generator.standard_normal((3, WIDTH))
    options = replace(OPTIONS["ranpac"], width=512)
    classifier = Classifier.empty(options, WIDTH).learned(features, np.array([0, 0, 1]), 2)
    hidden = classifier.mapping(features)
    alone = (hidden > 0).sum(axis=0) == 1
    gram = classifier.moments.second_moments()
    for image in hidden[:2]:  # of the class with two images
        rows = gram[alone & (image > 0)]
        cosines = rows @ image / (np.linalg.norm(rows, axis=1) * np.linalg.norm(image))
        assert len(rows) > 20
        assert cosines.max() < 0.95


def test_classes_without_images_score_lowest(data: dict[str, Any]) -> None:
    for name, lowest in (("slda", -np.inf), ("ncm", -1.0)):
        classifier = Classifier.empty(OPTIONS[name], WIDTH)
        classifier = classifier.learned(data["features"], data["labels"], CLASSES + 1)
        assert set(classifier.scores(data["queries"])[:, -1]) == {lowest}


def test_classifiers_with_other_features_are_not_joined(data: dict[str, Any]) -> None:
    first = Classifier.empty(UNBLENDED, WIDTH)
    with pytest.raises(CannotEdit, match="one seed"):
        first.joined(Classifier.empty(replace(UNBLENDED, seed=1), WIDTH), [])
    with pytest.raises(CannotEdit, match="different methods or options"):
        first.joined(Classifier.empty(OPTIONS["slda"], WIDTH), [])


def test_random_features_never_change() -> None:
    expected = [0.1821, 1.3064, 0.2121, 0.2828, 0.1326]
    assert random_projection(7, 3, 5)[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert abs(random_projection(0, 300, 300).std() - 1) < 0.01

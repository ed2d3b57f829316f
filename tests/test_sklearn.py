"""`ContinualClassifier` as an estimator of scikit-learn, and its parameters without it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, drawings, taught

from coda_prompt import ContinualClassifier
from coda_prompt.errors import CodaWarning, UnknownName


def quiet(**params: Any) -> ContinualClassifier:
    return ContinualClassifier("pocket", **{"method": "ncm", "verbose": False, **params})


def test_parameters_are_the_arguments_of_the_constructor() -> None:
    classifier = quiet(method="coda-p", epochs=3, seed=4)
    assert classifier.get_params(deep=False) == {
        "backbone": "pocket",
        "method": "coda-p",
        "removable": False,
        "epochs": 3,
        "batch_size": None,
        "learning_rate": None,
        "seed": 4,
        "verbose": False,
    }
    classifier.set_params(seed=5, method="ncm")
    assert (classifier.seed, classifier.method_name) == (5, "ncm")
    with pytest.raises(UnknownName, match="epohcs"):
        classifier.set_params(epohcs=1)
    with pytest.raises(TypeError, match="epohcs"):
        ContinualClassifier(epohcs=3)  # type: ignore[call-arg]


def test_fit_starts_over_and_partial_fit_continues() -> None:
    classifier = quiet(method="ncm").fit(*drawings(range(3)))
    assert classifier.fit(*drawings(range(2, 4))) is classifier
    assert classifier.classes_ == list(NAMES[2:4])
    assert classifier.partial_fit(*drawings([5]), classes=NAMES) is classifier
    assert classifier.classes_ == [*NAMES[2:4], NAMES[5]]
    answer = classifier.predict(drawings([5])[0])
    assert isinstance(answer, np.ndarray)
    assert answer.shape == (20,)


def test_repr_shows_parameters_and_lessons() -> None:
    assert repr(ContinualClassifier(epochs=3)) == (
        "ContinualClassifier(epochs=3)\nnothing learned yet; auto on auto"
    )
    classifier = taught(range(2), [3], method="ncm")
    assert f"3 classes in 2 lessons, ncm on pocket: {NAMES[0]}, {NAMES[1]}, {NAMES[3]}" in repr(
        classifier
    )
    page = classifier._repr_html_()
    assert page.count("<tr>") == 3
    assert NAMES[3] in page


def test_doubtful_images_raise_warnings_only_if_verbose(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(CodaWarning, match="fewer than 5 images") as caught:
        ContinualClassifier("pocket", "ncm").learn(*drawings(range(2), 2))
    assert caught[0].filename == __file__
    recwarn.clear()
    learned = quiet(method="ncm").learn(*drawings(range(2), 2))
    assert any("fewer than 5 images" in warning for warning in learned.warnings)
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["names", "integers"])
def test_scikit_learn_clones_validates_pipes_and_searches(kind: str) -> None:
    sklearn = pytest.importorskip("sklearn", "1.4")
    from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.utils.validation import check_is_fitted

    images, names = drawings(range(4), 8)
    labels = np.array(names) if kind == "names" else np.repeat([3, 1, 2, 7], 8)
    classifier = quiet().fit(images, labels)
    copied = sklearn.base.clone(classifier)
    assert copied.get_params() == classifier.get_params()
    assert copied.classes_ == []
    with pytest.raises(sklearn.exceptions.NotFittedError):
        check_is_fitted(copied)
    check_is_fitted(classifier)
    for scoring in (None, "accuracy"):
        scores = cross_val_score(copied, images, labels, cv=2, scoring=scoring)
        assert scores.shape == (2,)
        assert scores.mean() > 0.6
    answers = cross_val_predict(copied, images, labels, cv=2)
    assert answers.dtype.kind == labels.dtype.kind
    assert (answers == labels).mean() == pytest.approx(scores.mean(), abs=0.01)
    steps = [("invert", FunctionTransformer(np.invert)), ("classify", quiet())]
    piped = Pipeline(steps).fit(images, labels)
    assert piped.score(images, labels) > 0.6
    search = GridSearchCV(copied, {"method": ["ncm", "slda"]}, scoring="accuracy", cv=2, n_jobs=2)
    search.fit(images, labels)
    assert search.best_score_ > 0.6
    assert set(search.predict(images).tolist()) <= set(labels.tolist())


def test_a_fitted_classifier_can_be_pickled_and_copied() -> None:
    classifier = taught(range(2), [2], method="ncm")
    images = drawings(range(3), 3, test=True)[0]
    for other in (pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier)):
        np.testing.assert_array_equal(other.predict_proba(images), classifier.predict_proba(images))
        other.undo()
    assert classifier.can_undo

"""`ContinualClassifier` as an estimator of scikit-learn, and its parameters without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawings import NAMES, drawings, taught

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadOption, CodaWarning, UnknownName


def quiet(**params: Any) -> ContinualClassifier:
    return ContinualClassifier("pocket", verbose=False, **params)


def test_parameters_are_the_arguments_of_the_constructor() -> None:
    classifier = quiet(method="ranpac", options={"width": 64}, training={"seed": 3})
    params = classifier.get_params(deep=False)
    assert params == {
        "backbone": "pocket",
        "method": "ranpac",
        "options": {"width": 64},
        "training": {"seed": 3},
        "device": "auto",
        "precision": None,
        "verbose": False,
    }
    assert classifier.get_params()["options__width"] == 64
    classifier.set_params(options__width=32, training__seed=4, method="ncm")
    assert classifier.options == {"width": 32}
    assert classifier.training == {"seed": 4}
    assert classifier.method_name == "ncm"
    for wrong in ("widht", "device__x"):
        with pytest.raises(UnknownName, match=wrong):
            classifier.set_params(**{wrong: 1})


def test_keywords_of_the_earlier_style_are_options_of_method_and_training() -> None:
    classifier = quiet(width=64, epochs=3, options={"ridge": None})
    assert classifier.options == {"ridge": None, "width": 64}
    assert classifier.training == {"epochs": 3}


def test_constructing_loads_no_backbone_and_refuses_a_bad_method() -> None:
    assert ContinualClassifier("no such backbone")._network is None
    with pytest.raises(UnknownName, match="backbone"):
        ContinualClassifier("no such backbone").learn(*drawings(range(2)))
    with pytest.raises(BadOption, match="whole network"):
        ContinualClassifier(method="ft++")


def test_misspelt_options_are_refused_by_the_constructor() -> None:
    with pytest.raises(UnknownName, match=r"'epohcs' in ContinualClassifier.*'epochs'"):
        ContinualClassifier(epohcs=3)
    with pytest.raises(UnknownName, match=r"'widht' .*Did you mean 'width'"):
        ContinualClassifier(options={"widht": 3})
    with pytest.raises(UnknownName, match=r"'bakbone' .*Did you mean 'backbone'"):
        ContinualClassifier(bakbone="pocket")
    with pytest.raises(UnknownName, match=r"'sed' in the training. Did you mean 'seed'"):
        ContinualClassifier(training={"sed": 3})
    for method in ("ranpac", "ncm", "slda"):
        ContinualClassifier(method=method, removable=True)


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
        "ContinualClassifier(training={'epochs': 3})\nnothing learned yet; ranpac on auto"
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


def test_scikit_learn_clones_validates_pipes_and_searches() -> None:
    sklearn = pytest.importorskip("sklearn", "1.4")
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.utils.validation import check_is_fitted

    images, labels = drawings(range(4), 8)
    classifier = quiet(options={"width": 64}).fit(images, labels)
    copied = sklearn.base.clone(classifier)
    assert copied.get_params() == classifier.get_params()
    assert copied.options is not classifier.options
    assert copied.classes_ == []
    with pytest.raises(sklearn.exceptions.NotFittedError):
        check_is_fitted(copied)
    check_is_fitted(classifier)
    scores = cross_val_score(copied, images, np.array(labels), cv=2)
    assert scores.shape == (2,)
    assert scores.mean() > 0.6
    steps = [("invert", FunctionTransformer(np.invert)), ("classify", quiet(method="ncm"))]
    piped = Pipeline(steps).fit(images, labels)
    assert piped.score(images, labels) > 0.6
    grid = {"options__width": [16, 64], "training__seed": [0]}
    search = GridSearchCV(copied, grid, cv=2).fit(images, np.array(labels))
    assert search.best_params_["options__width"] in (16, 64)
    assert set(search.predict(images)) <= set(labels)

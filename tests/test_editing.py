"""Edit what was taught: rename, unite, forget, relabel, join models, undo and redo."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, ContinualClassifier, arrays, assert_same, drawings, taught
from forked import PATIENCE
from serving import png, served
from small import coda

from coda_prompt.errors import BadClassName, CannotEdit, NothingToUndo, NotLearned
from coda_prompt.learner.folder import MODEL, ModelFolder
from coda_prompt.learner.model import LearnedModel

TEST = drawings(range(8), count=6, test=True)[0]
CLOSED_FORMS = ["ranpac", "slda", "ncm"]


def untaught(method: str, **options: Any) -> ContinualClassifier:
    return ContinualClassifier("pocket", method, verbose=False, **options)


def taught_whole(method: str, *lessons: list[int], **options: Any) -> ContinualClassifier:
    """Teach lessons without holding out images."""
    classifier = untaught(method, **options)
    for rows in lessons:
        classifier.learn(*drawings(rows, 12), validation=0)
    return classifier


def taught_by_default(method: str, *lessons: list[int], **options: Any) -> ContinualClassifier:
    """Teach lessons with a share of the images held out, as `coda learn` does."""
    classifier = untaught(method, **options)
    for rows in lessons:
        classifier.learn(*drawings(rows, 12))
    return classifier


def assert_agree(first: ContinualClassifier, second: ContinualClassifier) -> None:
    assert first.classes_ == second.classes_
    mine, other = first.predict_proba(TEST), second.predict_proba(TEST)
    assert (mine.argmax(axis=1) == other.argmax(axis=1)).all()
    np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)


# -- few images


def test_thirty_classes_of_one_image_are_told_apart() -> None:
    images, names = drawings(range(30), 1)
    classifier = ContinualClassifier("pocket")
    classifier.learn(images, names)
    assert (classifier.predict(images) == names).mean() >= 0.95
    assert classifier.predict_proba(images).max(axis=1).min() > 3 / 30


# -- joining models


@pytest.mark.parametrize("method", CLOSED_FORMS)
def test_joined_models_equal_one_taught_both_in_turn(method: str, tmp_path: Path) -> None:
    """A class that both know is united; the temperature follows from the joined sums."""
    parts = [taught_by_default(method, [0, 1, 2]), taught_by_default(method, [2, 3, 4], [5])]
    whole = taught_by_default(method, [0, 1, 2], [2, 3, 4], [5])
    joined = ContinualClassifier.merge(parts, count_twice=True)
    assert_agree(joined, whole)
    assert joined.temperature == pytest.approx(whole.temperature, rel=1e-5)
    assert joined.tasks_[1]["continued"] == [NAMES[2]]
    joined.save(tmp_path)
    assert_same(joined, ContinualClassifier.load(tmp_path))
    joined.learn(*drawings([6], 12))
    assert joined.classes_[-1] == NAMES[6]


def test_the_order_of_joined_models_changes_no_probability() -> None:
    parts = [taught_by_default("slda", [row, row + 1]) for row in (0, 2, 4)]
    first, last = (ContinualClassifier.merge(each) for each in (parts, parts[::-1]))
    order = [last.classes_.index(name) for name in first.classes_]
    mine, other = first.predict_proba(TEST), last.predict_proba(TEST)[:, order]
    np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)


def test_models_that_cannot_be_joined_are_refused_with_the_reason() -> None:
    model = taught_whole("ncm", [0, 1])
    with pytest.raises(CannotEdit, match="method"):
        ContinualClassifier.merge([model, taught_whole("slda", [2, 3])])
    with pytest.raises(CannotEdit, match="in common"):
        ContinualClassifier.merge([model, model])
    for words, options in (("removable", {"removable": True}), ("seed", {"seed": 1})):
        other = taught_whole("ncm", [2, 3], **options)
        with pytest.raises(CannotEdit, match=words):
            ContinualClassifier.merge([model, other])
    prompted = taught([0, 1], method="coda-p-ranpac", epochs=1)
    with pytest.raises(CannotEdit, match="prompts of its own"):
        ContinualClassifier.merge([prompted, taught([2, 3], method="coda-p-ranpac", epochs=1)])
    trained = taught([0, 1], method="coda-p", epochs=1)
    with pytest.raises(CannotEdit, match="trained by gradients"):
        ContinualClassifier.merge([trained, trained])


# -- forgetting


@pytest.mark.parametrize("method", ["ranpac", "slda"])
def test_what_remains_of_a_class_is_stated(method: str) -> None:
    classifier = taught_whole(method, [0, 1, 2, 3])
    assert "covariance that all classes share" in classifier.forget(NAMES[2]).remains
    images, names = drawings([0, 1, 3], count=8, test=True)
    without = taught_whole(method, [0, 1, 3])
    assert classifier.score(images, names) > without.score(images, names) - 0.1


def test_a_forgotten_class_is_in_no_version(tmp_path: Path) -> None:
    classifier = taught_whole("ncm", [0], [1, 2], [3], removable=True)
    classifier.rename(NAMES[2], "secret")
    classifier.save(tmp_path)
    classifier.undo()
    classifier.save(tmp_path)
    assert coda("redo", str(tmp_path)).returncode == 0
    (tmp_path / ".progress").mkdir()
    declined = coda("forget", str(tmp_path), "secret", input="n\n")
    assert declined.returncode == 1
    assert "secret" in ContinualClassifier.load(tmp_path).classes_
    assert coda("undo", str(tmp_path)).returncode == 0
    done = coda("forget", str(tmp_path), NAMES[2], "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"] == 2
    assert not (tmp_path / ".progress").exists()
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            assert NAMES[2].encode() not in content, path
    model = ContinualClassifier.load(tmp_path)
    assert_agree(model, taught_whole("ncm", [0], [1], [3], removable=True))
    model.undo()
    assert model.classes_ == [NAMES[0], NAMES[1]]
    model.undo()
    assert model.classes_ == [NAMES[0]]


@pytest.mark.parametrize("method", CLOSED_FORMS)
def test_a_forgotten_class_leaves_no_trace_with_images_held_out(method: str) -> None:
    """Images are held out by class: leaving a class out changes nothing for the others."""
    classifier = taught_by_default(method, [0, 1, 2, 3], [4, 2], removable=True)
    forgotten = classifier.forget(NAMES[2])
    assert "nothing" in forgotten.remains
    assert forgotten.images == 24
    never = taught_by_default(method, [0, 1, 3], [4], removable=True)
    mine, other = arrays(classifier), arrays(never)
    assert mine.keys() == other.keys()
    for name, array in mine.items():
        if name not in ("unknown.histogram", "unknown.scale"):  # scores of the other images
            np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert classifier.temperature == pytest.approx(never.temperature, rel=1e-6)
    assert_agree(classifier, never)
    classifier.learn(*drawings([5], 12))
    assert_agree(classifier, taught_by_default(method, [0, 1, 3], [4], [5], removable=True))


def test_a_version_before_a_forgotten_class_has_its_own_temperature(tmp_path: Path) -> None:
    classifier = taught_by_default("slda", [0, 1, 2], [3], removable=True)
    classifier.forget(NAMES[2])
    classifier.save(tmp_path)
    loaded = ContinualClassifier.load(tmp_path)
    assert_agree(loaded, taught_by_default("slda", [0, 1], [3], removable=True))
    loaded.undo()
    assert_agree(loaded, taught_by_default("slda", [0, 1], removable=True))


def test_history_states_that_a_lesson_was_forgotten() -> None:
    classifier = taught([0, 1], [2])
    classifier.forget(NAMES[2])
    lesson = classifier.history().entries[1]
    assert (lesson.what, lesson.images, lesson.accuracy) == ("(forgotten)", 0, None)


def test_forgetting_drops_undone_versions_and_is_recorded_in_earlier_ones() -> None:
    classifier = taught([0, 1, 2], [3])
    classifier.rename(NAMES[0], "first")
    classifier.merge_classes([NAMES[1], NAMES[2]], "both")
    classifier.undo()
    classifier.forget(NAMES[2])
    with pytest.raises(NothingToUndo):
        classifier.redo()
    assert classifier.classes_ == ["first", NAMES[1], NAMES[3]]
    classifier.undo()
    assert classifier.classes_ == [NAMES[0], NAMES[1], NAMES[3]]
    assert [edit.what for edit in classifier.model.edits] == ["forgot a class"]


def test_methods_that_cannot_forget_refuse_and_stay_as_they_are() -> None:
    classifier = taught([0, 1, 2], method="coda-p", epochs=1)
    before = classifier.predict_proba(TEST)
    with pytest.raises(CannotEdit, match="trained by gradients"):
        classifier.forget(NAMES[0])
    with pytest.raises(CannotEdit, match="trained by gradients"):
        classifier.merge_classes([NAMES[0], NAMES[1]], "both")
    classifier.rename(NAMES[0], "renamed")
    assert classifier.classes_[0] == "renamed"
    np.testing.assert_array_equal(classifier.predict_proba(TEST), before)
    with pytest.raises(CannotEdit, match="only class"):
        taught_whole("ncm", [0]).forget(NAMES[0])


def test_prompts_with_ranpac_forget_and_unite_classes(tmp_path: Path) -> None:
    classifier = taught([0, 1, 2, 3], method="coda-p-ranpac", epochs=1)
    assert "prompts" in classifier.forget(NAMES[1]).remains
    classifier.merge_classes([NAMES[0], NAMES[3]], "both")
    classifier.save(tmp_path)
    assert_same(ContinualClassifier.load(tmp_path), classifier)
    classifier.learn(*drawings([5], 12))
    assert classifier.classes_ == ["both", NAMES[2], NAMES[5]]


# -- renaming, uniting, relabelling


@pytest.mark.parametrize("method", ["slda", "ncm"])  # ranpac hides images class by class
def test_united_classes_equal_one_class_taught_with_all_images(method: str) -> None:
    classifier = taught_whole(method, [0, 1], [2, 3])
    classifier.merge_classes([NAMES[3], NAMES[1]], "both")
    whole = untaught(method)
    for rows in ([0, 1], [2, 3]):
        images, names = drawings(rows, 12)
        whole.learn(
            images, ["both" if n in (NAMES[1], NAMES[3]) else n for n in names], validation=0
        )
    assert_agree(classifier, whole)
    assert classifier.tasks_[1]["continued"] == ["both"]


@pytest.mark.parametrize("removable", [False, True])
@pytest.mark.parametrize("method", CLOSED_FORMS)
def test_relabelled_images_count_for_the_right_class(method: str, removable: bool) -> None:
    options: dict[str, Any] = {"removable": True} if removable else {}
    images, names = drawings([0, 1], 12)
    wrong = [NAMES[0]] * 3 + names[3:]
    classifier = untaught(method, **options)
    mixed = [*wrong[:12], *[NAMES[0]] * 4, *names[16:]]  # four of the second taught as the first
    classifier.learn(images, mixed, validation=0)
    classifier.relabel(images[12:16], names[12:16], taught_as=NAMES[0])
    right = untaught(method, **options)
    right.learn(images, names, validation=0)
    mine, other = classifier.predict_proba(TEST), right.predict_proba(TEST)
    if method != "ranpac":  # hiding single images depends on the class they are in
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)
    classifier.relabel(images[:2], ["new", "new"], taught_as=NAMES[0])
    assert classifier.classes_ == [NAMES[0], NAMES[1], "new"]
    assert classifier.predict(images[:2]).tolist() == ["new", "new"]
    assert sum(sum(task["images"].values()) for task in classifier.tasks_) == 24
    assert len(classifier.tasks_) == 1, "an edit is not a lesson"


def test_impossible_edits_are_refused() -> None:
    classifier = taught_whole("ncm", [0, 1])
    with pytest.raises(NotLearned):
        classifier.rename("nothing", "else")
    with pytest.raises(CannotEdit, match="already"):
        classifier.rename(NAMES[0], NAMES[1])
    with pytest.raises(CannotEdit, match="two different classes"):
        classifier.merge_classes([NAMES[0], NAMES[0]], "x")
    with pytest.raises(CannotEdit, match="rename or merge-classes"):
        classifier.relabel(*drawings([2], 12), taught_as=NAMES[0])
    with pytest.raises(BadClassName, match="control characters"):
        classifier.rename(NAMES[0], "\x00")
    assert not classifier.can_undo


def saved(classifier: ContinualClassifier) -> bytes:
    current = classifier._versions.current
    assert current is not None
    return current.content


FAILING: dict[str, Callable[[ContinualClassifier, ContinualClassifier], object]] = {
    "relabel": lambda classifier, _: classifier.relabel(
        drawings([0], 2)[0], [NAMES[1]] * 2, taught_as=NAMES[0]
    ),
    "merge_classes": lambda classifier, _: classifier.merge_classes(NAMES[:2], "both"),
    "join": lambda classifier, other: classifier.join(saved(other), "other"),
}


@pytest.mark.parametrize("edit", FAILING)
def test_an_edit_that_fails_leaves_the_model_unchanged(
    edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, other = taught_whole("ncm", [0, 1]), taught_whole("ncm", [2])
    before, number = classifier.predict_proba(TEST), classifier.model.number

    def fail(*_: Any) -> None:
        raise np.linalg.LinAlgError("not positive-definite")

    monkeypatch.setattr(LearnedModel, "with_lessons", fail)
    with pytest.raises(CannotEdit):
        FAILING[edit](classifier, other)
    np.testing.assert_array_equal(classifier.predict_proba(TEST), before)
    assert classifier.classes_ == list(NAMES[:2])
    assert classifier.model.number == number
    assert not classifier.model.edits
    assert not classifier.can_undo


# -- versions


def test_undo_to_the_first_lesson_and_back_is_bit_for_bit(tmp_path: Path) -> None:
    model, contents = tmp_path / "model", []
    classifier = untaught("ncm")
    for step in range(4):
        classifier.learn(*drawings([step], 6)) if step < 3 else classifier.rename(NAMES[0], "zero")
        classifier.save(model)
        contents.append((model / MODEL).read_bytes())
    assert coda("undo", str(model), "--to", "1").returncode == 0
    assert (model / MODEL).read_bytes() == contents[0]
    for content in contents[1:]:
        assert coda("redo", str(model)).returncode == 0
        assert (model / MODEL).read_bytes() == content
    again = coda("redo", str(model))
    assert again.returncode == 2
    assert "no later version" in again.stderr
    loaded = ContinualClassifier.load(model)
    loaded.undo(to=2)
    assert loaded.classes_ == list(NAMES[:2])
    loaded.learn(*drawings([5], 6))
    with pytest.raises(NothingToUndo):
        loaded.redo()
    loaded.save(model)
    listed = json.loads(coda("history", str(model), "--json").stdout)
    assert [each["number"] for each in listed["versions"]] == [1, 2, 5]
    difference = json.loads(coda("diff", f"{model}@2", str(model), "--json").stdout)
    assert difference["only_second"] == {NAMES[5]: 6}


@pytest.mark.parametrize("method", ["ncm", "ranpac"])
def test_first_lesson_of_a_stored_model_can_be_undone(method: str, tmp_path: Path) -> None:
    untaught(method).save(tmp_path)
    empty = (tmp_path / MODEL).read_bytes()
    classifier = ContinualClassifier.load(tmp_path)
    classifier.learn(*drawings([0, 1], 6))
    before = classifier.predict_proba(TEST)
    classifier.undo()
    assert (classifier.classes_, classifier.can_undo) == ([], False)
    classifier.redo()
    assert (classifier.predict_proba(TEST) == before).all()
    classifier.forget(NAMES[0])  # the empty version does not have it
    classifier.save(tmp_path)
    assert coda("undo", str(tmp_path)).returncode == 0
    restored = ContinualClassifier.load(tmp_path)
    assert restored.classes_ == []
    assert (tmp_path / MODEL).read_bytes() == empty
    restored.learn(*drawings([2], 6))
    assert restored.classes_ == [NAMES[2]]


def test_ten_earlier_versions_are_stored(tmp_path: Path) -> None:
    classifier = taught_whole("ncm", [0, 1])
    for step in range(12):
        classifier.rename(classifier.classes_[0], f"name {step}")
        classifier.save(tmp_path)
    loaded = ContinualClassifier.load(tmp_path)
    for _ in range(10):
        loaded.undo()
    assert loaded.classes_[0] == "name 1"
    with pytest.raises(NothingToUndo):
        loaded.undo()
    assert len(list((tmp_path / "versions").iterdir())) == 10


def test_history_has_accuracy_edits_and_the_cost_for_older_classes(tmp_path: Path) -> None:
    classifier = untaught("ncm")
    classifier.learn(*drawings([0, 1], 10))
    images, names = drawings([0, 1], 5, test=True)
    classifier.learn(*drawings([2], 10), check=list(zip(images, names, strict=True)))
    classifier.rename(NAMES[0], "zero")
    first, second, edit = classifier.history().entries
    assert first.accuracy is not None
    assert first.older_before is None
    assert second.older_before is not None
    assert second.older_after == pytest.approx(classifier.score(images, ["zero"] * 5 + names[5:]))
    assert edit.what == f"renamed {NAMES[0]} to zero"
    classifier.save(tmp_path)
    shown = coda("history", str(tmp_path)).stdout
    assert "renamed" in shown
    numbers = [line.split("│")[1].strip() for line in shown.splitlines() if "│ 20" in line]
    assert numbers == ["1", "2", "edit"]
    assert "->" in shown


def test_history_after_merge_classes_has_the_accuracy_of_the_united_classes() -> None:
    classifier = untaught("ncm")
    classifier.learn(*drawings([0, 1, 2], 20), validation=0.5)
    classifier.learn(*drawings([3, 4], 20), validation=0.5)
    before = [task["predictions"] for task in classifier.tasks_]
    classifier.merge_classes([NAMES[0], NAMES[1]], "both")
    first, second = classifier.history().entries[:2]
    united = {NAMES[0], NAMES[1]}
    for entry, rows in zip((first, second), before, strict=True):
        pairs = [(true, each, n) for true, row in rows.items() for each, n in row.items()]
        right = sum(n for true, each, n in pairs if true == each or {true, each} == united)
        assert entry.accuracy == pytest.approx(right / sum(n for *_, n in pairs))
    assert first.accuracy_own is None
    assert second.accuracy_own is not None


# -- interrupted edits


EDITS: dict[str, tuple[str, ...]] = {
    "rename": ("rename", "MODEL", NAMES[0], "zero"),
    "merge-classes": ("merge-classes", "MODEL", NAMES[0], NAMES[1], "--into", "both"),
    "forget": ("forget", "MODEL", NAMES[0], "--yes"),
    "relabel": ("relabel", "MODEL", "FOLDER", "--from", NAMES[0]),
    "undo": ("undo", "MODEL", "--to", "1"),
    "redo": ("redo", "MODEL"),
    "merge": ("merge", "MODEL", "OTHER", "--out", "OUT"),
}


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with earlier and undone versions, another model, and images to relabel."""
    root = tmp_path_factory.mktemp("editable")
    classifier = taught_whole("ncm", [0, 1], [2], [3], [4])
    classifier.undo()
    classifier.save(root / "model")
    taught_whole("ncm", [5, 6]).save(root / "other")
    (root / "images" / NAMES[1]).mkdir(parents=True)
    (root / "images" / NAMES[1] / "0.png").write_bytes(png(drawings([0], 1)[0][0]))
    return root


def edit_arguments(name: str, root: Path) -> list[str]:
    paths = {"MODEL": "model", "OTHER": "other", "FOLDER": "images", "OUT": "out"}
    return [str(root / paths[each]) if each in paths else each for each in EDITS[name]]


def contents(folder: Path) -> tuple[list[str], list[int], list[int]]:
    """Classes and versions of a model after the next writer has cleaned up."""
    with ModelFolder(folder).writing():
        pass
    model = ContinualClassifier.load(folder)
    versions = ModelFolder(folder).versions()
    for version in (*versions.before, *versions.after):
        version.read()
    before, after = ([each.number for each in part] for part in (versions.before, versions.after))
    return model.classes_, before, after


@pytest.mark.parametrize("name", [name for name in EDITS if name != "merge"])
def test_an_edit_that_fails_at_any_step_leaves_a_complete_version(
    name: str, editable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rename of a file fails once; running the same edit again completes it."""
    from typer.testing import CliRunner

    from coda_prompt.cli import app

    whole = shutil.copytree(editable, tmp_path / "whole")
    assert CliRunner().invoke(app, edit_arguments(name, whole)).exit_code == 0
    old, new = contents(editable / "model")[0], contents(whole / "model")[0]
    edits = len(ContinualClassifier.load(editable / "model").model.edits)
    real = os.replace
    for step in range(12):
        root = shutil.copytree(editable, tmp_path / str(step))
        calls = 0

        def failing(source: Any, target: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == step + 1:  # noqa: B023
                raise OSError(28, "No space left on device")
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            patch.setattr(Path, "replace", lambda self, target: failing(self, target))
            CliRunner().invoke(app, edit_arguments(name, root))
        found = contents(root / "model")[0]
        assert found in (old, new)
        edited = len(ContinualClassifier.load(root / "model").model.edits) > edits
        if found == old and not edited:
            assert CliRunner().invoke(app, edit_arguments(name, root)).exit_code == 0
            assert contents(root / "model")[0] == new
        if calls <= step:
            return  # all steps have failed once
    raise AssertionError("the edit has more steps than were tried")


# -- the service


def test_edits_over_http_and_from_the_command_line_do_not_lose_each_other(
    editable: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(editable, tmp_path / "root")
    model = root / "model"
    with served(str(model)) as client:

        def post(route: str, **body: Any) -> list[str]:
            answer = client.post(f"/v1/{route}", json=body)
            assert answer.status_code == 200, answer.text
            classes: list[str] = answer.json()["classes"]
            return classes

        assert post("rename", old=NAMES[0], new="zero")[0] == "zero"
        assert coda("rename", str(model), NAMES[1], "one").returncode == 0
        assert post("rename", old=NAMES[2], new="two") == ["zero", "one", "two", NAMES[3]]
        assert coda("merge-classes", str(model), "one", "two", "--into", "both").returncode == 0
        deadline = time.monotonic() + PATIENCE
        while client.get("/v1/classes").json()["classes"] != ["zero", "both", NAMES[3]]:
            assert time.monotonic() < deadline, "the service does not follow the folder"
            time.sleep(0.1)
        assert post("merge-classes", classes=["zero", "both"], into="zero") == ["zero", NAMES[3]]
        assert client.post("/v1/undo").json()["classes"] == ["zero", "both", NAMES[3]]
        assert client.post("/v1/redo").json()["classes"] == ["zero", NAMES[3]]
        files = [("images", ("a.png", png(drawings([0], 1)[0][0])))]
        moved = client.post(
            "/v1/relabel",
            params={"taught_as": "zero"},
            files=files,
            data={"labels": [NAMES[3]]},
        )
        assert moved.status_code == 200, moved.text
        assert client.post("/v1/forget", json={"name": "zero", "confirm": False}).status_code == 422
        other = (root / "other" / MODEL).read_bytes()
        joined = client.post("/v1/merge", content=other)
        assert joined.json()["classes"] == ["zero", NAMES[3], NAMES[5], NAMES[6]]
        assert client.post("/v1/merge", content=b"nonsense").status_code == 422
        refused = client.post("/v1/merge", content=other)
        assert refused.status_code == 409
        assert "in common" in refused.json()["detail"]
        twice = client.post("/v1/merge", params={"count_twice": True}, content=other)
        assert twice.json()["classes"] == joined.json()["classes"]
        client.post("/v1/undo")
        gone = client.post("/v1/forget", json={"name": "zero", "confirm": True}).json()
        assert gone["classes"] == [NAMES[3], NAMES[5], NAMES[6]]
        history = client.get("/v1/history").json()
        assert [each["current"] for each in history["versions"]].count(True) == 1
        number = history["versions"][0]["number"]
        assert client.get("/v1/diff", params={"version": number}).status_code == 200
        assert client.get("/v1/diff", params={"version": 10**6}).status_code == 422
        with ModelFolder(model).writing():
            busy = client.post("/v1/rename", json={"old": NAMES[3], "new": "three"})
            assert busy.status_code == 409
    assert ContinualClassifier.load(model).classes_ == [NAMES[3], NAMES[5], NAMES[6]]


SLOW_FORGET = """
import os, pathlib, time
from coda_prompt.learner import edit
forgotten = edit.forgotten
def slow(model, versions, name):
    pathlib.Path(os.environ["FORGETTING"]).touch()
    time.sleep(1)
    return forgotten(model, versions, name)
edit.forgotten = slow
"""


def test_download_during_a_forget_does_not_contain_the_class(tmp_path: Path) -> None:
    taught_whole("ncm", [0, 1]).save(tmp_path / "model")
    started = tmp_path / "started"
    with (
        served(str(tmp_path / "model"), before=SLOW_FORGET, FORGETTING=str(started)) as client,
        ThreadPoolExecutor() as pool,
    ):
        body = {"name": NAMES[0], "confirm": True}
        forgotten = pool.submit(client.post, "/v1/forget", json=body)
        deadline = time.monotonic() + PATIENCE
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        packed = client.get("/v1/model.zip")
        assert forgotten.result().status_code == 200
    with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert ModelFolder(tmp_path / "unpacked" / "model").description().classes == [NAMES[1]]

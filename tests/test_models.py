"""Model folders: round trip, undo, damage, interrupted saves, and no stored images."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, SOURCE, assert_same, drawings, taught
from forked import PATIENCE, Forked
from PIL import Image
from safetensors.numpy import save_file
from small import CODA, coda, started_coda

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.errors import (
    CodaError,
    CorruptFile,
    FolderBusy,
    Interrupted,
    MissingData,
    ModelChanged,
    NothingToUndo,
    UnfinishedLesson,
)
from coda_prompt.learner.folder import LESSON, MODEL, ModelFolder
from coda_prompt.learner.results import Progress
from coda_prompt.statistics.algebra import unit
from coda_prompt.statistics.classifier import Classifier
from coda_prompt.storage.files import OWNER
from coda_prompt.storage.tensors import read_tensors, write_tensors

METHODS = ["slda", "ranpac", "coda-p", "coda-p-ranpac"]


def trained_shortly(method: str) -> dict[str, Any]:
    return {"epochs": 1} if method.startswith("coda-p") else {}


def test_saved_model_round_trips(tmp_path: Path) -> None:
    classifier = taught(range(3), range(3, 5), method="coda-p", epochs=1)
    classifier.save(tmp_path / "model")
    loaded = coda_prompt.load(str(tmp_path / "model"))
    assert_same(classifier, loaded)
    assert loaded.tasks_ == classifier.tasks_
    images, _ = drawings(range(5), test=True)
    assert np.array_equal(loaded.predict_proba(images), classifier.predict_proba(images))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["classes"] == list(NAMES[:5])
    assert config["method"] == "coda-p"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "5 classes, learned in 2 lessons" in card


@pytest.mark.parametrize("method", METHODS)
def test_learning_continues_bit_identically_in_another_process(method: str, tmp_path: Path) -> None:
    script = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from drawings import drawings, ContinualClassifier\n"
        "c = ContinualClassifier.load(sys.argv[2])\n"
        "c.set_params(epochs=1) if 'coda-p' in c.method else None\n"
        "c.learn(*drawings([5, 6]))\n"
        "c.save(sys.argv[2])\n"
    )
    options = trained_shortly(method)
    whole = taught(range(3), [5, 6], method=method, **options)
    taught(range(3), method=method, **options).save(tmp_path)
    done = Forked(script, str(Path(__file__).parent), str(tmp_path)).completed()
    assert done.returncode == 0, done.stderr
    assert_same(whole, ContinualClassifier.load(tmp_path))


def test_undo_is_bit_for_bit(tmp_path: Path) -> None:
    classifier = taught(range(3), method="coda-p", epochs=1)
    classifier.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    classifier.learn(*drawings([3, 4]))
    classifier.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != before
    loaded = ContinualClassifier.load(tmp_path)
    loaded.undo()
    classifier.undo()
    assert_same(loaded, classifier)
    assert coda("undo", str(tmp_path)).returncode == 0
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(json.loads((tmp_path / "config.json").read_text())["tasks"]) == 1
    with pytest.raises(NothingToUndo):
        classifier.undo()
    again = coda("undo", str(tmp_path))
    assert again.returncode == 2
    assert "no earlier version" in again.stderr


def test_a_model_is_small(tmp_path: Path) -> None:
    classifier = taught(range(3), range(3, 6), method="coda-p", epochs=1)
    classifier.save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * 1_000_000
    for method, most in (("slda", 200_000), ("ranpac", 10_000_000)):
        taught(range(3), method=method).save(tmp_path / method)
        assert (tmp_path / method / "model.safetensors").stat().st_size < most


@pytest.mark.parametrize("method", METHODS)
def test_no_image_and_no_feature_of_an_image_is_in_the_file(method: str) -> None:
    images, names = drawings(range(3))
    classifier = ContinualClassifier("pocket", method, **trained_shortly(method))
    classifier.learn(images, names, validation=0)
    model = classifier.model
    pictures = [Image.fromarray(image) for image in images]
    encoded = [model.encoder.encode(picture, model.prompts) for picture in pictures]
    features = np.stack([each.features for each in encoded])
    views = [model.encoder.views(picture)[0].ravel() for picture in pictures]
    vectors = [features, np.stack([each.plain for each in encoded]), np.stack(views)]
    stored = {**model.arrays(), "covariance": model.detector.moments.covariance()[0]}
    if isinstance(model.classifier, Classifier):
        vectors.append(model.classifier.mapping(features))
        stored["gram"] = model.classifier.moments.covariance()[0]
    for name, array in stored.items():
        if array.ndim < 2 or array.dtype.kind != "f":
            continue
        for rows in (array.reshape(-1, array.shape[-1]), array.reshape(len(array), -1).T):
            for vector in vectors:
                if rows.shape[1] == vector.shape[1]:
                    gap = np.linalg.norm(rows[:, None] - vector[None], axis=2)
                    assert gap.min() > 1e-3, f"{name} holds an image's vector"
                    near = unit(rows.astype(float)) @ unit(vector.astype(float)).T
                    assert "sums" in name or near.max() < 0.9999, name


def test_failed_learn_leaves_the_model_unchanged() -> None:
    classifier = taught(range(3), method="coda-p", epochs=2)
    tasks = list(classifier.tasks_)

    def stop(progress: Progress) -> None:
        if "epoch 2" in progress.stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classifier.learn(*drawings([3, 4]), on_progress=stop)
    assert_same(classifier, taught(range(3), method="coda-p", epochs=2))
    assert classifier.tasks_ == tasks
    classifier.learn(*drawings([3, 4]))
    assert_same(classifier, taught(range(3), [3, 4], method="coda-p", epochs=2))


def test_a_tiny_task_does_not_make_the_model_forget() -> None:
    classifier = ContinualClassifier("pocket")
    classifier.learn(*drawings(range(20), count=80), validation=0)
    before = classifier.score(*drawings(range(20), test=True))
    for first in (20, 22, 24, 26):
        classifier.learn(*drawings([first, first + 1], count=7), validation=0)
    assert classifier.score(*drawings(range(20), test=True)) >= before - 0.03


def test_epochs_apply_to_one_lesson_only() -> None:
    classifier, seen = taught(range(3), method="coda-p", epochs=2), list[str]()
    classifier.learn(*drawings([3, 4]), epochs=1, on_progress=lambda each: seen.append(each.stage))
    assert any("epoch 1/1" in stage for stage in seen)
    classifier.learn(*drawings([5, 6]), on_progress=lambda each: seen.append(each.stage))
    assert any("epoch 2/2" in stage for stage in seen)


def test_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my project")
    classifier = taught(range(2), method="ncm")
    with pytest.raises(MissingData, match="not empty"):
        classifier.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my project"
    (tmp_path / "model.safetensors").write_bytes(b"a model of somebody else")
    with pytest.raises(CorruptFile, match="not a model of coda-prompt"):
        classifier.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"a model of somebody else"


def test_a_damaged_model_can_be_undone(tmp_path: Path) -> None:
    taught(range(2), [5]).save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptFile, match="coda undo"):
        ContinualClassifier.load(tmp_path)
    assert coda("undo", str(tmp_path)).returncode == 0
    assert_same(ContinualClassifier.load(tmp_path), taught(range(2)))


def test_a_damaged_earlier_version_does_not_stop_predictions(tmp_path: Path) -> None:
    taught(range(2), [2], method="ncm").save(tmp_path)
    (tmp_path / "versions" / "000001.safetensors").write_bytes(b"damaged")
    loaded = ContinualClassifier.load(tmp_path)
    assert len(loaded.predict(drawings([0])[0])) == 20
    with pytest.raises(CorruptFile):
        loaded.undo()


def test_a_large_share_held_out_leaves_two_images_to_learn_from() -> None:
    learned = ContinualClassifier(method="ncm").learn(*drawings(range(3), count=6), validation=0.9)
    assert learned.held_out == 3 * 4


def test_single_image_as_path_array_or_tensor(tmp_path: Path) -> None:
    classifier = taught(range(3), method="ncm")
    grey = SOURCE.test.images[0]
    grey_image = Image.fromarray(grey)
    grey_image.save(tmp_path / "one.png")
    colour = np.stack([grey] * 3, axis=2)
    kinds = [grey, colour, grey_image, torch.from_numpy(grey), torch.from_numpy(grey)[None],
             torch.from_numpy(colour).permute(2, 0, 1), str(tmp_path / "one.png")]  # fmt: skip
    answers = {classifier.predict(kind).tolist()[0] for kind in kinds}
    assert len(answers) == 1
    assert all(len(classifier.predict(kind)) == 1 for kind in kinds)


def test_classes_without_images_are_not_learned() -> None:
    class Pairs(torch.utils.data.Dataset[Any]):
        classes = ("never", NAMES[0], "nowhere", NAMES[1])

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Any, int]:
            row = index % 2
            return drawings([row], 20)[0][index], 2 * row + 1

    classifier = ContinualClassifier(method="ncm")
    assert set(classifier.learn(Pairs()).new) == set(NAMES[:2])


def damaged(content: bytes, how: str) -> bytes:
    if how == "cut":
        return content[: len(content) // 2]
    if how == "flipped":
        return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    if how == "renamed class":
        return content.replace(NAMES[0].encode(), NAMES[0][::-1].encode())
    if how == "huge header":
        return (2**40).to_bytes(8, "little") + content[8:]
    return {"empty": b"", "text": b"hello there, this is no model"}[how]


@pytest.mark.parametrize("how", ["cut", "flipped", "renamed class", "huge header", "empty", "text"])
def test_a_damaged_model_is_refused(how: str, tmp_path: Path) -> None:
    taught(range(2), method="ncm").save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(file.read_bytes(), how))
    with pytest.raises(CorruptFile):
        ContinualClassifier.load(tmp_path)
    shown = coda("info", str(tmp_path))
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a model's description with a right hash, as a stranger could."""
    file = folder / "model.safetensors"
    content = read_tensors(file)
    description = content.description
    assert description is not None
    replaced = change(description)
    forged: Any = description if replaced is None else replaced
    if isinstance(forged, dict):
        write_tensors(file, content.tensors, forged)
    else:
        save_file(content.tensors, file, {"description": json.dumps(forged)})


def _rename_first(description: dict[str, Any], name: str) -> None:
    for names in (description["classes"], description["tasks"][0]["new"]):
        names[0] = name


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(method="/tmp/evil.py:Evil"),
        lambda d: d.update(method="er-5000"),
        lambda d: d.update(method=3),
        lambda d: d.update(format=99),
        lambda d: d.update(options={"no such option": 1}),
        lambda d: d.update(options={"seed": -1}),
        lambda d: d.update(options={"removable": True}),
        lambda d: d.update(options={"integers": 3}),
        lambda d: d.update(options={"device": "cuda"}),
        lambda d: d.update(options=None),
        lambda d: d.update(classes=["a"]),
        lambda d: d.update(classes=["a", "a"]),
        lambda d: d.update(classes="ab"),
        lambda d: d.update(tasks={}),
        lambda d: d.update(tasks=[1]),
        lambda d: d.update(tasks=[{}]),
        lambda d: d["tasks"][0].update(temperature=-1.0),
        lambda d: d["tasks"][0].update(new=d["tasks"][0]["new"] * 2),
        lambda d: d.update(temperature=float("nan")),
        lambda d: d.update(pixels={}),
        lambda d: d["backbone"].update(fingerprint="0" * 64),
        lambda d: d["backbone"].update(name="no-such-backbone"),
        lambda d: d.pop("backbone") and None,
        lambda d: [1],
        lambda d: d.update(method="ranpac"),
        lambda d: _rename_first(d, "\x1b[2J"),
    ],
)
def test_forged_model_is_refused(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    taught(range(2), method="ncm").save(tmp_path)
    changed(tmp_path, lambda d: None)
    assert ContinualClassifier.load(tmp_path).classes_ == list(NAMES[:2])
    changed(tmp_path, change)
    with pytest.raises(CodaError):
        ContinualClassifier.load(tmp_path)


def test_save_interrupted_at_any_step_leaves_one_complete_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write and rename fails once; afterwards the model loads, and undo is right."""
    first = taught(range(2), method="ncm")
    second = taught(range(2), [2], method="ncm")
    for step in range(8):
        folder = tmp_path / str(step)
        first.save(folder)
        calls = 0
        real = os.replace

        def failing(source: Any, target: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == step + 1:  # noqa: B023
                raise OSError(28, "No space left on device")
            real(source, target)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            patch.setattr(Path, "replace", lambda self, target: failing(self, target))
            with contextlib.suppress(OSError):
                second.save(folder)
        found = ContinualClassifier.load(folder)
        assert found.classes_ in (first.classes_, second.classes_)
        with ModelFolder(folder).writing():
            pass  # the next writer finishes what was cut off
        found = ContinualClassifier.load(folder)
        if found.classes_ == second.classes_:
            found.undo()
        assert_same(found, first)


def test_one_writer_at_a_time(tmp_path: Path, drawing_folders: Path) -> None:
    taught(range(2), method="ncm").save(tmp_path)
    with ModelFolder(tmp_path).writing():
        with pytest.raises(FolderBusy, match=str(os.getpid())):
            taught(range(2), method="ncm").save(tmp_path)
        assert ContinualClassifier.load(tmp_path).classes_, "readers go on"
        busy = coda("learn", str(tmp_path), str(drawing_folders / "task-2"))
        assert busy.returncode == 2
        assert "another process" in busy.stderr
    taught(range(2), method="ncm").save(tmp_path)


SLOWLY = [pytest.param(moment / 30, marks=pytest.mark.slow) for moment in range(30)]


@pytest.fixture(scope="module")
def two_lessons(
    drawing_folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ContinualClassifier, ContinualClassifier, float]:
    """A saved model after one lesson, the classifier after one and two, seconds of the second."""
    model = tmp_path_factory.mktemp("two-lessons") / "model"
    first = ContinualClassifier(method="coda-p", epochs=3)
    first.learn(drawing_folders / "task-1")
    first.save(model)
    whole = ContinualClassifier.load(model)
    started = time.monotonic()
    whole.learn(drawing_folders / "task-2")
    return model, first, whole, time.monotonic() - started


@pytest.mark.posix
@pytest.mark.parametrize("moment", [0.7, "saving", *SLOWLY])
def test_killed_learn_leaves_one_complete_version(
    moment: float | str,
    tmp_path: Path,
    drawing_folders: Path,
    two_lessons: tuple[Path, ContinualClassifier, ContinualClassifier, float],
) -> None:
    """SIGKILL while it learns, or as soon as a new file appears; the same command then finishes."""
    saved, first, whole, seconds = two_lessons
    model, second = shutil.copytree(saved, tmp_path / "model"), drawing_folders / "task-2"
    process = started_coda("learn", str(model), str(second))
    deadline = time.monotonic() + PATIENCE
    while not (model / OWNER).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if moment == "saving":
        while not list(model.glob("versions/*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.0002)
    else:
        time.sleep(float(moment) * seconds)
    process.kill()
    process.communicate()
    left = ContinualClassifier.load(model)
    assert left.classes_ in (first.classes_, whole.classes_)
    # Without the lesson file the command had printed its result; then it is not run again.
    complete = len(left.tasks_) == 2 and not (model / LESSON).exists()
    died = process.returncode != 0 and not complete
    if died:  # the same command, whether it had come to its end or not
        finished = coda("learn", str(model), str(second))
        assert finished.returncode == 0, finished.stderr
    assert not list(model.glob(".*.tmp"))
    found = ContinualClassifier.load(model)
    assert len(found.tasks_) == 2, "nothing is learned twice"
    assert_same(found, whole)
    assert json.loads((model / "config.json").read_text())["classes"] == whole.classes_
    found.undo()
    assert_same(found, first)


def test_model_changed_by_another_process_is_not_overwritten(tmp_path: Path) -> None:
    taught(range(2)).save(tmp_path / "model")
    mine, theirs = (ContinualClassifier.load(tmp_path / "model") for _ in range(2))
    theirs.learn(*drawings([5]))
    theirs.save(tmp_path / "model")
    mine.learn(*drawings([6]))
    with pytest.raises(ModelChanged):
        mine.save(tmp_path / "model")
    assert ContinualClassifier.load(tmp_path / "model").classes_ == theirs.classes_
    mine.save(tmp_path / "another")
    mine.learn(*drawings([7]))
    mine.save(tmp_path / "another")  # its own, again


def test_undo_ignores_a_previous_version_of_another_process(tmp_path: Path) -> None:
    taught(range(2), [5]).save(tmp_path)
    mine, theirs = (ContinualClassifier.load(tmp_path) for _ in range(2))
    theirs.learn(*drawings([6]))
    theirs.save(tmp_path)
    theirs.undo()
    assert theirs.classes_ == mine.classes_
    mine.undo()
    assert mine.classes_ == list(NAMES[:2])


@pytest.mark.parametrize("values", [(math.nan,), (math.inf, -math.inf), (1e308, -1e308)])
def test_numbers_are_refused_if_products_are_not_finite(
    values: tuple[float, ...], tmp_path: Path
) -> None:
    """Also if they cancel out in a sum."""
    taught(range(2), method="ncm").save(tmp_path)
    file = read_tensors(tmp_path / MODEL)
    file.tensors["unknown.sums"] = (sums := file.tensors["unknown.sums"].copy())
    sums[0, : len(values)] = values
    write_tensors(tmp_path / MODEL, file.tensors, file.description or {})
    with pytest.raises(CorruptFile, match="invalid values"):
        ContinualClassifier.load(tmp_path)


def test_learn_interrupted_while_saving_is_not_repeated(
    tmp_path: Path, drawing_folders: Path
) -> None:
    """The process ends without a word at the very end."""
    coda("learn", str(tmp_path / "model"), str(drawing_folders / "task-1"), "--method", "ncm")
    model, second = tmp_path / "model", str(drawing_folders / "task-2")
    at_once = (
        "import os; from coda_prompt.learner.folder import ModelFolder; "
        "ModelFolder.end_lesson = lambda *_: os._exit(9)"
    )
    cut = Forked(f"{at_once}; {CODA}", "learn", str(model), second).completed()
    assert cut.returncode == 9
    again = coda("learn", str(model), second)
    assert again.returncode == 0, again.stderr
    assert "nothing was learned twice" in again.stderr
    found = ContinualClassifier.load(model)
    assert len(found.tasks_) == 2
    assert len(json.loads((model / "config.json").read_text())["tasks"]) == 2
    once_more = coda("learn", str(model), second)  # meant
    assert once_more.returncode == 0, once_more.stderr
    assert len(ContinualClassifier.load(model).tasks_) == 3


def test_checkpoints_are_removed_only_after_the_model_is_saved(
    drawing_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk after training: the same lesson resumes, another one is refused until then."""
    classifier, progress = ContinualClassifier(method="coda-p"), tmp_path / "model" / ".progress"
    lesson, other = drawing_folders / "task-1", drawing_folders / "task-2"
    classifier.learn(lesson, epochs=1, progress=progress)
    with monkeypatch.context() as full:
        full.setattr(
            ModelFolder, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(OSError, match="full"):
            classifier.save(tmp_path / "model")
    assert list(progress.iterdir())
    again = ContinualClassifier(method="coda-p")
    with pytest.raises(UnfinishedLesson, match="Finish it by running the same command again"):
        again.learn(other, epochs=1, progress=progress)
    stages: list[str] = []
    again.learn(
        lesson, epochs=1, progress=progress, on_progress=lambda each: stages.append(each.stage)
    )
    assert not any("learning" in stage for stage in stages), "nothing is trained again"
    again.save(tmp_path / "model")
    assert not progress.exists()
    assert_same(again, classifier)


def test_the_path_of_a_backbone_is_recorded_and_has_to_be_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    weights = Path(coda_prompt.__file__).parent / "assets" / "pocket-vit.safetensors"
    shutil.copy(weights, tmp_path / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    classifier = ContinualClassifier("weights.safetensors", method="ncm")
    classifier.learn(*drawings(range(2)))
    classifier.save("model")
    backbone = ModelFolder(tmp_path / "model").description().backbone
    assert backbone.name == "weights.safetensors"
    assert backbone.path == str(tmp_path / "weights.safetensors")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(MissingData, match="--backbone PATH"):
        ContinualClassifier.load(tmp_path / "model")
    named = ContinualClassifier.load(tmp_path / "model", backbone="../weights.safetensors")
    assert named.classes_ == classifier.classes_


@pytest.mark.parametrize("method", ["coda-p", "coda-p-ranpac"])
def test_models_with_prompts_predict_and_are_edited_without_torch(
    method: str, tmp_path: Path
) -> None:
    taught(range(3), method=method, epochs=1).save(tmp_path)
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from coda_prompt import ContinualClassifier\n"
        "from coda_prompt.errors import MissingExtra\n"
        "classifier = ContinualClassifier.load(sys.argv[1], verbose=False)\n"
        "images = np.zeros((6, 28, 28), np.uint8)\n"
        "assert classifier.predict_proba(images).shape == (6, 3)\n"
        "classifier.rename(classifier.classes_[0], 'renamed')\n"
        "try:\n"
        "    classifier.learn(images, 'black')\n"
        "except MissingExtra as error:\n"
        "    print(error)\n"
        "print(classifier.classes_[-1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    if method == "coda-p":  # trains prompts in every lesson
        assert "pip install 'coda-prompt[research]'" in done.stdout
        assert done.stdout.endswith(f"{NAMES[2]}\n")
    else:
        assert done.stdout == "black\n"


@pytest.mark.parametrize("method", ["coda-p", "coda-p-ranpac"])
def test_an_interrupted_training_resumes(method: str, tmp_path: Path) -> None:
    images, labels = drawings(range(2), 10)
    whole = ContinualClassifier("pocket", method, epochs=3, batch_size=4, verbose=False)
    whole.learn(images, labels)
    again = ContinualClassifier("pocket", method, epochs=3, batch_size=4, verbose=False)

    progress = tmp_path / "progress"
    for poll in (23, 24):  # after the images have been read
        polls = itertools.count()
        with pytest.raises(Interrupted):
            again.learn(
                images,
                labels,
                progress=progress,
                stop=lambda at=poll, polls=polls: next(polls) == at,  # type: ignore[misc]
            )
    assert again.classes_ == []
    trained: list[int] = []

    def record(event: Progress) -> None:
        if "learning" in event.stage:
            trained.append(event.done)

    again.learn(images, labels, progress=progress, on_progress=record)
    assert min(trained) > 1, "the first steps are not repeated"
    assert_same(again, whole)
    again.save(tmp_path / "model")
    assert not (tmp_path / "progress").exists()

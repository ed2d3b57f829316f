"""A classifier that keeps learning: what it learns, keeps, forgets, says and refuses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import coda

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.data.pocket import pocket_source
from coda_prompt.errors import (
    BadImages,
    BadOption,
    CodaError,
    CorruptFile,
    MissingData,
    ModelBusy,
    NothingToUndo,
    NotTaught,
)
from coda_prompt.learner import advice, calibration, inputs, store
from coda_prompt.learner.inputs import Labelled, MemorySplit, image_paths, labelled
from coda_prompt.pixels import Pixels
from coda_prompt.training.settings import Event

SOURCE = pocket_source()
NAMES = SOURCE.class_names


def drawings(rows: range | list[int], count: int = 20, test: bool = False) -> tuple[Any, list[str]]:
    split: Any = SOURCE.test if test else SOURCE.train
    places = [place for row in rows for place in np.flatnonzero(split.labels == row)[:count]]
    return split.images[places], [NAMES[split.labels[place]] for place in places]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders of four classes as PNG files, and a test folder of all twelve."""
    root = tmp_path_factory.mktemp("drawings")
    for row in range(12):
        for part, split, count in (
            (f"task-{row // 4 + 1}", SOURCE.train, 20),
            ("test", SOURCE.test, 8),
        ):
            folder = root / part / NAMES[row]
            folder.mkdir(parents=True)
            for number, place in enumerate(np.flatnonzero(split.labels == row)[:count]):
                split.image(int(place)).save(folder / f"{number:02}.png")
    return root


def taught(
    *tasks: range | list[int], method: str = "ranpac", **options: Any
) -> ContinualClassifier:
    classifier = ContinualClassifier(method=method, **options)
    for rows in tasks:
        classifier.learn(*drawings(rows))
    return classifier


def tensors(classifier: ContinualClassifier) -> dict[str, torch.Tensor]:
    return classifier._model().tensors


def assert_same(first: ContinualClassifier, second: ContinualClassifier) -> None:
    assert first.classes_ == second.classes_
    mine, other = tensors(first), tensors(second)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


# -- learning and predicting


def test_three_lines_of_python(folders: Path) -> None:
    classifier = ContinualClassifier()
    classifier.learn(folders / "task-1")
    names = classifier.predict(image_paths([folders / "test" / NAMES[0]]))
    assert (names == NAMES[0]).mean() > 0.5
    assert classifier.classes_ == list(NAMES[:4])


def test_every_kind_of_data_teaches_the_same(folders: Path) -> None:
    """A folder, paths, PIL images, arrays, tensors and a dataset with the same images."""
    reference = ContinualClassifier(method="ranpac")
    reference.learn(folders / "task-1")
    paths = image_paths([folders / "task-1"])
    names = [Path(path).parent.name for path in paths]
    pictures = [Image.open(path) for path in paths]
    arrays = np.stack([np.asarray(picture) for picture in pictures])

    class Pairs(torch.utils.data.Dataset[Any]):
        classes = NAMES[:4]

        def __len__(self) -> int:
            return len(pictures)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return pictures[index], self.classes.index(names[index])

    kinds: list[tuple[Any, ...]] = [
        (str(folders / "task-1"),),
        (paths, names),
        (pictures, names),
        (arrays, names),
        (arrays / 255.0, names),
        (torch.from_numpy(arrays)[:, None], np.array(names)),
        (Pairs(),),
    ]
    for data in kinds:
        other = ContinualClassifier(method="ranpac")
        other.learn(*data)
        assert_same(reference, other)


def test_known_classes_are_continued_under_their_name() -> None:
    classifier = taught(range(3), method="ncm")
    images, names = drawings([0, 5], count=40)
    learned = classifier.learn(images, names, validation=0)
    assert learned.new == (NAMES[5],)
    assert learned.continued == (NAMES[0],)
    assert classifier.classes_ == [*NAMES[:3], NAMES[5]]
    assert classifier.tasks_[1]["continued"] == [NAMES[0]]
    assert tensors(classifier)["counts"].tolist() == [16 + 40, 16, 16, 40]


def test_classes_are_strings_and_numbers_become_their_text() -> None:
    classifier = ContinualClassifier(method="ncm")
    images, _ = drawings(range(2))
    classifier.learn(images, [7] * 20 + [10] * 20)
    assert classifier.classes_ == ["7", "10"]
    assert set(classifier.predict(images)) <= {"7", "10"}


def test_probabilities_are_those_of_the_classes_in_their_order() -> None:
    classifier = taught(range(4), range(4, 6))
    images, names = drawings(range(6), test=True)
    chances = classifier.predict_proba(images)
    assert chances.shape == (len(names), 6)
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-9)
    chosen = [classifier.classes_[row] for row in chances.argmax(axis=1)]
    assert chosen == classifier.predict(images).tolist()
    right = np.mean([a == b for a, b in zip(chosen, names, strict=True)])
    assert classifier.score(images, names) == pytest.approx(right)


def test_an_evaluation_tells_classes_and_tasks_apart() -> None:
    classifier = taught(range(4), range(4, 6))
    images, names = drawings(range(6), test=True)
    found = classifier.evaluate(images, names)
    chosen = classifier.predict(images)
    for name, own in found.classes.items():
        mine = [a == b for a, b in zip(chosen, names, strict=True) if b == name]
        assert own.images == 20
        assert own.accuracy == pytest.approx(np.mean(mine))
    assert [task.classes for task in found.tasks] == [NAMES[:4], NAMES[4:6]]
    for task in found.tasks:
        assert task.accuracy_own >= task.accuracy
    assert found.accuracy == pytest.approx(
        np.mean([own.accuracy for own in found.classes.values()])
    )


def test_what_old_tasks_keep_among_their_own_classes() -> None:
    """Over all classes a task has more to be mistaken for; among its own it stays what it was."""
    classifier = ContinualClassifier(method="ranpac")
    then = []
    for first in (0, 10, 20):
        classifier.learn(*drawings(range(first, first + 10), count=80))
        own = classifier.evaluate(*drawings(range(first, first + 10), test=True)).tasks
        then.append(own[-1].accuracy_own)
    found = classifier.evaluate(*drawings(range(30), test=True))
    for task, before in zip(found.tasks, then, strict=True):
        assert task.accuracy_own >= before - 0.05


def test_one_class_after_another_beats_nearest_class_mean_by_three_points() -> None:
    """Thirty classes of all training drawings, with the method that learn takes by default."""
    accuracies = {}
    for method in (None, "ncm"):
        classifier = ContinualClassifier(**({} if method is None else {"method": method}))
        for row in range(30):
            classifier.learn(*drawings([row], count=80), validation=0)
        accuracies[method] = classifier.score(*drawings(range(30), test=True))
    assert accuracies[None] >= accuracies["ncm"] + 0.03


def test_watched_images_of_old_classes_tell_what_was_forgotten(folders: Path) -> None:
    classifier = ContinualClassifier(method="ranpac")
    classifier.learn(folders / "task-1")
    before = classifier.evaluate(*drawings(range(4), 8, test=True)).classes
    learned = classifier.learn(folders / "task-2", watch=folders / "test")
    assert set(learned.forgotten) == set(NAMES[:4]), "classes not known before are not watched"
    after = classifier.evaluate(*drawings(range(4), 8, test=True)).classes
    for name, (then, now) in learned.forgotten.items():
        assert then == pytest.approx(before[name].accuracy)
        assert now == pytest.approx(after[name].accuracy)


# -- keeping


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
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
    assert "5 classes, learned in 2 tasks" in card


@pytest.mark.parametrize("method", ["ranpac", "coda-p", "coda-p-ranpac", "ncm"])
def test_continued_in_another_process_it_is_the_same_bits(method: str, tmp_path: Path) -> None:
    script = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from test_learner import drawings, ContinualClassifier\n"
        "c = ContinualClassifier.load(sys.argv[2])\n"
        "c.learn(*drawings([5, 6]))\n"
        "c.save(sys.argv[2])\n"
    )
    options = {} if method in ("ranpac", "ncm") else {"epochs": 1}
    whole = taught(range(3), [5, 6], method=method, **options)
    taught(range(3), method=method, **options).save(tmp_path)
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
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
    ranpac = taught(range(3))
    ranpac.save(tmp_path / "ranpac")
    assert (tmp_path / "ranpac" / "model.safetensors").stat().st_size < 10_000_000


@pytest.mark.parametrize("method", ["ranpac", "coda-p", "coda-p-ranpac", "ncm"])
def test_no_image_and_no_feature_of_an_image_is_in_the_file(method: str, tmp_path: Path) -> None:
    images, names = drawings(range(3))
    options = {} if method in ("ranpac", "ncm") else {"epochs": 1}
    classifier = ContinualClassifier(method=method, **options)
    classifier.learn(images, names, validation=0)
    classifier.save(tmp_path)
    inner = classifier._method
    views = torch.stack([_view(classifier, image) for image in images])
    with torch.no_grad():
        queries = inner.queries(views)
        vectors = [queries, inner.features(views, queries), views.flatten(1)]
        if hasattr(inner, "statistics"):
            vectors.append(inner.statistics.hidden(vectors[1]))
    for name, tensor in tensors(classifier).items():
        if not tensor.is_floating_point() or tensor.dim() < 2:
            continue
        for rows in (tensor.flatten(0, -2), tensor.transpose(-1, -2).flatten(0, -2)):
            for vector in vectors:
                if rows.shape[1] == vector.shape[1]:
                    near = torch.cosine_similarity(rows[:, None], vector[None], dim=2)
                    gap = torch.cdist(rows, vector)
                    assert gap.min() > 1e-3, f"{name} holds an image's vector"
                    assert name == "sums" or near.max() < 0.9999, name


def _view(classifier: ContinualClassifier, image: Any) -> torch.Tensor:
    from coda_prompt.data.images import test_view

    return test_view(Image.fromarray(image), classifier._backbone.pixels, "squash")


def test_a_class_of_one_image_is_told() -> None:
    classifier = ContinualClassifier(method="ncm")
    images, names = drawings(range(2), count=6)
    learned = classifier.learn(images[:7], names[:7])
    assert any("learned from one image" in warning for warning in learned.warnings)


@pytest.mark.parametrize("method", ["er-5000", "upper-bound"])
def test_methods_that_need_old_images_are_refused(method: str) -> None:
    with pytest.raises(BadOption, match="keeps none"):
        ContinualClassifier(method=method)


def test_a_failed_learn_leaves_everything_as_it_was(tmp_path: Path) -> None:
    classifier = taught(range(3), method="coda-p", epochs=2)
    before = {name: tensor.clone() for name, tensor in tensors(classifier).items()}
    tasks = list(classifier.tasks_)

    def stop(event: Event) -> None:
        if event.kind == "epoch":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classifier.learn(*drawings([3, 4]), on_event=stop)
    after = tensors(classifier)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert classifier.tasks_ == tasks
    assert classifier.classes_ == list(NAMES[:3])
    classifier.learn(*drawings([3, 4]))
    assert_same(classifier, taught(range(3), [3, 4], method="coda-p", epochs=2))


def test_a_failure_while_measuring_leaves_everything_as_it_was() -> None:
    classifier = taught(range(3))
    before = {name: tensor.clone() for name, tensor in tensors(classifier).items()}
    calls = 0

    def stop(event: Event) -> None:
        nonlocal calls
        calls += event.kind == "pass" and event.step == event.steps
        if calls == 2:  # features of the task, then its held-out images
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classifier.learn(*drawings([3, 4]), on_event=stop)
    assert classifier.classes_ == list(NAMES[:3])
    assert all(torch.equal(tensors(classifier)[name], before[name]) for name in before)
    with pytest.raises(NothingToUndo):
        classifier.undo()
    fresh = ContinualClassifier()
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        fresh.learn(*drawings([3, 4]), on_event=stop)
    assert fresh.classes_ == []


def test_a_tiny_task_does_not_make_the_model_forget() -> None:
    """Two held-out drawings must not choose the ridge of twenty well-learned classes."""
    classifier = ContinualClassifier(method="ranpac")
    classifier.learn(*drawings(range(20), count=80), validation=0)
    before = classifier.score(*drawings(range(20), test=True))
    for first in (20, 22, 24, 26):
        classifier.learn(*drawings([first, first + 1], count=7), validation=0)
    assert classifier.score(*drawings(range(20), test=True)) >= before - 0.03


def test_epochs_of_one_task_are_not_those_of_the_next(tmp_path: Path) -> None:
    classifier = taught(range(3), method="coda-p", epochs=2)
    seen = []
    classifier.learn(*drawings([3, 4]), epochs=1, on_event=lambda event: seen.append(event.epochs))
    assert max(seen) == 1
    classifier.learn(*drawings([5, 6]), on_event=lambda event: seen.append(event.epochs))
    assert max(seen) == 2


def test_a_folder_with_other_things_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my project")
    classifier = taught(range(2), method="ncm")
    with pytest.raises(MissingData, match="not empty"):
        classifier.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my project"
    (tmp_path / "model.safetensors").write_bytes(b"a model of somebody else")
    with pytest.raises(CorruptFile, match="not a model of this program"):
        classifier.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"a model of somebody else"


def test_a_damaged_earlier_version_does_not_stop_predictions(tmp_path: Path) -> None:
    taught(range(2), [2], method="ncm").save(tmp_path)
    (tmp_path / "previous.safetensors").write_bytes(b"damaged")
    loaded = ContinualClassifier.load(tmp_path)
    assert len(loaded.predict(drawings([0])[0])) == 20
    with pytest.raises(CorruptFile):
        loaded.undo()


def test_a_large_share_held_out_leaves_two_images_to_learn_from() -> None:
    classifier = ContinualClassifier(method="ncm")
    learned = classifier.learn(*drawings(range(3), count=6), validation=0.9)
    assert learned.held_out == 3 * 4
    assert tensors(classifier)["counts"].tolist() == [2, 2, 2]


def test_methods_whose_file_would_be_a_network_or_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="whole network"):
        ContinualClassifier(method="ft++")
    (tmp_path / "mine.py").write_text(
        "from coda_prompt.methods.closedform import NearestClassMean\n"
        "class Mine(NearestClassMean):\n    pass\n"
    )
    with pytest.raises(BadOption, match="comes with the program"):
        ContinualClassifier(method=f"{tmp_path}/mine.py:Mine")
    with pytest.raises(BadOption, match="device"):
        ContinualClassifier(device="nonsense")


def test_one_image_is_one_image_however_it_comes(tmp_path: Path) -> None:
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


def test_classes_a_dataset_only_names_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairs(torch.utils.data.Dataset[Any]):
        classes = ("never", NAMES[0], "nowhere", NAMES[1])

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Any, int]:
            row = index % 2
            return drawings([row], 20)[0][index], 2 * row + 1

    classifier = ContinualClassifier(method="ncm")
    assert set(classifier.learn(Pairs()).new) == set(NAMES[:2])
    named = MemorySplit(list(drawings([0], 4)[0]), np.full(4, 2))
    monkeypatch.setattr(inputs, "_labelled", lambda *_: Labelled(named, ("a", "b", "c")))
    found = labelled("anything")
    assert found.names == ("c",)
    assert found.split.labels.tolist() == [0] * 4


# -- files that are not what they should be


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
    header, body = store._parts(file.read_bytes(), file)
    description = json.loads(header["__metadata__"]["description"])
    replaced = change(description)
    text = json.dumps(description if replaced is None else replaced)
    digest = hashlib.sha256(text.encode() + body).hexdigest()
    header["__metadata__"] = {"description": text, "sha256": digest}
    start = json.dumps(header).encode()
    file.write_bytes(len(start).to_bytes(8, "little") + start + body)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(method="/tmp/evil.py:Evil"),
        lambda d: d.update(method="er-5000"),
        lambda d: d.update(method=3),
        lambda d: d.update(format=2),
        lambda d: d.update(options={"no such option": 1}),
        lambda d: d.update(options={"seed": 1}),
        lambda d: d.update(options={"device": "cuda"}),
        lambda d: d.update(options=None),
        lambda d: d.update(training={"epochs": -1}),
        lambda d: d.update(training={"method": "ncm"}),
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
        lambda d: d.update(method="ranpac", options={"width": 10**7}),
        lambda d: d.update(method="ranpac", options={"width": 64}),
    ],
)
def test_a_stranger_s_model_can_at_worst_be_refused(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    taught(range(2), method="ncm").save(tmp_path)
    changed(tmp_path, lambda d: None)
    assert ContinualClassifier.load(tmp_path).classes_ == list(NAMES[:2])
    changed(tmp_path, change)
    with pytest.raises(CodaError):
        ContinualClassifier.load(tmp_path)


def test_a_save_cut_off_at_any_step_leaves_one_whole_version(
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
        with store.writing(folder):
            pass  # the next writer finishes what was cut off
        found = ContinualClassifier.load(folder)
        if found.classes_ == second.classes_:
            found.undo()
        assert_same(found, first)


def test_one_writer_at_a_time(tmp_path: Path, folders: Path) -> None:
    taught(range(2), method="ncm").save(tmp_path)
    with store.writing(tmp_path):
        with pytest.raises(ModelBusy, match=str(os.getpid())):
            taught(range(2), method="ncm").save(tmp_path)
        assert ContinualClassifier.load(tmp_path).classes_, "readers go on"
        busy = coda("learn", str(tmp_path), str(folders / "task-2"))
        assert busy.returncode == 2
        assert "another process" in busy.stderr
    taught(range(2), method="ncm").save(tmp_path)


# -- images as people have them


def picture(kind: str, path: Path) -> None:
    grey = SOURCE.train.image(0)
    if kind == "corrupt":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"no image" * 20)
    elif kind == "truncated":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:1500])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no image")
    elif kind == "bomb":
        Image.new("1", (20_000, 20_000)).save(path)
    elif kind == "cmyk":
        grey.convert("CMYK").save(path.with_suffix(".jpg"))
    elif kind == "16 bit":
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(path)
    elif kind == "palette":
        grey.convert("P").save(path)
    elif kind == "alpha":
        grey.convert("RGBA").save(path)
    elif kind == "animated":
        grey.save(path.with_suffix(".gif"), save_all=True, append_images=[grey] * 3)
    else:
        raise ValueError(kind)


BAD = ["corrupt", "truncated", "empty", "text", "bomb"]
GOOD = ["cmyk", "16 bit", "palette", "alpha", "animated"]


def test_all_bad_files_are_listed_before_anything_is_learned(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for number in range(5):
            SOURCE.train.image(number).save(folder / f"{number}.png")
    for kind in BAD:
        picture(kind, tmp_path / "data" / "a" / f"bad {kind}.png")
    for kind in GOOD:
        picture(kind, tmp_path / "data" / "b" / f"good {kind}.png")
    with pytest.raises(BadImages) as refused:
        ContinualClassifier(method="ncm").learn(tmp_path / "data")
    assert len(refused.value.problems) == len(BAD)
    for kind in BAD:
        assert f"bad {kind}.png" in str(refused.value)
    classifier = ContinualClassifier(method="ncm")
    learned = classifier.learn(tmp_path / "data", skip_bad=True)
    assert learned.images == {"a": 5, "b": 10}
    assert len(learned.left_out) == len(BAD)
    shown = coda("learn", str(tmp_path / "model"), str(tmp_path / "data"))
    assert shown.returncode == 2
    assert not (tmp_path / "model").exists(), "nothing is left of a model that was not learned"
    assert "--skip-bad" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_photograph_lying_on_its_side_is_seen_upright(tmp_path: Path) -> None:
    classifier = taught(range(6))
    upright = SOURCE.test.image(3).convert("RGB").resize((56, 56))
    upright.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    first, second = classifier.predict_proba([tmp_path / "upright.png", tmp_path / "side.png"])
    np.testing.assert_allclose(first, second, atol=1e-6)
    opened = classifier.predict_proba(Image.open(tmp_path / "side.png"))[0]
    np.testing.assert_allclose(first, opened, atol=1e-6)


def test_colours_are_converted_as_expected(tmp_path: Path) -> None:
    classifier = taught(range(6))
    grey = SOURCE.test.image(5)
    kinds = {
        "grey": grey,
        "rgb": grey.convert("RGB"),
        "opaque": grey.convert("RGBA"),
        "16 bit": Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
        "palette": grey.convert("P"),
    }
    chances = classifier.predict_proba(list(kinds.values()))
    for own in chances[1:]:
        np.testing.assert_allclose(own, chances[0], atol=1e-6)
    clear = Image.new("RGBA", (28, 28), (0, 0, 0, 0))
    white = Image.new("L", (28, 28), 255)
    np.testing.assert_allclose(*classifier.predict_proba([clear, white]), atol=1e-6)


@pytest.mark.parametrize("trouble", ["empty class", "no class", "file", "missing", "parts", "loop"])
def test_folders_that_are_not_what_they_should_be(trouble: str, tmp_path: Path) -> None:
    root = tmp_path / "dätä with space"
    good = root / "ä class"
    good.mkdir(parents=True)
    for number in range(3):
        SOURCE.train.image(number).save(good / f"{number} ü.png")
    classifier = ContinualClassifier(method="ncm")
    if trouble == "loop":
        (good / "again").symlink_to(root)
        assert classifier.learn(root).images == {"ä class": 3}
        return
    place = root
    if trouble == "empty class":
        (root / "nothing").mkdir()
    elif trouble == "no class":
        place = good
    elif trouble == "file":
        place = good / "0 ü.png"
    elif trouble == "missing":
        place = root / "nowhere"
    else:
        shutil.move(str(good), str(root / "train"))
    with pytest.raises(MissingData):
        classifier.learn(place)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0)
    with pytest.raises(MissingData, match="cannot be read"):
        ContinualClassifier(method="ncm").learn(tmp_path)


# -- what people are told


def some(counts: dict[str, int], size: int = 28) -> Labelled:
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    images = [Image.new("L", (size, size))] * len(labels)
    return Labelled(MemorySplit(images, labels), tuple(counts))


@pytest.mark.parametrize(
    ("counts", "known", "words"),
    [
        ({"cat": 4, "dog": 9}, [], "fewer than 5"),
        ({"cat": 6, "dog": 90}, [], "lean towards 'dog'"),
        ({"Cat": 9, "dog": 9}, ["cat"], "'cat' and 'Cat'"),
        ({"alarm clock": 9, "alarm_clocks": 9}, [], "'alarm clock' and 'alarm_clocks'"),
    ],
)
def test_a_warning_where_it_matters(counts: dict[str, int], known: list[str], words: str) -> None:
    found = advice.warnings(some(counts), known, "pocket", Pixels(28, 1, (0.5,), (0.5,)))
    assert any(words in warning for warning in found)


def test_no_warning_where_there_is_nothing_to_say() -> None:
    images = some({"cat": 10, "dog": 12, "type 1": 10, "type 2": 10})
    assert advice.warnings(images, ["bird"], "pocket", Pixels(28, 1, (0.5,), (0.5,))) == []


def test_small_images_and_photographs_are_noticed() -> None:
    small = advice.warnings(
        some({"a": 9}), [], "vit-b16-in1k", Pixels(224, 3, (0.5,) * 3, (0.5,) * 3)
    )
    assert any("expects 224 px" in warning for warning in small)
    random = np.random.default_rng(0).integers(0, 255, (9, 128, 128, 3), np.uint8)
    photographs = labelled(random, ["a"] * 9)
    found = advice.warnings(photographs, [], "pocket", Pixels(28, 1, (0.5,), (0.5,)))
    assert any("vit-b16-in21k" in warning for warning in found)


def test_the_temperature_has_the_least_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 7 * torch.randn(400, 5, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / 3, dim=1), 1, generator=generator)[:, 0]
    found = calibration.fitted_temperature(logits, labels, usual=1.0)
    assert found == pytest.approx(3, rel=0.15)

    def loss(temperature: float) -> float:
        likelihood = torch.nn.functional.cross_entropy(logits.double() / temperature, labels)
        return float(likelihood) + 10 / 400 * math.log(temperature) ** 2

    assert all(loss(found) <= loss(found * factor) for factor in (0.9, 0.99, 1.01, 1.1))


def test_a_few_images_that_are_all_right_do_not_make_it_certain() -> None:
    logits = torch.eye(3)
    found = calibration.fitted_temperature(logits, torch.arange(3), usual=0.1)
    assert 0.03 < found < 0.2
    assert calibration.merged_temperature([], usual=0.1) == 0.1
    assert calibration.merged_temperature([(0.2, 30), (5.0, 0)], 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_probabilities_of_small_tasks_are_neither_certain_nor_flat(validation: float) -> None:
    classifier = ContinualClassifier()
    for row in range(6):
        classifier.learn(*drawings([row], count=10), validation=validation)
    images, names = drawings(range(6), test=True)
    found = classifier.evaluate(images, names)
    sure = np.median(classifier.predict_proba(images).max(axis=1))
    assert 0.4 < sure < 0.99
    assert found.calibration_error < 0.2


def test_the_calibration_error_by_hand() -> None:
    sure = torch.tensor([[0.95, 0.05]] * 4 + [[0.65, 0.35]] * 4, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1])
    expected = 0.5 * abs(0.75 - 0.95) + 0.5 * abs(0.25 - 0.65)
    assert calibration.expected_calibration_error(sure, labels) == pytest.approx(expected)


def test_probabilities_can_be_believed() -> None:
    """Scores of RanPAC are no logits: without the temperature they are far from believable."""
    classifier = ContinualClassifier(method="ranpac")
    classifier.learn(*drawings(range(10), count=80))
    images, names = drawings(range(10), test=True)
    found = classifier.evaluate(images, names)
    labels = torch.tensor([classifier.classes_.index(name) for name in names])
    raw = torch.softmax(classifier._logits(labelled(images, names).split).double(), dim=1)
    assert found.calibration_error < 0.5 * calibration.expected_calibration_error(raw, labels)
    assert found.calibration_error < 0.12


def test_before_any_class_is_learned_the_answer_is_clear() -> None:
    with pytest.raises(NotTaught, match="has not learned any class"):
        ContinualClassifier(method="ncm").predict(drawings([0])[0])
    with pytest.raises(NotTaught, match=NAMES[7]):
        taught(range(2), method="ncm").evaluate(*drawings([7]))


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (np.zeros((2, 28, 28), np.uint8), ["a"]),
        (np.zeros((2, 28, 28), np.uint8), [1.5, 2.5]),
        (np.full((2, 28, 28), 3.0), ["a", "b"]),
        (np.zeros((2, 28), np.uint8), ["a", "b"]),
        (3, None),
        ([], None),
        ([1, 2, 3], None),
    ],
)
def test_data_that_cannot_be_learned_are_refused(data: Any, labels: Any) -> None:
    with pytest.raises(BadOption):
        ContinualClassifier(method="ncm").learn(data, labels)

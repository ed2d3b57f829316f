"""Images that were learned before: their hashes, and models that have learned the same ones."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, SOURCE, arrays, drawings
from PIL import Image
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import CannotEdit, CorruptFile
from coda_prompt.learner.folder import MODEL
from coda_prompt.learner.hashes import BITS, MAX_DIFFERENT_BITS, image_hash
from coda_prompt.storage.tensors import read_tensors, write_tensors

COUNT = 12


def taught_with_hashes(*lessons: list[int]) -> ContinualClassifier:
    classifier = ContinualClassifier("pocket", "ncm", verbose=False)
    for rows in lessons:
        classifier.learn(*drawings(rows, COUNT), find_duplicates=True)
    return classifier


def classes_of_hashes(classifier: ContinualClassifier) -> dict[str, int]:
    rows = arrays(classifier)["duplicates.rows"].tolist()
    return {name: rows.count(row) for row, name in enumerate(classifier.classes_)}


def repeated(classifier: ContinualClassifier, images: Any, labels: Any) -> list[str]:
    hints = classifier.learn(images, labels).hints
    return [hint for hint in hints if hint.startswith("near-duplicates of images learned before")]


def bits(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.unpackbits(image_hash(image))


def test_copies_have_a_close_hash_and_other_images_do_not() -> None:
    images, _ = drawings(range(30), 10)
    hashes = np.stack([bits(Image.fromarray(each)) for each in images])
    apart = (hashes[:, None] != hashes[None]).sum(axis=2)
    assert apart[~np.eye(len(apart), dtype=bool)].min() > MAX_DIFFERENT_BITS
    for index in range(0, len(images), 10):
        original = Image.fromarray(images[index])
        file = io.BytesIO()
        original.resize((56, 56), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
        copy = bits(Image.open(file))
        assert len(copy) == BITS
        assert (copy != hashes[index]).sum() <= MAX_DIFFERENT_BITS


def test_images_of_earlier_lessons_are_named() -> None:
    classifier = taught_with_hashes([0, 1])
    new, labels = drawings([2], COUNT)
    old, _ = drawings([1], 1)
    brighter = np.clip(old.astype(int) + 12, 0, 255).astype(np.uint8)
    (hint,) = repeated(classifier, np.concatenate([new, brighter]), [*labels, NAMES[2]])
    assert f"image {COUNT} ({NAMES[2]}) (as '{NAMES[1]}')" in hint
    assert "more" not in hint
    (hint,) = repeated(classifier, *drawings([0], COUNT))
    assert f"and {COUNT - 5} more" in hint
    assert not repeated(classifier, *drawings([3], COUNT))


def test_without_the_option_nothing_is_stored_or_compared() -> None:
    classifier = ContinualClassifier("pocket", "ncm", verbose=False)
    classifier.learn(*drawings([0, 1], COUNT))
    assert not repeated(classifier, *drawings([0], COUNT))
    assert not any("duplicates" in name for name in arrays(classifier))
    classifier.learn(*drawings([2], COUNT), find_duplicates=True)
    classifier.learn(*drawings([3], COUNT), find_duplicates=False)
    assert classes_of_hashes(classifier)[NAMES[2]] == COUNT
    assert classes_of_hashes(classifier)[NAMES[3]] == 0


def test_hashes_are_saved_undone_and_redone(tmp_path: Path) -> None:
    classifier = taught_with_hashes([0, 1], [2])
    classifier.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", verbose=False)
    assert classes_of_hashes(loaded) == {NAMES[row]: COUNT for row in range(3)}
    loaded.undo()
    assert not repeated(loaded, *drawings([2], COUNT))
    loaded.undo()
    loaded.redo()
    assert repeated(loaded, *drawings([2], COUNT))


def test_edits_move_the_hashes() -> None:
    classifier = taught_with_hashes([0, 1, 2], [3, 4])
    classifier.forget(NAMES[1])
    kept = classes_of_hashes(classifier)
    assert kept == {NAMES[row]: COUNT for row in (0, 2, 3, 4)}
    classifier.undo()  # forgotten there, too
    assert classes_of_hashes(classifier) == {NAMES[row]: COUNT for row in (0, 2)}
    classifier.redo()
    classifier.merge_classes([NAMES[0], NAMES[3]], "both")
    assert classes_of_hashes(classifier) == {"both": 2 * COUNT, NAMES[2]: COUNT, NAMES[4]: COUNT}
    images, _ = drawings([4], COUNT)
    classifier.relabel(images[:2], ["new", NAMES[2]], taught_as=NAMES[4])
    counts = classes_of_hashes(classifier)
    assert (counts["new"], counts[NAMES[2]], counts[NAMES[4]]) == (1, COUNT + 1, COUNT - 2)
    (hint,) = repeated(classifier, images[:1], ["new"])
    assert "(as 'new')" in hint


def test_merged_models_have_the_hashes_of_both() -> None:
    first, second = taught_with_hashes([0, 1]), taught_with_hashes([2, 1])
    merged = ContinualClassifier.merge([first, second], count_twice=True)
    expected = {NAMES[0]: COUNT, NAMES[1]: 2 * COUNT, NAMES[2]: COUNT}
    assert classes_of_hashes(merged) == expected
    (hint,) = repeated(merged, *drawings([2], 1))
    assert f"(as '{NAMES[2]}')" in hint


def test_hashes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    taught_with_hashes([0, 1]).save(tmp_path)
    file = read_tensors(tmp_path / MODEL)
    for name, array in (
        ("rows", np.full(2 * COUNT, 2)),
        ("rows", np.zeros(3, np.int64)),
        ("hashes", np.zeros((2 * COUNT, 3), np.uint8)),
        ("hashes", np.zeros((2 * COUNT, 15))),
    ):
        forged = {**file.tensors, f"duplicates.{name}": array}
        write_tensors(tmp_path / MODEL, forged, file.description or {})
        with pytest.raises(CorruptFile, match="arrays do not fit"):
            ContinualClassifier.load(tmp_path)


def test_the_command_names_images_that_were_learned_before(
    tmp_path: Path, drawing_folders: Path
) -> None:
    for folder, rows in (("first", (0, 1)), ("second", (2, 3))):
        for row in rows:
            target = tmp_path / folder / NAMES[row]
            shutil.copytree(drawing_folders / "test" / NAMES[row], target)
    coda("learn", "model", "first", "--find-duplicates", cwd=tmp_path)
    copied = sorted((tmp_path / "first" / NAMES[0]).iterdir())[0]
    Image.open(copied).resize((40, 40)).save(tmp_path / "second" / NAMES[2] / "copy.png")
    shown = coda("learn", "model", "second", "--json", cwd=tmp_path)
    hints = json.loads(shown.stdout)["hints"]
    assert any("copy.png" in hint and f"(as '{NAMES[0]}')" in hint for hint in hints)


# -- models that have learned the same images


MADE_OF = ("--method", "ncm", "--backbone", "pocket")


def fill(root: Path, *rows: int, first: int = 0, size: int | None = None) -> None:
    for row in rows:
        folder = root / SOURCE.class_names[row]
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(first, first + 6):
            image = SOURCE.train.image(640 * row + number)
            (image if size is None else image.resize((size, size))).save(folder / f"{number}.png")


@pytest.mark.parametrize("hashes", ["--find-duplicates", "--no-find-duplicates"])
def test_the_command_refuses_the_same_images(hashes: str, tmp_path: Path) -> None:
    """Copies in another folder and lesson; with hashes also of another size."""
    fill(tmp_path / "one", 0, 1)
    size = 64 if hashes == "--find-duplicates" else None
    fill(tmp_path / "two", 1, 2, size=size)
    fill(tmp_path / "three", 3, 4)
    for name in ("one", "two", "three"):
        taught = coda("learn", f"m-{name}", name, hashes, "-q", *MADE_OF, cwd=tmp_path)
        assert taught.returncode == 0, taught.stderr
    refused = coda("merge", "m-one", "m-two", "--out", "joined", cwd=tmp_path)
    assert refused.returncode == 2
    shared = SOURCE.class_names[1]
    expected = f"the same images ({shared} 6), and 6 images would count twice."
    assert f"both models have learned {expected}" in refused.stderr
    assert "--count-twice" in refused.stderr
    assert not (tmp_path / "joined").exists()
    apart = coda("merge", "m-one", "m-three", "--out", "apart", "-q", cwd=tmp_path)
    assert apart.returncode == 0, apart.stderr
    anyway = coda("merge", "m-one", "m-two", "--out", "joined", "--count-twice", cwd=tmp_path)
    assert anyway.returncode == 0, anyway.stderr
    assert "3 classes" in anyway.stdout + anyway.stderr


def test_the_same_files_are_recognised_after_another_lesson(tmp_path: Path) -> None:
    """The statistics of the class have changed, and there are no hashes."""
    fill(tmp_path / "one", 0)
    fill(tmp_path / "more", 0, first=10)
    first, second = (ContinualClassifier(method="ncm", verbose=False) for _ in range(2))
    first.learn(tmp_path / "one")
    first.learn(tmp_path / "more")
    second.learn(tmp_path / "one")
    with pytest.raises(CannotEdit, match="images would count twice"):
        ContinualClassifier.merge([first, second])
    joined = ContinualClassifier.merge([first, second], count_twice=True)
    assert sum(sum(task["images"].values()) for task in joined.tasks_) == 18


def test_some_images_of_a_class_are_recognised_by_their_hashes() -> None:
    images, labels = drawings([0], 20)
    parts = [slice(0, 12), slice(8, 20)]
    models = [ContinualClassifier(method="slda", verbose=False) for _ in parts]
    for model, part in zip(models, parts, strict=True):
        model.learn(images[part], labels[part], find_duplicates=True)
    with pytest.raises(CannotEdit, match="4 images would count twice"):
        ContinualClassifier.merge(models)

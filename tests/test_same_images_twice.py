"""Models that have learned the same images are not joined in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawings import SOURCE, drawings
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import CannotEdit

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
    with pytest.raises(CannotEdit, match="6 images would count twice"):
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

"""Folders of images that are not directly in class folders: refused with the right command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from drawings import SOURCE
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import MissingData, WrongFolder
from coda_prompt.images.folders import folder_source


def fill(root: Path, *folders: str) -> None:
    for row, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(3):
            SOURCE.train.image(640 * row + number).save(root / folder / f"{number}.png")


def learned(root: Path, folder: str) -> subprocess.CompletedProcess[str]:
    return coda("learn", "m", folder, "--method", "ncm", cwd=root)


@pytest.mark.parametrize(
    ("folders", "instead"),
    [
        (["in/pets/cat", "in/pets/dog", "in/__MACOSX/pets/cat", "in/.hidden/x"], ["in/pets"]),
        (["in/a/b/cat", "in/a/b/dog"], ["in/a/b"]),
        (["in/animals/cat", "in/animals/dog", "in/things/car"], ["in/animals", "in/things"]),
        (["in/data/train/cat", "in/data/train/dog", "in/data/test/cat"], ["in/data/train"]),
        (["in/train/cat", "in/test/cat"], ["in/train"]),
        (["in/my pets/cat", "in/my pets/dog"], ["in/my pets"]),
    ],
)
def test_folders_of_class_folders_are_refused_with_the_command(
    folders: list[str], instead: list[str], tmp_path: Path
) -> None:
    fill(tmp_path, *folders)
    refused = learned(tmp_path, "in/")
    assert refused.returncode == 2
    assert not (tmp_path / "m").exists()
    shown = [folder if " " not in folder else f"'{folder}'" for folder in instead]
    commands = [f"  coda learn m {folder} --method ncm" for folder in shown]
    assert refused.stderr.splitlines()[-len(commands) :] == commands
    with pytest.raises(WrongFolder, match="Name the folder with the classes"):
        ContinualClassifier(method="ncm", verbose=False).learn(tmp_path / "in")
    right = ContinualClassifier(method="ncm", verbose=False).learn(tmp_path / instead[0])
    expected = {Path(each).name for each in folders if each.startswith(f"{instead[0]}/")}
    assert set(right.new) == expected


@pytest.mark.parametrize(
    ("folders", "named"),
    [(["in/a", "in/b", "in/b/sub"], "b/sub"), (["in/cat/train", "in/dog/train"], "cat/train")],
)
def test_folders_inside_class_folders_are_refused(
    folders: list[str], named: str, tmp_path: Path
) -> None:
    fill(tmp_path, *folders)
    refused = learned(tmp_path, "in")
    assert refused.returncode == 2
    assert f"in folders below class folders ({named}" in refused.stderr
    assert "Move these images up" in refused.stderr
    with pytest.raises(MissingData, match="below class folders"):
        ContinualClassifier(method="ncm").learn(tmp_path / "in", skip_bad=True)


def test_folders_without_images_and_hidden_ones_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "in/a", "in/b", "in/b/.thumbnails", "in/b/__MACOSX", "in/.trash/c")
    (tmp_path / "in" / "a" / "notes").mkdir()
    (tmp_path / "in" / "a" / "notes" / "read me.txt").write_text("nothing")
    done = ContinualClassifier(method="ncm", verbose=False).learn(tmp_path / "in")
    assert done.images == {"a": 3, "b": 3}


def test_benchmarks_refuse_groups_of_class_folders(tmp_path: Path) -> None:
    fill(tmp_path, "one/pets/cat", "one/pets/dog", "two/art/cat", "two/photo/cat")
    with pytest.raises(WrongFolder, match=r"Name the folder with the classes: .*one/pets\."):
        folder_source(tmp_path / "one")
    with pytest.raises(WrongFolder, match=r"Name the folder with the classes: domains:.*two\."):
        folder_source(tmp_path / "two")
    fill(tmp_path, "three/wrapper/train/cat", "three/wrapper/test/cat")
    with pytest.raises(WrongFolder, match=r"classes: .*three/wrapper\."):
        folder_source(tmp_path / "three")


def test_benchmarks_say_that_nested_images_are_included(tmp_path: Path) -> None:
    fill(tmp_path, "cat", "cat/more", "dog")
    assert "3 images in folders below class folders included" in folder_source(tmp_path).notes

"""What a model folder may contain: regular files; nothing that a stranger has put there is used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from drawings import NAMES, drawings, taught
from forked import Forked
from small import CODA

SOON = 120.0
"""Seconds for a command that must not wait for a pipe, on a busy machine."""
EDITS = (
    ("rename", NAMES[0], "zero"),
    ("merge-classes", NAMES[0], NAMES[1], "--into", NAMES[1]),
    ("forget", NAMES[0], "--yes"),
    ("undo",),
    ("redo",),
)
WRITTEN = (
    *("model.safetensors", "config.json", "README.md", "checks.json", ".learning.json"),
    *(".lock", ".lock.owner", "versions", "versions/000001.safetensors", ".progress"),
)
"""What `coda` reads, writes or deletes in a model folder."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an earlier and an undone version."""
    folder = tmp_path_factory.mktemp("made") / "model"
    classifier = taught([0, 1], [2], method="ncm")
    classifier.learn(*drawings([3]))
    classifier.undo()
    classifier.save(folder)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's folder, with files of the names that a model folder has."""
    folder = tmp_path / "victim"
    (folder / ".progress").mkdir(parents=True)
    for name in ("letter.txt", "000001.safetensors", ".a.1.tmp", ".progress/photo.png"):
        (folder / name).write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, without those of the lock."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def command(folder: Path, name: str, *arguments: str) -> tuple[int, str]:
    """Run a command of a model, which has to end."""
    done = Forked(CODA, name, str(folder), *arguments).completed(SOON)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.posix
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit[0])
def test_files_that_a_link_leads_to_are_not_deleted(
    edit: tuple[str, ...], model: Path, victim: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    before, theirs = contents(copy), contents(victim)
    shutil.rmtree(copy / "versions")
    (copy / "versions").symlink_to(victim)
    code, message = command(copy, *edit)
    assert contents(victim) == theirs
    assert code == 2
    assert f"{copy}/versions: this is a symbolic link" in message
    (copy / "versions").unlink()
    assert contents(copy) == {name: before[name] for name in contents(copy)}


@pytest.mark.posix
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_model_folder_has_regular_files_only(
    kind: str, model: Path, victim: Path, tmp_path: Path
) -> None:
    """A pipe would be waited for; what a link leads to must be neither read nor changed."""
    for name in WRITTEN:
        copy = shutil.copytree(model, tmp_path / "model")
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if kind == "link":
            (victim / "target").write_bytes((model / "model.safetensors").read_bytes())
            path.symlink_to(victim if name in ("versions", ".progress") else victim / "target")
        else:
            os.mkfifo(path)
        theirs = contents(victim)
        code, message = command(copy, "rename", NAMES[0], "zero")
        assert code == 2, name
        assert f"{path}: this is a" in message, name
        assert contents(victim) == theirs, name
        shutil.rmtree(copy)


@pytest.mark.posix
@pytest.mark.parametrize("reading", [("predict",), ("info",), ("history",)])
def test_reading_a_model_waits_for_no_pipe(
    reading: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    images = [str(tmp_path / "image.png")] if reading == ("predict",) else []
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model.safetensors")
    code, message = command(copy, *reading, *images)
    assert code == 2
    assert "a regular file is expected" in message


@pytest.mark.parametrize("edit", EDITS[1:3], ids=lambda edit: edit[0])
def test_files_of_other_programs_in_a_model_folder_are_left_alone(
    edit: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / ".progress").mkdir()
    others = (
        *("notes.txt", ".notes.txt.12.tmp", "other.safetensors", "versions/holiday.safetensors"),
        *("versions/.holiday.1.tmp", ".progress/holiday.png"),
    )
    for name in others:
        (copy / name).write_text("mine")
    code, message = command(copy, *edit)
    assert code == 0, message
    assert [name for name in others if not (copy / name).exists()] == []


def test_a_first_lesson_does_not_replace_the_readme_of_a_project(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    done = Forked(CODA, "learn", str(tmp_path), str(tmp_path / "images")).completed(SOON)
    assert done.returncode == 2
    assert (tmp_path / "README.md").read_text() == "mine"

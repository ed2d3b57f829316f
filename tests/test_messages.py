"""What the command line says about mistakes: names that users know, and what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from drawings import NAMES, drawings, taught
from PIL import Image
from small import coda
from typer.testing import CliRunner, Result

from coda_prompt import ContinualClassifier, cli
from coda_prompt.errors import CodaError, MissingData, NotLearned, UnknownName
from coda_prompt.learner import feedback
from coda_prompt.learner.feedback import LearnerProgress
from coda_prompt.learner.results import Progress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an image."""
    root = tmp_path_factory.mktemp("messages")
    taught(range(2), method="ncm").save(root / "model")
    Image.fromarray(drawings([0], 1)[0][0]).save(root / "image.png")
    (root / "empty").mkdir()
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def message(*arguments: str) -> str:
    done = run(*arguments)
    assert isinstance(done.exception, CodaError), done.output
    return str(done.exception)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("predict", "nowhere", "image.png"), "nowhere: there is no such model. Use a folder"),
        (("info", "nowhere"), "nowhere: there is no such model. Use a folder"),
        (("rename", "nowhere", "a", "b"), "nowhere: there is no such model. Use a folder"),
        (("info", "image.png"), "image.png: this is a file, and a model is a folder. Use"),
        (("evaluate", "empty", "empty"), "empty: there is no model in this folder. Use"),
        (("predict", "image.png", "model"), "image.png is no model, and model is one; name the"),
        (("evaluate", "empty", "model"), "empty is no model, and model is one; name the"),
        (("learn", "empty", "model"), "empty is no model, and model is one; name the"),
    ],
)
def test_missing_models_and_swapped_arguments(arguments: tuple[str, ...], problem: str) -> None:
    shown = message(*arguments)
    assert problem in shown
    assert "model.safetensors" not in shown


def test_a_missing_image_is_not_to_be_removed(here: Path) -> None:
    shown = message("predict", "model", "nowhere.png")
    assert "nowhere.png: there is no such file. Check the path." in shown
    assert "emove" not in shown
    with pytest.raises(MissingData, match="there is no such model"):
        ContinualClassifier.load(here / "nowhere")


@pytest.mark.usefixtures("here")
def test_misspelled_names_have_a_suggestion() -> None:
    wrong = NAMES[0][:-1] + NAMES[0][-1] * 2
    expected = f"Did you mean '{NAMES[0]}'?"
    assert expected in message("rename", "model", wrong, "x")
    assert expected in message("forget", "model", wrong, "--yes")
    assert expected in message("merge-classes", "model", wrong, NAMES[1], "--into", NAMES[1])
    with pytest.raises(NotLearned, match=expected.replace("?", r"\?")):
        ContinualClassifier.load("model").rename(wrong, "x")
    with pytest.raises(UnknownName, match="Did you mean 'ranpac'"):
        ContinualClassifier(method="rnapac").learn(*drawings([0], 2))


@pytest.mark.parametrize("refused", ["lock", "file"])
def test_read_only_folders_are_named_and_no_temporary_file(
    refused: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    classifier = ContinualClassifier.load(model)
    open_file, open_path = os.open, Path.open

    def deny(name: object) -> None:
        raise PermissionError(13, "Permission denied", str(name))

    def checked_open(name: object, flags: int, *args: int, **more: int) -> int:
        if str(name).startswith(str(model)) and flags & (os.O_WRONLY | os.O_RDWR):
            deny(name)
        return open_file(name, flags, *args, **more)  # type: ignore[arg-type]

    def checked_path_open(path: Path, mode: str = "r", *args: int, **more: int) -> object:
        if set(mode) & set("wx") and path.parent == model:
            deny(path)
        return open_path(path, mode, *args, **more)  # type: ignore[call-overload]

    if refused == "lock":
        monkeypatch.setattr(os, "open", checked_open)
    else:
        monkeypatch.setattr(Path, "open", checked_path_open)
    with pytest.raises(PermissionError) as failed:
        classifier.save(model)
    assert failed.value.filename == str(model)
    assert str(failed.value) == f"[Errno 13] Permission denied: '{model}'"


def test_quiet_edits_print_nothing(folder: Path, tmp_path: Path) -> None:
    for name in ("model", "other"):
        shutil.copytree(folder / "model", tmp_path / name)
    for command in (
        ("rename", "model", NAMES[0], "first"),
        ("undo", "model"),
        ("redo", "model"),
        ("merge", "model", "other", "--out", "both", "--count-twice"),
        ("forget", "model", NAMES[1], "--yes"),
    ):
        edited = coda(*command, "--quiet", cwd=tmp_path)
        assert edited.returncode == 0, edited.stderr
        assert not edited.stdout + edited.stderr


def test_bad_choices_are_named_without_words_of_a_library(tmp_path: Path) -> None:
    refused = coda("learn", "m", "images", "--method", "rnapac", cwd=tmp_path)
    assert refused.returncode == 2
    assert "'rnapac' is not one of 'auto', 'ranpac'" in " ".join(refused.stderr.split())
    assert "Value error" not in refused.stderr


def test_progress_does_not_go_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "LINE_INTERVAL", 0.0)
    with LearnerProgress() as progress:
        for stage in ("reading images", "training prompts"):
            for done in range(1, 10):
                progress.on_progress(Progress(stage, done, 10))
    lines = capsys.readouterr().err.splitlines()
    shares: dict[str, list[int]] = {}
    for line in lines:
        status, _, share = line.partition(" %")[0].rpartition(": ")
        shares.setdefault(status, []).append(int(share))
    assert list(shares) == ["reading images", "training prompts"]
    assert all(each == sorted(each) for each in shares.values())

"""The command line: processes, exit codes, info without torch, feedback, completion."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import small
import typer
from drawings import NAMES, drawings, taught
from PIL import Image
from typer.testing import CliRunner, Result

from coda_prompt import __version__, cli, shutdown
from coda_prompt.cli.completion import (
    complete_backbone,
    complete_class,
    complete_method,
    complete_preset,
)
from coda_prompt.encoder.catalog import CATALOG
from coda_prompt.errors import BadOption, CodaError, Interrupted, MissingData
from coda_prompt.learner import feedback
from coda_prompt.learner.feedback import LearnerProgress
from coda_prompt.learner.folder import ModelFolder
from coda_prompt.learner.results import Progress
from coda_prompt.research.bench.config import shipped
from coda_prompt.research.methods import METHODS
from coda_prompt.research.vit import catalog


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command") / "model"
    taught(range(2), method="ncm").save(folder)
    return folder


@pytest.fixture
def png(tmp_path: Path) -> Path:
    Image.fromarray(drawings([0], 1)[0][0]).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def coda(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def test_info_does_not_load_torch(model: Path) -> None:
    program = (
        "import sys; from coda_prompt.cli import app; from typer.testing import CliRunner; "
        f"done = CliRunner().invoke(app, ['info', {str(model)!r}, '--json']); "
        "print(done.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"]


def test_info_says_how_to_finish_a_lesson(model: Path, tmp_path: Path) -> None:
    ModelFolder(tmp_path).begin_lesson(ExitStack(), "images", 0)
    refused = coda("info", tmp_path)
    assert isinstance(refused.exception, MissingData)
    assert "first lesson was not finished" in str(refused.exception)
    assert "repeat the 'coda learn' command" in str(refused.exception)
    ModelFolder(model).begin_lesson(ExitStack(), "images", 1)
    assert "repeat the 'coda learn' command" in coda("info", model).output
    assert json.loads(coda("info", model, "--json").output)["unfinished_lesson"]
    ModelFolder(model).end_lesson()
    assert "not finished" not in coda("info", model).output


def test_an_interruption_names_the_command_that_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise Interrupted

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["coda", "learn", "model", "my photos"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Resume with: coda learn model 'my photos'" in capsys.readouterr().err


def test_quiet_prints_the_result_only(model: Path, png: Path) -> None:
    for verbosity in ([], ["--quiet"]):
        done = coda("predict", model, png, "--json", *verbosity)
        assert json.loads(done.stdout)[0]["best"] == NAMES[0]
        assert not done.stderr
    refused = coda("predict", model, png, "--quiet", "--verbose")
    assert isinstance(refused.exception, BadOption)


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feedback, "LINE_INTERVAL", 0.0)
    for quiet in (True, False):
        with LearnerProgress(quiet) as progress:
            for done in range(1, 4):
                progress.on_progress(Progress("reading images", done, 4))
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (0 if quiet else 3)
    assert lines[0].startswith("reading images: 25 %, about")


def test_classes_of_the_model_are_completed(model: Path, tmp_path: Path) -> None:
    group: Any = typer.main.get_command(cli.app)

    def completed(folder: Path, start: str) -> list[str]:
        context = typer.Context(group.commands["forget"])
        context.params = {"model": folder}
        return complete_class(context, start)

    assert completed(model, "") == list(NAMES[:2])
    assert completed(model, NAMES[1][:3]) == [NAMES[1]]
    assert completed(tmp_path, "") == []
    for command, parameter in (
        ("forget", "name"),
        ("rename", "old"),
        ("merge-classes", "names"),
        ("relabel", "taught_as"),
    ):
        (found,) = [each for each in group.commands[command].params if each.name == parameter]
        context = typer.Context(group.commands[command])
        context.params = {"model": model}
        assert [each.value for each in found.shell_complete(context, "")] == list(NAMES[:2])


def test_names_are_completed_without_torch() -> None:
    assert complete_preset("") == sorted(shipped("presets"))
    assert complete_method("") == sorted(METHODS)
    assert complete_method("coda") == [name for name in sorted(METHODS) if name.startswith("coda")]
    assert complete_backbone("") == sorted(["auto", *CATALOG])
    program = (
        "import sys; from coda_prompt.cli.completion import complete_method, complete_backbone, "
        "complete_preset; complete_method('c'), complete_backbone('v'), complete_preset('c'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_one_lesson_of_one_class_is_not_plural(tmp_path: Path) -> None:
    single = taught([0], method="ncm")
    assert "1 class in 1 lesson, ncm" in repr(single)
    single.save(tmp_path / "model")
    assert "1 class in 1 lesson, ncm" in coda("info", tmp_path / "model").stdout
    assert "1 class, learned in 1 lesson\n" in (tmp_path / "model" / "README.md").read_text()
    single.rename(NAMES[0], "zero")
    single.save(tmp_path / "model")
    assert "1 class in 1 lesson" in coda("undo", tmp_path / "model").stderr


def test_every_command_has_json() -> None:
    group: Any = typer.main.get_command(cli.app)
    without = [
        name
        for name, command in group.commands.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    ]
    assert without == []


def test_bench_takes_epochs() -> None:
    done = coda("bench", "pocket", "--methods", "coda-p", "--trials", 1, "--epochs", 3, "--dry-run")
    (run,) = json.loads(done.stdout)["runs"]
    assert run["training"]["epochs"] == 3


def test_errors_of_the_hub_are_ours_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    def unreachable(*_: object, **__: object) -> None:
        raise RuntimeError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "create_repo", unreachable)
    with pytest.raises(CodaError, match="could not be uploaded"):
        taught(range(2), method="ncm").push_to_hub("owner/name", token="x")


# -- processes


def test_version_is_printed() -> None:
    done = small.coda("--version")
    assert (done.returncode, done.stdout) == (0, f"coda-prompt {__version__}\n")


def test_help_does_not_load_torch() -> None:
    program = (
        "import sys; from coda_prompt.cli import app; from typer.testing import CliRunner; "
        "print(CliRunner().invoke(app, ['--help']).exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"]


def test_ctrl_c_before_any_work_ends_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "convert_checkpoint", interrupted)
    monkeypatch.setattr(sys, "argv", ["coda", "convert", "vit.pth", "vit.safetensors"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "coda: Interrupted.\n"


@pytest.mark.parametrize("following", [False, True])
def test_second_signal_exits_at_once_unless_a_parent_decides(
    following: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_parent = threading.Event()
    monkeypatch.setattr(shutdown, "_has_parent", has_parent)
    if following:
        has_parent.set()
    stop = shutdown.ShutdownFlag()
    with stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
        assert stop()
        if following:
            signal.raise_signal(signal.SIGINT)
        else:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_methods_as_json_lists_all_methods_with_options() -> None:
    done = small.coda("methods", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == list(METHODS)
    light = next(row for row in rows if row["name"] == "coda-p-s")
    defaults = {option["name"]: option["default"] for option in light["options"]}
    assert (defaults["components"], defaults["length"], defaults["query"]) == (20, 4, "final")
    assert all(option["meaning"] for row in rows for option in row["options"])


def test_backbones_are_listed_as_json() -> None:
    rows = json.loads(small.coda("backbones", "--json").stdout)["rows"]
    assert {"pocket", "vit-b16-in1k", "dinov2-s14-reg"} <= {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("methods", "codap"), "coda: There is no method 'codap'. Did you mean 'coda-p'?\n"),
        (("methods", "er"), "coda: There is no method 'er'. Did you mean 'er-5000'?\n"),
        (("learn", "", "photos"), "coda: Option 'model' of the command: its name is empty"),
        (("learn", "s3://bucket/model", "photos"), "s3://bucket/model is remote"),
        (("methods", "no.py:Mine"), "coda: 'no.py:Mine' cannot be used as a method"),
        (("metods",), "metods"),
    ],
)
def test_user_error_ends_in_one_message_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    done = small.coda(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr

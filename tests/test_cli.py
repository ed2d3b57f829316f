"""The command line as a process: exit codes, standard output and standard error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest
from forked import PATIENCE

from coda_prompt import __version__, cli, shutdown
from coda_prompt.methods import METHODS
from coda_prompt.model import catalog


def coda(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from coda_prompt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_version_is_printed() -> None:
    done = coda("--version")
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
    done = coda("methods", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == list(METHODS)
    small = next(row for row in rows if row["name"] == "coda-p-s")
    defaults = {option["name"]: option["default"] for option in small["options"]}
    assert (defaults["components"], defaults["length"], defaults["query"]) == (20, 4, "final")
    assert all(option["meaning"] for row in rows for option in row["options"])


def test_backbones_are_listed_as_json() -> None:
    rows = json.loads(coda("backbones", "--json").stdout)["rows"]
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
    done = coda(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr

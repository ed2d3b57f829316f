"""The session of docs/guide/your-own-images.md, run as written, and pipes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import PATIENCE
from small import coda

from coda_prompt import ContinualClassifier

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.posix  # the session runs in a shell, in a folder with a symbolic link
PAGE = (ROOT / "docs" / "guide" / "your-own-images.md").read_text("utf-8")
EXPORT = (ROOT / "docs" / "guide" / "export.md").read_text("utf-8")


def block(kind: str, containing: str) -> str:
    """The code block of this kind with these words in it."""
    found = [
        text
        for text in re.findall(rf"```{kind}\n(.*?)```", PAGE + EXPORT, re.S)
        if containing in text
    ]
    assert len(found) == 1
    return str(found[0])


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The page's session, run once; what each command printed."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "tools").symlink_to(ROOT / "tools")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = {}
    for number, line in enumerate(block("sh", "coda undo").strip().splitlines()):
        program, *arguments = shlex.split(line, comments=True)
        if program == "coda" and number > 1:  # the first one in the shell, like other programs
            finished = coda(*arguments, cwd=folder)
        else:
            finished = subprocess.run(
                line, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
                timeout=PATIENCE,
            )  # fmt: skip
        assert finished.returncode == 0, f"{line}: {finished.stderr}"
        printed[f"{number} {line}"] = finished.stdout + finished.stderr
    return folder, printed


def printed_by(session: tuple[Path, dict[str, str]], command: str) -> list[str]:
    return [text for line, text in session[1].items() if command in line]


def test_commands_of_the_documentation(session: tuple[Path, dict[str, str]]) -> None:
    first, second, third, again = printed_by(session, "coda learn")
    assert "new: " in first
    assert "checked classes: " in second
    assert "among all 30 classes" in third
    held_out = re.compile(r"on \d+ held-out images: .*")
    assert held_out.findall(third) == held_out.findall(again), "undone and learned again"
    assert "30 classes in 3 lessons" in printed_by(session, "coda info")[0]
    assert "now 20 classes in 2 lessons" in printed_by(session, "coda undo")[0]
    assert "anvil" in printed_by(session, "coda predict")[0]
    assert "Accuracy by lesson" in printed_by(session, "coda evaluate")[0]


def test_documented_accuracies_match_the_commands(
    session: tuple[Path, dict[str, str]],
) -> None:
    """Within a point, and among its own classes each task is within 7 points of when learned: then
    it was measured on held-out images, now on test images."""
    evaluated = printed_by(session, "coda evaluate")[0]
    share = r"([\d.]+) %"
    rows = re.findall(rf"│ \d .*?│\s+{share}\s+│\s+{share}\s+│\s+{share}\s+│", evaluated)
    documented = re.findall(rf"^\| \d \| {share} \| {share} \| {share} \|$", PAGE, re.M)
    assert len(rows) == len(documented) == 3
    for row, documented_row in zip(rows, documented, strict=True):
        _, own, when_learned = (float(value) for value in row)
        assert [float(value) for value in documented_row] == pytest.approx(
            [float(value) for value in row], abs=1.0
        )
        assert own >= when_learned - 7.0


def test_the_exported_graph_runs_without_torch_and_agrees(
    session: tuple[Path, dict[str, str]],
) -> None:
    folder = session[0]
    hidden = "import sys\nsys.modules['torch'] = sys.modules['coda_prompt'] = None\n"
    script = block("python", "from predict import Model")
    (folder / "use.py").write_text(hidden + script.replace('"photo.jpg"', "sys.argv[1]"))
    classifier = ContinualClassifier.load(folder / "my-model")
    for name in ("anvil", "cake", "dragon"):
        image = f"sketches/test/{name}/03.png"
        command = [sys.executable, "use.py", image]
        shown = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE
        )
        assert shown.returncode == 0, shown.stderr
        label, chance = shown.stdout.strip().rsplit(" ", 1)
        own = classifier.predict_proba([folder / image])[0]
        assert label == classifier.classes_[own.argmax()]
        assert float(chance) == pytest.approx(own.max(), abs=1e-3)


def test_predictions_through_pipes(session: tuple[Path, dict[str, str]]) -> None:
    folder = session[0]
    images = sorted(str(path) for path in (folder / "sketches/test/anvil").iterdir())[:3]
    listed = coda("predict", "my-model", "-", "--json", cwd=folder, input="\n".join(images))
    rows = json.loads(listed.stdout)
    assert [row["path"] for row in rows] == images
    for row in rows:
        assert row["label"] == row["top"][0]["label"]
        assert row["probability"] == row["top"][0]["probability"]
        assert len(row["top"]) == 5
        chances = [each["probability"] for each in row["top"]]
        assert chances == sorted(chances, reverse=True)
    as_csv = coda("predict", "my-model", *images, "--csv", "--unknown-below", "1", cwd=folder)
    lines = list(csv.DictReader(io.StringIO(as_csv.stdout)))
    assert [line["path"] for line in lines] == images
    assert {(line["label"], line["unknown"]) for line in lines} == {("", "true")}
    assert [line["best"] for line in lines] == [row["label"] for row in rows]
    expected = [row["probability"] for row in rows]
    np.testing.assert_allclose([float(line["probability"]) for line in lines], expected, atol=1e-5)


def test_results_as_json(session: tuple[Path, dict[str, str]]) -> None:
    folder = session[0]
    info = json.loads(coda("info", "my-model", "--json", cwd=folder).stdout)
    assert len(info["classes"]) == 30
    assert info["bytes"]["model.safetensors"] > 1000
    found: dict[str, Any] = json.loads(
        coda("evaluate", "my-model", "sketches/test", "--json", cwd=folder).stdout
    )
    assert found["images"] == 600
    assert len(found["tasks"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "nowhere", "a.png"), "Use a folder that 'coda learn' created"),
        (("predict", "my-model", "nowhere.png"), "no such file"),
        (("learn", "my-model", "sketches/task-1", "--method", "coda-p"), "was made with"),
        (("learn", "my-model", "sketches/task-1", "--backbone", "deit-tiny"), "was made with"),
        (("learn", "other", "sketches/task-1", "--method", "er-5000"), "is not one of"),
        (("learn", "other", "nowhere"), "no such folder"),
        (("evaluate", "my-model", "sketches"), "Name the folder with the classes"),
        (("undo", "sketches"), "Use a folder that 'coda learn' created"),
        (("export", "my-model", "no/such/folder/x.onnx"), "no such folder"),
    ],
)
def test_user_errors_print_one_message(
    arguments: tuple[str, ...], message: str, session: tuple[Path, dict[str, str]]
) -> None:
    finished = coda(*arguments, cwd=session[0])
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (session[0] / "other").exists()


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\nfrom coda_prompt.cli import main\nsys.argv = ['coda', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for verb in ("learn", "predict", "evaluate", "info", "undo", "export", "bench", "report"):
        assert verb in shown.stdout


@pytest.mark.parametrize("verb", ["learn", "predict", "evaluate", "info", "undo", "export",
                                  "bench", "sweep", "report", "methods", "backbones"])  # fmt: skip
def test_every_command_has_an_example(verb: str) -> None:
    shown = coda(verb, "--help")
    assert "Example" in shown.stdout
    assert f"coda {verb}" in shown.stdout
    assert "bool" not in shown.stdout, "flags take no value"

"""Models of strangers end in one message: what they name is neither opened nor allocated."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from drawings import NAMES, drawings, taught
from forging import Change, forge_folder
from forked import Forked
from PIL import Image
from small import CODA

MB = 2**20
PEAK = "import atexit, os; atexit.register(lambda: os.write(2, f'peak {peak()}'.encode())); "
MEASURED = (
    "import re; peak = lambda: re.search('VmHWM: *(.*) kB', open('/proc/self/status').read()"
    ".replace('\\t', ' '))[1]; "
)
pytestmark = pytest.mark.posix


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an image."""
    folder = tmp_path_factory.mktemp("whole")
    taught(range(2), [2], method="ncm").save(folder / "model")
    Image.fromarray(drawings([0], 1)[0][0]).save(folder / "image.png")
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str, int]:
    """Run a command; return its exit code, what it says and the most memory it has had."""
    finished = Forked(MEASURED + PEAK + CODA, *arguments, cwd=folder).completed()
    found = re.search(r"peak (\d+)$", finished.stderr)
    assert found, finished.stderr
    return finished.returncode, finished.stderr[: found.start()], int(found[1]) * 1024


@pytest.fixture(scope="module")
def peak(whole: Path) -> int:
    """The memory of a prediction by the intact model."""
    code, said, peak = run(whole, "predict", "model", "image.png")
    assert code == 0, said
    return peak


def backbone(**fields: Any) -> Change:
    return lambda description: description["backbone"].update(fields)


def fields(**changed: Any) -> Change:
    return lambda description: description.update(changed)


FORGED: dict[str, tuple[Change, dict[str, list[Any]] | None]] = {
    "size": (backbone(name="photo@14000"), None),
    "digits": (backbone(name="photo@" + "9" * 4000), None),
    "path": (backbone(path="/dev/zero"), None),
    "path as name": (backbone(name="/dev/zero"), None),
    "path behind a name": (backbone(name="pocket=/dev/zero"), None),
    "hub": (backbone(name="vit-b16-in1k"), None),
    "axis": (lambda description: None, {"unknown.sums": [0, 2**40]}),
    "strides": (lambda description: None, {"unknown.sums": [0, 2**31, 2**31, 2**31]}),
    "overflow": (lambda description: None, {"unknown.sums": [0, 2**63]}),
    "no images": (lambda description: None, {"classifier.bias": [0]}),
    "method": (fields(method="ranpac"), None),
    "head": (fields(method="coda-p"), None),
    "seed": (fields(options={"seed": 2**70}), None),
    "option": (fields(options={"width": 20_000}), None),
    "depth": (lambda d: {**d, "options": {"x": nested(150)}}, None),
}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_model_ends_in_one_message(
    name: str, whole: Path, peak: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "here")
    change, shapes = FORGED[name]
    forge_folder(folder / "model", change, shapes)
    code, said, most = run(folder, "predict", "model", "image.png")
    assert code == 2, said
    assert said.startswith("coda: ")
    assert "sha256" not in said, "the hash of a forged model is right"
    assert said.count("\n") == 1, said
    assert len(said) < 1000
    assert most - peak < 16 * MB


@pytest.mark.parametrize(
    "arguments", [("info", "model"), ("export", "model", "m.onnx"), ("merge", "model", "model")]
)
def test_every_command_refuses_a_forged_model(
    arguments: tuple[str, ...], whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "here")
    forge_folder(folder / "model", fields(pixels={}))
    out = ("--out", "joined") if arguments[0] == "merge" else ()
    code, said, _ = run(folder, *arguments, *out)
    assert (code, said.count("\n")) == (2, 1), said


@pytest.mark.parametrize(
    ("change", "edit"),
    [
        (fields(number=10**12), ("rename", "model", NAMES[0], "zero")),
        (
            lambda description: description["tasks"][0]["images"].update(
                dict.fromkeys(NAMES[:2], 10**12)
            ),
            ("merge-classes", "model", *NAMES[:2], "--into", "both"),
        ),
    ],
    ids=["number", "images"],
)
def test_no_command_writes_a_model_that_cannot_be_read(
    change: Change, edit: tuple[str, ...], whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "here")
    file = forge_folder(folder / "model", change) / "model.safetensors"
    before = file.read_bytes()
    code, said, _ = run(folder, *edit)
    assert (code, said.count("\n")) == (2, 1), said
    assert file.read_bytes() == before


def test_huge_files_in_a_model_folder_are_not_read(whole: Path, peak: int, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "here")
    for name in ("checks.json", "README.md"):
        with (folder / "model" / name).open("wb") as file:
            file.truncate(2**30)
    code, said, most = run(folder, "history", "model")
    assert code == 2
    assert "checks.json: it has more than" in said
    assert most - peak < 16 * MB
    (folder / "model" / "checks.json").unlink()
    code, said, most = run(folder, "rename", "model", NAMES[0], "zero")
    assert code == 0, said
    assert most - peak < 16 * MB

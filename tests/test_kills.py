"""A command that is killed before any of its file-system operations leaves a model of before or
after it, and can be repeated."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from drawings import NAMES, ContinualClassifier, drawings, taught
from forked import Forked
from serving import png
from small import CODA

KILLED = f"""
import os, signal, sys

def stop_before(number, folder):
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event == "open":
            paths = arguments[:1] if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR) else ()
        elif event in ("os.rename", "os.link", "os.symlink"):
            paths = arguments[:2]
        elif event in ("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"):
            paths = arguments[:1]
        else:
            return
        paths = [os.path.abspath(os.fsdecode(each)) for each in paths if not isinstance(each, int)]
        if any(each.startswith(folder + os.sep) for each in paths):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    import atexit
    atexit.register(lambda: print(f"operations: {{count}}", file=sys.stderr))

stop_before(int(os.environ["KILL_BEFORE"]), os.environ["KILL_FOLDER"])
{CODA}
"""
"""Runs the command; kills itself before an operation that changes a folder, counted from 1."""
FORGOTTEN = NAMES[0]
COMMANDS: dict[str, tuple[str, ...]] = {
    "learn": ("learn", "MODEL", "IMAGES", "--method", "ncm"),
    "forget": ("forget", "MODEL", FORGOTTEN, "--yes"),
    "rename": ("rename", "MODEL", NAMES[1], "one"),
    "merge": ("merge", "MODEL", "OTHER", "--out", "OUT"),
    "undo": ("undo", "MODEL"),
    "redo": ("redo", "MODEL"),
}
SAMPLE = 3
"""Operations of each command that are tried in every run of the tests."""

Content = tuple[dict[str, Any], bytes]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with earlier and undone versions, another model, and images of a new class."""
    root = tmp_path_factory.mktemp("start")
    classifier = taught([0, 1], [2], method="ncm")
    classifier.rename(NAMES[2], "two")
    classifier.learn(*drawings([3]))
    classifier.undo()
    classifier.save(root / "model")
    taught([5, 6], method="ncm").save(root / "other")
    for number, image in enumerate(drawings([8], 6)[0]):
        (root / "images" / NAMES[8]).mkdir(parents=True, exist_ok=True)
        (root / "images" / NAMES[8] / f"{number}.png").write_bytes(png(image))
    return root


def run(name: str, root: Path, kill_before: int = 0) -> tuple[int, str]:
    """Run a command on a copy of `start`; return its exit code and standard error."""
    paths = {each: str(root / each.lower()) for each in ("MODEL", "OTHER", "IMAGES", "OUT")}
    arguments = [paths.get(each, each) for each in COMMANDS[name]]
    environment = {**os.environ, "KILL_BEFORE": str(kill_before), "KILL_FOLDER": str(root)}
    done = Forked(KILLED, *arguments, environment=environment).completed()
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def content(path: Path) -> Content | None:
    """What a model file has except the dates of lessons and edits; None if there is no file."""
    if not path.exists():
        return None
    file = path.read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + length])
    description = json.loads(header.pop("__metadata__")["description"])
    del description["sha256"]
    for each in (*description["tasks"], *description["edits"]):
        del each["date"]
    return {**header, "description": description}, file[8 + length :]


def state(folder: Path) -> list[Content | None]:
    """The model of a folder and the versions that it can return to."""
    current = content(folder / "model.safetensors")
    if current is None:
        return [None]
    number, parent = (current[0]["description"][key] for key in ("number", "parent"))
    numbers = [int(path.stem) for path in sorted((folder / "versions").glob("[0-9]*.safetensors"))]
    visible = [
        each for each in numbers if each > number or (each < number and each <= (parent or each))
    ]
    stored = [content(folder / "versions" / f"{each:06}.safetensors") for each in visible]
    return [current, *stored]


def named(folder: Path) -> list[str]:
    """The files that have the name of the forgotten class."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.name for path in files if FORGOTTEN.encode() in path.read_bytes()]


def sweep(name: str, start: Path, tmp_path: Path, sample: int | None) -> None:
    target = "out" if name == "merge" else "model"
    whole = shutil.copytree(start, tmp_path / "whole")
    code, message = run(name, whole)
    assert code == 0, message
    count = int(message.rpartition("operations: ")[2])
    assert count > 5
    before, after = state(start / target), state(whole / target)
    assert before != after
    assert after[0] is not None
    assert name != "forget" or not named(whole)
    numbers = list(range(1, count + 1))
    if sample is not None:
        numbers = random.Random(name).sample(numbers, sample)
    for number in numbers:
        root = shutil.copytree(start, tmp_path / "root")
        code, _ = run(name, root, number)
        assert code == -9, number
        found = state(root / target)
        if name == "forget":  # earlier versions are rewritten first
            assert found[0] in (before[0], after[0]), number
            assert found[0] == before[0] or not named(root), number
        else:
            assert found in (before, after), number
        code, message = run(name, root)
        finished = found[0] == after[0] and name in ("forget", "rename", "merge")
        assert code == (2 if finished else 0), (number, message)
        assert state(root / target) == after, number
        if finished:  # which the command has told; whoever writes next finishes the rest
            ContinualClassifier.load(root / target).save(root / target)
            assert state(root / target) == after, number
        assert name != "forget" or not named(root), number
        assert {path.name for path in root.rglob(".*")} == {".lock"}, number
        described = json.loads((root / target / "config.json").read_text("utf-8"))
        assert described["classes"] == after[0][0]["description"]["classes"], number
        shutil.rmtree(root)


@pytest.mark.posix
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_the_model_before_or_after_it(
    name: str, start: Path, tmp_path: Path
) -> None:
    sweep(name, start, tmp_path, SAMPLE)


@pytest.mark.posix
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_at_any_operation_leaves_the_model_before_or_after_it(
    name: str, start: Path, tmp_path: Path
) -> None:
    sweep(name, start, tmp_path, None)

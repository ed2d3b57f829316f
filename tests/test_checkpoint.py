"""A learned method on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small import PLAIN_VIEWS, brief, patterns, tiny_vit

from coda_prompt import methods
from coda_prompt.data.stream import cut
from coda_prompt.errors import (
    CodaError,
    CorruptFile,
    HashMismatch,
    MissingData,
    UnfinishedTask,
    WrongBackbone,
)
from coda_prompt.files import write_atomically
from coda_prompt.training.checkpoint import load_method, save_method
from coda_prompt.training.engine import Engine
from coda_prompt.training.settings import Training


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    method = methods.make("coda-p", tiny_vit(), components_per_task=3)
    Engine(PLAIN_VIEWS, Training(epochs=1)).run(method, cut(patterns(4, 4), tasks=2))
    save_method(tmp_path / "model", method, tiny_vit())
    return tmp_path / "model"


def state_file(folder: Path) -> Path:
    return folder / json.loads((folder / "method.json").read_text())["file"]


def test_options_are_those_it_was_learned_with(saved: Path) -> None:
    loaded = load_method(saved, tiny_vit())
    assert loaded.config == methods.make("coda-p", tiny_vit(), components_per_task=3).config
    assert loaded.config != methods.make("coda-p", tiny_vit()).config


def test_another_backbone_is_refused_by_its_hash(saved: Path) -> None:
    with pytest.raises(WrongBackbone, match="Load it with the backbone it was learned on"):
        load_method(saved, tiny_vit(seed=1))


def test_one_flipped_bit_is_noticed(saved: Path) -> None:
    path = state_file(saved)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(HashMismatch):
        load_method(saved, tiny_vit())


def test_a_missing_file_is_named(saved: Path) -> None:
    state_file(saved).unlink()
    with pytest.raises(MissingData, match="state-"):
        load_method(saved, tiny_vit())
    with pytest.raises(MissingData, match="No such file"):
        load_method(saved / "nowhere", tiny_vit())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '{"format": 99}',
        '{"format": 1, "method": 3}',
        b"\xff\xfe".decode("latin1"),
        '{"format": 1, "method": "coda-p", "options": {}, "backbone": "", '
        '"file": "../../etc/passwd", "sha256": ""}',
    ],
)
def test_a_broken_description_is_refused(saved: Path, content: str) -> None:
    (saved / "method.json").write_text(content)
    with pytest.raises(CorruptFile):
        load_method(saved, tiny_vit())


def test_tensors_of_the_wrong_shape_are_refused(saved: Path) -> None:
    method = load_method(saved, tiny_vit())
    state = method.learned_state()
    for broken in (
        {"keys": state["keys"][:, :1]},
        {"components": state["components"][0]},
        {"head.weight": state["head.weight"][:, :5]},
        {"head.bias": state["head.bias"][:1]},
        {"task_sizes": torch.tensor([7])},
        {"task_sizes": torch.tensor([0.5])},
    ):
        with pytest.raises(CodaError):
            methods.make("coda-p", tiny_vit()).load_learned_state(state | broken)


def test_a_state_with_another_set_of_tensors_is_refused(saved: Path) -> None:
    state = load_method(saved, tiny_vit()).learned_state()
    fewer = {key: tensor for key, tensor in state.items() if key != "keys"}
    with pytest.raises(CorruptFile, match="keys"):
        methods.make("coda-p", tiny_vit()).load_learned_state(fewer)
    more = state | {"extra": torch.zeros(1)}
    with pytest.raises(CorruptFile, match="extra"):
        methods.make("coda-p", tiny_vit()).load_learned_state(more)


def test_a_method_in_the_middle_of_a_task_is_not_saved(tmp_path: Path) -> None:
    method = methods.make("coda-p", tiny_vit())
    method.begin_task(brief(method, new=2))
    with pytest.raises(UnfinishedTask, match="in the middle of a task"):
        save_method(str(tmp_path / "model"), method, tiny_vit())
    assert not (tmp_path / "model").exists()


def test_saving_again_leaves_one_state(saved: Path) -> None:
    method = load_method(saved, tiny_vit())
    with torch.no_grad():
        method.head.weight.add_(1)
    save_method(saved, method, tiny_vit())
    assert len(list(saved.glob("state-*"))) == 1
    assert sorted(path.name for path in saved.iterdir())[0] == "method.json"
    assert torch.equal(load_method(saved, tiny_vit()).head.weight, method.head.weight)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

"""Banks: rows that grow by task; learned states that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import PLAIN_VIEWS, patterns, tiny_vit
from torch import Tensor

from coda_prompt.errors import BadMethod, CodaError, CorruptFile
from coda_prompt.research import methods
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Training
from coda_prompt.storage.files import write_atomically


def test_open_rows_train_and_freeze_when_closed() -> None:
    bank = Bank((3,), groups=2)
    bank.open(torch.ones(2, 4, 3))
    assert [parameter.shape for parameter in bank.parameters()] == [(2, 4, 3)]
    assert len(bank) == 4
    bank.close()
    assert not list(bank.parameters())
    bank.open(torch.zeros(2, 1, 3))
    assert bank.rows.shape == (2, 5, 3)
    assert torch.equal(bank.rows[:, :4], torch.ones(2, 4, 3))
    assert bank.frozen.shape == (2, 4, 3)


def test_reopened_rows_replace_the_old_ones_when_closed() -> None:
    bank = Bank()
    bank.append(torch.tensor([1.0, 2.0, 3.0]))
    bank.reopen(torch.tensor([0, 2]))
    assert bank.trainable is not None
    bank.trainable.data += 10
    assert bank.frozen.tolist() == [1, 2, 3]
    assert bank.rows.tolist() == [11, 2, 13]
    bank.close()
    assert bank.frozen.tolist() == [11, 2, 13]
    bank.reopen()
    assert len(bank.frozen) == 0
    assert len(bank) == 3
    bank.close()
    assert bank.frozen.tolist() == [11, 2, 13]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 5, 4), torch.zeros(3, 5, 3), torch.zeros(5, 3), torch.zeros(2, 5, 3).long()],
)
def test_a_bank_refuses_a_tensor_that_does_not_fit(tensor: torch.Tensor) -> None:
    assert not Bank((3,), groups=2).resize(tensor)
    assert Bank((3,), groups=2).resize(torch.zeros(2, 7, 3))


def test_rows_that_start_as_older_ones_are_copies() -> None:
    bank = Bank((3,), groups=2)
    bank.append(torch.ones(2, 4, 3))
    bank.open(bank.frozen[:, -1:])
    assert bank.trainable is not None
    with torch.no_grad():
        bank.trainable.mul_(5)
    assert torch.equal(bank.frozen, torch.ones(2, 4, 3))


INCOMPLETE = """
from coda_prompt.research.methods import Method, PromptMethod

class Mine({base}):
    {member}
"""


@pytest.mark.parametrize(
    ("base", "member", "missing"),
    [
        ("Method", "pass", r"no method features\(self, images"),
        ("PromptMethod", "pass", r"no method prefixes\(self, queries"),
        ("PromptMethod", "fits = True; prefixes = lambda self, queries: {}", "no method fit"),
    ],
)
def test_a_method_that_lacks_a_member_gets_one_message(
    base: str, member: str, missing: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(INCOMPLETE.replace("{base}", base).replace("{member}", member))
    with pytest.raises(BadMethod, match=missing):
        methods.find(f"{path}:Mine")


def test_a_method_from_a_file_has_the_hash_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from coda_prompt.research.methods.l2p import L2P as Mine\n")
    entry = methods.find(f"{path}:Mine")
    assert entry.type is methods.METHODS["l2p++"].type
    assert entry.sha256 is not None
    assert len(entry.sha256) == 64
    assert methods.find("l2p++").sha256 is None


# -- learned states


@pytest.fixture
def state() -> dict[str, Tensor]:
    method = methods.make("coda-p", tiny_vit(), components_per_task=3)
    Engine(PLAIN_VIEWS, Training(epochs=1)).run(method, make_stream(patterns(4, 4), tasks=2))
    return method.learned_state()


def test_tensors_of_the_wrong_shape_are_refused(state: dict[str, Tensor]) -> None:
    for broken in (
        {"keys.frozen": state["keys.frozen"][:, :1]},
        {"components.frozen": state["components.frozen"][0]},
        {"head.weight.frozen": state["head.weight.frozen"][:, :5]},
        {"head.bias.frozen": state["head.bias.frozen"][:1]},
        {"task_sizes.frozen": torch.tensor([7])},
        {"task_sizes.frozen": torch.tensor([0.5])},
    ):
        with pytest.raises(CodaError):
            methods.make("coda-p", tiny_vit()).load_learned_state(state | broken)


def test_a_state_with_another_set_of_tensors_is_refused(state: dict[str, Tensor]) -> None:
    fewer = {key: tensor for key, tensor in state.items() if key != "keys.frozen"}
    with pytest.raises(CorruptFile, match=r"keys\.frozen"):
        methods.make("coda-p", tiny_vit()).load_learned_state(fewer)
    more = state | {"extra": torch.zeros(1)}
    with pytest.raises(CorruptFile, match="extra"):
        methods.make("coda-p", tiny_vit()).load_learned_state(more)


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

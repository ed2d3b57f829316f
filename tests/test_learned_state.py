"""Loading a learned state: what does not fit is refused; files are written atomically."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import PLAIN_VIEWS, patterns, tiny_vit
from torch import Tensor

from coda_prompt import methods
from coda_prompt.data.stream import make_stream
from coda_prompt.errors import CodaError, CorruptFile
from coda_prompt.storage.files import write_atomically
from coda_prompt.training.engine import Engine
from coda_prompt.training.settings import Training


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

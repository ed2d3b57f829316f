"""Closed forms learn from sums: in chunks, over processes, and without a table of all features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import PLAIN_VIEWS, brief, patterns, tiny_vit
from torch import Tensor

from coda_prompt.research import methods
from coda_prompt.research.methods.ridge import RidgeSums
from coda_prompt.research.methods.sums import Chunk, TaskSums
from coda_prompt.research.streams.stream import Samples, make_stream
from coda_prompt.research.training import chunks
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import Batch
from coda_prompt.research.training.settings import Training

SUMMED: dict[str, dict[str, Any]] = {
    "ncm": {},
    "slda": {},
    "ranpac": {"width": 24},
    "ranpac-balanced": {"width": 24, "balance": True, "ridge": "relative"},
    "deep-ranpac": {"width": 24},
    "token-ranpac": {"width": 24},
    "coda-p-ranpac": {"width": 24, "components": 4},
}


def learned(name: str, tasks: int = 2) -> dict[str, Tensor]:
    """Learn a stream in which images occur several times."""
    method = methods.make(name.removesuffix("-balanced"), tiny_vit(), **SUMMED[name])
    stream = make_stream(patterns(4, train=20), tasks=tasks)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8))
    for task in stream.tasks:
        train = task.train
        repeated = Samples.concat([train, train.subset(range(3)), train.subset(range(3))])
        engine.learn(method, replace(task, train=repeated))
    return method.learned_state()


def test_a_process_without_images_adds_nothing() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24)
    labels = torch.tensor([0, 0])
    method.begin_task(brief(method, 1))
    sums = method.task_sums(labels)
    assert isinstance(sums, RidgeSums)
    collected = chunks.Chunks(sums)
    empty = Batch(torch.zeros(0), labels[:0], [], None)
    collected.add(torch.zeros(0, method.vit_config.width), empty, 1)
    collected.flush()
    assert not sums.counts.any()


@pytest.mark.parametrize("name", SUMMED)
def test_chunks_of_any_size_give_the_same_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learned(name)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 16)
    for key, tensor in learned(name).items():
        torch.testing.assert_close(tensor, whole[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", [name for name in SUMMED if name != "coda-p-ranpac"])
def test_fit_receives_no_table_of_all_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_table(*_: object) -> None:
        raise AssertionError("a table of all features")

    monkeypatch.setattr(Engine, "_table", no_table)
    learned(name, tasks=1)


def test_sums_of_processes_add_up_to_those_of_one() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24)
    method.begin_task(brief(method, new=3))
    labels = torch.arange(30) % 3
    features = torch.randn(30, 32, generator=torch.Generator().manual_seed(0))
    parts: list[TaskSums] = []
    for rank in range(2):
        part = method.task_sums(labels)
        assert part is not None
        share = torch.arange(rank, 30, 2)
        part.add(Chunk(features[share], labels[share], share))
        parts.append(part)
    whole = method.task_sums(labels)
    assert whole is not None
    whole.add_all(features, labels)
    other = iter(whole.reduced)

    def reduce(tensor: Tensor, operation: str) -> Tensor:
        second = getattr(parts[1], next(other))
        return tensor + second if operation == "sum" else tensor.maximum(second)

    parts[0].reduce(reduce)
    for name in whole.reduced:
        torch.testing.assert_close(getattr(parts[0], name), getattr(whole, name), msg=name)


@pytest.mark.parametrize("name", ["ncm", "ranpac", "slda", "deep-ranpac", "coda-p-ranpac"])
def test_the_features_of_test_images_are_computed_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the accuracy matrix use them, and no image is read again."""
    method = methods.make(name, tiny_vit(), **SUMMED[name])
    stream = make_stream(patterns(6, train=8, test=5), tasks=3)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=4))
    test_images = {id(group.samples) for group in stream.groups}
    read: list[tuple[int, int]] = []
    image = Samples.image

    def count(self: Samples, position: int, min_side: int | None = None) -> Any:
        if id(self) in test_images:
            read.append((id(self), position))
        return image(self, position, min_side)

    monkeypatch.setattr(Samples, "image", count)
    result = engine.run(method, stream)
    assert len(read) == len(set(read)) == 6 * 5
    monkeypatch.setattr(Samples, "image", image)
    for number, group in enumerate(stream.groups):  # as a new engine finds without a cache
        exact = Engine(PLAIN_VIEWS).evaluate(method, group.samples, group.classes)
        assert exact[0] == result.matrix[-1, number]

"""Closed forms learn from sums: in chunks, over processes, and without a table of all features."""

from __future__ import annotations

from collections.abc import Callable
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
    "ranpac-blended": {"width": 24, "blend": True, "balance": True, "ridge": "relative"},
    "deep-ranpac": {"width": 24},
    "token-ranpac": {"width": 24},
    "token-ranpac-blended": {"width": 24, "blend": True, "balance": True, "ridge": "relative"},
    "coda-p-ranpac": {"width": 24, "components": 4},
}


def learned(name: str, tasks: int = 2) -> dict[str, Tensor]:
    """Learn a stream in which images occur several times."""
    method = methods.make(name.removesuffix("-blended"), tiny_vit(), **SUMMED[name])
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
    collected = chunks.Chunks(sums, lambda tensor: tensor)
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


def test_class_means_in_dominated_features_follow_from_the_sums() -> None:
    """The formula of the Gram matrix against features that are replaced one by one."""
    method = methods.make("ranpac", tiny_vit(), width=40, blend=True, ridge=1.0)
    method.begin_task(brief(method, new=3))
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    features = torch.randn(6, 32, generator=generator)
    features[1] = features[0]  # two copies of one image
    task_sums = method.task_sums(labels)
    assert task_sums is not None
    task_sums.add_all(features, labels)
    hidden = method.statistics.hidden(features)
    weight = hidden * hidden.norm(dim=1, keepdim=True)
    copies = torch.tensor([2, 2, 1, 1, 1, 1])[:, None]
    is_shared = (weight * copies).amax(dim=0) <= 0.5 * weight.sum(dim=0)
    assert 0 < int(is_shared.sum()) < 40
    means = torch.stack([hidden[labels == row].mean(dim=0) for row in range(3)])
    blended = torch.where(is_shared, hidden, means[labels])
    torch.testing.assert_close(task_sums.blended_gram(), blended.T @ blended)


class Copies(TaskSums):
    """Records how often each image has occurred."""

    counts_copies = True

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def add(self, chunk: Chunk) -> None:
        self.found |= dict(zip(chunk.positions.tolist(), chunk.copies.tolist(), strict=True))


def test_copies_are_counted_over_chunks_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last copy knows all of them, also those of another process."""
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 2)
    features = torch.arange(6.0)[:, None].expand(6, 4).clone()
    features[3] = features[5] = features[0]
    gathered: list[Tensor] = []

    def record(hashes: Tensor) -> Tensor:
        gathered.append(hashes)
        return hashes

    def add_all(recorder: Copies, gather: Callable[[Tensor], Tensor]) -> None:
        collected = chunks.Chunks(recorder, gather)
        for position in range(6):
            batch = Batch(torch.empty(1, 0), torch.tensor([0]), [position], None)
            collected.add(features[position : position + 1], batch, 1)
        collected.flush()

    alone, both = Copies(), Copies()
    add_all(alone, record)
    assert alone.found == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 3}
    assert [len(hashes) for hashes in gathered] == [2, 2, 2]
    others = iter(gathered)  # another process that has the same images
    add_all(both, lambda hashes: torch.cat([hashes, next(others)]))
    assert both.found == {position: 2 * count for position, count in alone.found.items()}


def test_sums_of_processes_add_up_to_those_of_one() -> None:
    method = methods.make("ranpac", tiny_vit(), width=24, blend=True)
    method.begin_task(brief(method, new=3))
    labels = torch.arange(30) % 3
    features = torch.randn(30, 32, generator=torch.Generator().manual_seed(0))
    parts: list[TaskSums] = []
    for rank in range(2):
        part = method.task_sums(labels)
        assert part is not None
        share = torch.arange(rank, 30, 2)
        part.add(Chunk(features[share], labels[share], share, torch.ones_like(share)))
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

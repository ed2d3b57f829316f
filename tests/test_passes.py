"""Passes that compute one batch on each core give the results of a pass that does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from small import PLAIN_VIEWS, patterns, tiny_vit
from torch import Tensor
from torch.testing import assert_close

from coda_prompt import methods
from coda_prompt.data.stream import make_stream
from coda_prompt.training import passes
from coda_prompt.training.passes import Passes
from coda_prompt.training.settings import Training


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_and_computed_on_one_core_each() -> None:
    cores = []

    def compute(number: int) -> Tensor:
        cores.append(torch.get_num_threads())
        time.sleep(0.01 if number % 2 else 0.0)
        return torch.tensor(number)

    results = list(passes._in_order(range(9), compute, 2))
    assert [(item, int(value)) for item, value in results] == [(item, item) for item in range(9)]
    assert cores == [1] * 9
    assert torch.get_num_threads() == 2


def test_at_most_one_batch_more_than_threads_waits() -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(9):
            read.append(number)
            yield number

    results = passes._in_order(items(), torch.tensor, 2)
    next(results)
    assert read == [0, 1, 2]
    results.close()
    assert torch.get_num_threads() == 2


def test_an_error_of_a_thread_is_raised() -> None:
    def compute(number: int) -> Tensor:
        raise ValueError(f"batch {number}")

    with pytest.raises(ValueError, match="batch 0"):
        list(passes._in_order(range(9), compute, 2))
    assert torch.get_num_threads() == 2


def test_a_long_pass_computes_the_rows_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_stream(patterns(2, train=4), tasks=1).tasks[0].train
    method = methods.make("ncm", tiny_vit())
    runner = Passes(PLAIN_VIEWS, Training(micro_batch=1))
    expected = runner.plain_tokens(method, samples)
    monkeypatch.setattr(passes, "PARALLEL_BATCHES", 1)
    used = []
    monkeypatch.setattr(
        passes, "_in_order", lambda *given, real=passes._in_order: used.append(1) or real(*given)
    )
    found = runner.plain_tokens(method, samples)
    assert used
    assert not any(each.requires_grad for each in found)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)

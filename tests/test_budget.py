"""Budgets: a task ends when its budget is spent, and an interrupted run ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import AUGMENTED_VIEWS, interrupted_repeatedly, patterns, quick_options, tiny_vit

from coda_prompt import methods
from coda_prompt.data.stream import Stream, make_stream
from coda_prompt.data.stream_options import Budget
from coda_prompt.errors import BadOption
from coda_prompt.methods import Method
from coda_prompt.training.budget import Meter, MultiplyAddCounter
from coda_prompt.training.checkpointing import Checkpointer
from coda_prompt.training.engine import Engine
from coda_prompt.training.settings import Event, Result, Training

STREAMS: dict[str, dict[str, Any]] = {
    "online": {"tasks": 2, "chunk": 10},
    "budgeted": {"tasks": 2, "budget": {"multiply_adds": 8e7}},
    "online and budgeted": {"tasks": 2, "chunk": 12, "budget": {"multiply_adds": 3e7}},
}


def made_stream(kind: str) -> Stream:
    return make_stream(patterns(6, 6, test=4), **STREAMS[kind])


def run(
    kind: str,
    name: str,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    **training: Any,
) -> tuple[Method, Result]:
    """Run or resume a stream, with a checkpoint after every step."""
    stream = made_stream(kind)
    method = methods.make(name, tiny_vit(), **quick_options(name))
    result = Result.empty(stream.test_images, len(stream.tasks))

    def notes() -> dict[str, Any]:
        saved = {"matrix": result.matrix.tolist(), "losses": result.losses, "spent": result.spent}
        copied: dict[str, Any] = json.loads(json.dumps(saved))
        return copied

    checkpointer = None
    if folder is not None:
        checkpointer = Checkpointer(folder, {}, interval=0, notes=notes)
        if checkpointer.latest is not None:
            saved = checkpointer.latest.notes
            result.matrix[:] = saved["matrix"]
            result.losses[:], result.spent[:] = saved["losses"], saved["spent"]
    stopping = False

    def ask_after_a_step(event: Event) -> None:
        nonlocal stopping
        stopping = stopping or (event.kind == "step" and stop())

    settings = Training(**{"epochs": 3, "batch_size": 8, "learning_rate": 1e-3} | training)
    engine = Engine(
        AUGMENTED_VIEWS, settings, on_event=ask_after_a_step, should_stop=lambda: stopping
    )
    return method, engine.run(method, stream, checkpointer=checkpointer, result=result)


@pytest.mark.parametrize(
    ("kind", "name", "queries"),
    [
        ("online and budgeted", "coda-p", "exact"),
        ("budgeted", "dualprompt", "cached"),
        pytest.param("online", "coda-p", "cached", marks=pytest.mark.slow),
        pytest.param("budgeted", "coda-p", "exact", marks=pytest.mark.slow),
        pytest.param("budgeted", "hide-prompt", "exact", marks=pytest.mark.slow),
        pytest.param("online and budgeted", "ft++", "exact", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_stream_ends_with_the_same_bits(
    kind: str, name: str, queries: str, tmp_path: Path
) -> None:
    expected, whole = run(kind, name, queries=queries)
    (found, result), interruptions = interrupted_repeatedly(
        lambda stop: run(kind, name, tmp_path, stop, queries=queries), first=5, attempts=40
    )
    assert interruptions > 0
    states = expected.learned_state(), found.learned_state()
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []
    assert np.array_equal(whole.matrix, result.matrix, equal_nan=True)
    assert whole.losses == result.losses
    assert whole.spent == result.spent


def test_a_task_ends_with_the_step_that_spends_its_budget() -> None:
    _, free = run("online", "coda-p")
    _, result = run("budgeted", "coda-p")
    assert len(free.losses[0]) == 3
    assert [len(losses) for losses in result.losses] == [2, 2], "the second epoch is cut off"
    step = 8e7 / 8  # less than a tenth more than the budget: one step at most
    assert all(8e7 <= spent < 8e7 + 3 * step for spent in result.spent)


def test_closed_forms_are_fitted_whatever_they_cost() -> None:
    method, result = run("budgeted", "ncm")
    assert method.classes_seen == 6
    assert all(spent > 0 for spent in result.spent)


def test_the_learning_rate_falls_to_the_end_of_the_budget() -> None:
    rates: list[float] = []
    stream = made_stream("budgeted")
    engine = Engine(
        AUGMENTED_VIEWS,
        Training(epochs=50, batch_size=8),
        on_event=lambda event: rates.append(event.learning_rate) if event.kind == "step" else None,
    )
    engine.run(methods.make("coda-p", tiny_vit()), stream)
    first_task = rates[: len(rates) // 2]
    assert first_task[0] == 1e-3
    assert first_task[-1] < 0.4e-3
    assert first_task == sorted(first_task, reverse=True)


def test_recurring_views_cannot_be_combined_with_a_budget() -> None:
    with pytest.raises(BadOption, match=r"leave out training\.views"):
        run("budgeted", "coda-p", views=2)


def test_a_meter_counts_products_forward_and_backward() -> None:
    weight = torch.ones(4, 5, requires_grad=True)
    with MultiplyAddCounter() as counter:
        product = torch.ones(3, 4) @ weight
        assert counter.count == 3 * 4 * 5
        product.sum().backward()
    assert counter.count == 2 * 3 * 4 * 5
    with MultiplyAddCounter() as counter:
        tokens = torch.ones(2, 1, 6, 8)
        torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
    assert counter.count == 2 * 2 * 6 * 6 * 8


def test_a_meter_continues_from_what_was_spent() -> None:
    with Meter(Budget(multiply_adds=100)) as meter:
        _ = torch.ones(2, 2) @ torch.ones(2, 2)
        meter.restore(50)
        _ = torch.ones(2, 2) @ torch.ones(2, 2)
        assert meter.spent == 58
    assert meter.spent == 58


def test_a_budget_of_seconds_ends_a_task() -> None:
    stream = make_stream(patterns(4, 8), tasks=2, budget={"seconds": 1e-6})
    method = methods.make("coda-p", tiny_vit())
    result = Engine(AUGMENTED_VIEWS, Training(epochs=9, batch_size=4)).run(method, stream)
    assert [len(losses) for losses in result.losses] == [1, 1], "one step each"

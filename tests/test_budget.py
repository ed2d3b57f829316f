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

from coda_prompt.research import methods
from coda_prompt.research.methods import Method
from coda_prompt.research.streams.stream import Stream, make_stream
from coda_prompt.research.training.checkpointing import Checkpointer
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Event, Result, Training

STREAMS: dict[str, dict[str, Any]] = {
    "online": {"tasks": 2, "chunk": 10},
    "budgeted": {"tasks": 2, "budget": 4},
    "online and budgeted": {"tasks": 2, "chunk": 12, "budget": 2},
}


def made_stream(kind: str, budget: int | None = None) -> Stream:
    fields = {"tasks": 2, "budget": budget} if kind == "whole" else STREAMS[kind]
    return make_stream(patterns(6, 6, test=4), **fields)


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
        saved = {"matrix": result.matrix.tolist(), "losses": result.losses}
        copied: dict[str, Any] = json.loads(json.dumps(saved))
        return copied

    checkpointer = None
    if folder is not None:
        checkpointer = Checkpointer(folder, {}, interval=0, notes=notes)
        if checkpointer.latest is not None:
            saved = checkpointer.latest.notes
            result.matrix[:] = saved["matrix"]
            result.losses[:] = saved["losses"]
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


def steps_of(name: str, budget: int | None, **training: Any) -> list[Event]:
    """Learn two tasks of 18 images in batches of 8; return the events of the steps."""
    events: list[Event] = []
    settings = Training(**{"epochs": 9, "batch_size": 8} | training)
    engine = Engine(AUGMENTED_VIEWS, settings, on_event=events.append)
    engine.run(methods.make(name, tiny_vit(), **quick_options(name)), made_stream("whole", budget))
    return [event for event in events if event.kind == "step"]


@pytest.mark.parametrize("budget", [1, 3, 4])
def test_a_task_ends_after_the_steps_of_its_budget(budget: int) -> None:
    steps = steps_of("coda-p", budget)
    assert [event.task for event in steps] == budget * [0] + budget * [1]
    assert steps[-1].epoch == (budget - 1) // 3


def test_a_budget_counts_the_steps_of_all_stages() -> None:
    steps = steps_of("hide-prompt", 8, epochs=2)
    assert [event.task for event in steps] == 8 * [0] + 8 * [1]
    assert {event.epochs for event in steps} == {1, 2}, "two stages of one and two epochs"


def test_a_budget_ends_training_with_recurring_views() -> None:
    assert len(steps_of("coda-p", 4, views=2)) == 8


def test_closed_forms_are_fitted_whatever_the_budget() -> None:
    method, _ = run("budgeted", "ncm")
    assert method.classes_seen == 6


def test_joint_training_has_the_budget_of_all_tasks() -> None:
    assert len(steps_of("upper-bound", 4)) == 8


def test_the_learning_rate_falls_to_the_end_of_the_budget() -> None:
    rates = [event.learning_rate for event in steps_of("coda-p", 4, epochs=50)]
    first_task = rates[:4]
    assert first_task[0] == 1e-3
    assert first_task[-1] < 0.4e-3
    assert first_task == sorted(first_task, reverse=True)

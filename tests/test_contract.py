"""One contract over every registered method."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import PLAIN_VIEWS, patterns, quick_method, reloaded, tiny_vit
from torch import Tensor, nn
from torch.testing import assert_close

from coda_prompt.research.methods import METHODS, Method, PromptMethod
from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.methods.coda_ranpac import CodaRanPAC
from coda_prompt.research.streams.stream import Samples, Task, make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Result, Training

EVERY = sorted(METHODS)
PROMPTED = [name for name in EVERY if issubclass(METHODS[name].type, PromptMethod | CodaRanPAC)]
ONE_AFTER_ANOTHER = [name for name in EVERY if METHODS[name].type.trains_on == "task"]
UNEVEN = [["0", "1", "2"], ["3", "4"], ["5", "6", "7", "8"]]


def engine(**options: Any) -> Engine:
    return Engine(PLAIN_VIEWS, Training(**{"epochs": 2, "batch_size": 16} | options))


def stream_of(class_lists: list[list[str]], train: int = 10) -> tuple[Task, ...]:
    return make_stream(patterns(classes=10, train=train), class_lists=class_lists).tasks


@pytest.mark.parametrize("name", EVERY)
def test_a_family_is_composed_not_inherited(name: str) -> None:
    ancestors = METHODS[name].type.__mro__[1:]
    assert ancestors.index(nn.Module) <= 5, [each.__name__ for each in ancestors]


@functools.cache
def learned(name: str) -> tuple[Method, Method, Method]:
    """Copies of a method after each of three uneven tasks; tests must not change them."""
    method = quick_method(name)
    tasks = stream_of(UNEVEN)
    driver = engine()
    copies = []
    for task in tasks:
        driver.learn(method, task, past=tasks[: task.index])
        copies.append(copy.deepcopy(method))
    first, second, third = copies
    return first, second, third


def seeded_run(name: str) -> tuple[Method, Result]:
    """A method after a stream of three uneven tasks, and its accuracies."""
    method = quick_method(name)
    stream = make_stream(patterns(classes=9, train=10), class_lists=UNEVEN)
    return method, engine(seed=3).run(method, stream)


first_seeded_run = functools.cache(seeded_run)


def some_images(count: int = 5, seed: int = 3) -> Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def frozen_parts(method: Method) -> dict[str, Tensor]:
    """What a prompt method must not change any more once a task is over."""
    kinds = {
        "CodaPrompt": ("components", "keys", "attention"),
        "DualPrompt": ("experts", "keys"),
        "OSPrompt": ("components", "keys"),
    }.get(type(method).__name__, ())
    parts = {kind: getattr(method, kind).frozen.clone() for kind in kinds}
    assert isinstance(method, PromptMethod | CodaRanPAC)
    head = {
        "head.weight": method.head.weight.frozen.clone(),
        "head.bias": method.head.bias.frozen.clone(),
    }
    return parts | head


@pytest.mark.parametrize("name", EVERY)
def test_a_stream_of_three_uneven_tasks(name: str) -> None:
    method, result = first_seeded_run(name)
    assert method.logits(some_images()).shape == (5, 9)
    measured = ~np.isnan(result.matrix)
    rows = [2] if METHODS[name].type.trains_on == "all" else [0, 1, 2]
    assert measured.tolist() == [[t in rows and j <= t for j in range(3)] for t in range(3)]
    assert np.nanmin(result.matrix) >= 0
    assert np.nanmax(result.matrix) <= 1
    assert (result.own_classes[measured] >= result.matrix[measured]).all()


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_logits_cover_exactly_the_classes_seen(name: str) -> None:
    for method, seen in zip(learned(name), [3, 5, 9], strict=True):
        assert method.logits(some_images()).shape == (5, seen)
        assert method.classes_seen == seen
    assert method.task_sizes.rows.tolist() == [3, 2, 4]


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_not_rounded_in_bfloat16(name: str) -> None:
    method, _ = first_seeded_run(name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert method.logits(some_images()).dtype == torch.float32


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_a_task_of_new_and_known_classes(name: str) -> None:
    first, second, _ = stream_of(UNEVEN)
    mixed = Task(
        1,
        (1, 3, 4),
        Samples.concat([first.train.subset(first.train.labels == 1), second.train]),
        second.test,
    )
    method = quick_method(name)
    driver = engine(weight_decay=0.1)
    driver.learn(method, first)
    before = method.learned_state()
    before = {key: tensor.clone() for key, tensor in before.items()}
    driver.learn(method, mixed, past=[first])
    assert method.logits(some_images()).shape == (5, 5)
    assert method.task_sizes.rows.tolist() == [3, 2]
    if (name in PROMPTED and not METHODS[name].type.fits) or name == "ft++":
        weight = method.learned_state()["head.weight.frozen"]
        changed = (weight[:3] != before["head.weight.frozen"]).any(dim=1)
        assert changed.tolist() == [False, True, False], "only the known class's row trains again"
    if name == "ncm":
        assert method.learned_state()["counts.frozen"].tolist() == [10, 20, 10, 10, 10]


@pytest.mark.parametrize("name", PROMPTED)
def test_frozen_rows_are_bit_identical_after_later_tasks_with_weight_decay(name: str) -> None:
    tasks = stream_of(UNEVEN)
    method = quick_method(name)
    backbone = method.backbone.fingerprint()
    driver = engine(weight_decay=0.1)
    driver.learn(method, tasks[0])
    before = frozen_parts(method)
    for task in tasks[1:]:
        driver.learn(method, task)
    after = frozen_parts(method)
    for part, value in before.items():
        axis = 0 if part.startswith("head") else 1
        assert torch.equal(after[part].narrow(axis, 0, value.shape[axis]), value), part
        assert after[part].shape[axis] > value.shape[axis]
    assert method.backbone.fingerprint() == backbone


@pytest.mark.parametrize("name", EVERY)
def test_a_prediction_does_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    method = learned(name)[-1]
    images = some_images(128)
    together = method.logits(images)[::8]
    alone = torch.cat([method.logits(image[None]) for image in images[::8]])
    assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_one_epoch_trains(name: str) -> None:
    method = quick_method(name)
    start = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    losses = engine(epochs=1).learn(method, stream_of(UNEVEN)[0])
    assert all(np.isfinite(losses))
    after = method.learned_state()
    assert any(not torch.equal(after[key], tensor) for key, tensor in start.items())


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
@pytest.mark.parametrize("first", [["0"], ["0", "1"]], ids=["first task", "later task"])
def test_a_task_of_one_class(name: str, first: list[str]) -> None:
    """Imprinted or in closed form it is recognised at once; else it trains to a finite loss."""
    tasks = stream_of([first, ["5"]])
    method = quick_method(name)
    driver = engine()
    losses = driver.learn(method, tasks[0])
    has_components = isinstance(method, CodaPrompt | CodaRanPAC)
    sizes = method.component_sizes.rows.tolist() if has_components else []
    losses += driver.learn(method, tasks[1], past=tasks[:1])
    assert all(np.isfinite(losses))
    assert method.logits(some_images()).isfinite().all()
    over_all, _ = driver.evaluate(method, tasks[1].test, [len(first)])
    if name in PROMPTED or METHODS[name].type.closed_form:
        assert over_all >= 0.8
    if has_components:
        assert method.component_sizes.rows.tolist() == [*sizes, 0], "untrained ones would disturb"


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_tasks_of_one_image_per_class_train(name: str) -> None:
    tasks = stream_of([["0", "1", "2"], ["3", "4"]], train=1)
    method = quick_method(name)
    driver = engine(epochs=1)
    for task in tasks:
        state = {key: tensor.clone() for key, tensor in method.learned_state().items()}
        losses = driver.learn(method, task, past=tasks[: task.index])
        assert all(np.isfinite(losses))
        assert METHODS[name].type.fits or len(losses) == 1
        after = method.learned_state()
        assert any(not torch.equal(after[key], state[key]) for key in after)
    if METHODS[name].type.fits and not hasattr(method, "aligned"):
        assert driver.evaluate(method, tasks[1].train, [3, 4])[0] == 1.0


@pytest.mark.parametrize("name", EVERY)
def test_a_loaded_method_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    method = learned(name)[-1]
    loaded = reloaded(method, tmp_path)
    assert torch.equal(loaded.logits(some_images()), method.logits(some_images()))
    assert loaded.task_sizes.rows.tolist() == [3, 2, 4]
    assert loaded.name == name


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("upper-bound",)])
def test_a_method_saved_between_tasks_continues_bit_identically(name: str, tmp_path: Path) -> None:
    _, after_two_tasks, after_three_tasks = learned(name)
    tasks = stream_of(UNEVEN)
    loaded = reloaded(after_two_tasks, tmp_path)
    engine().learn(loaded, tasks[2], past=tasks[:2])
    after, again = after_three_tasks.learned_state(), loaded.learned_state()
    assert after.keys() == again.keys()
    for key, tensor in after.items():
        assert torch.equal(tensor, again[key]), key


@pytest.mark.parametrize("name", PROMPTED)
def test_no_backbone_tensor_is_in_the_learned_state(name: str) -> None:
    saved = learned(name)[1].learned_state()
    assert not [key for key in saved if key.startswith(("backbone", "blocks", "network"))]
    weights = tiny_vit().state_dict().values()
    for key, tensor in saved.items():
        same = [w for w in weights if w.shape == tensor.shape and torch.equal(w, tensor)]
        assert not same, key


@pytest.mark.parametrize("name", EVERY)
def test_a_seeded_run_repeats_bit_for_bit(name: str) -> None:
    (method, result), (again, repeated) = first_seeded_run(name), seeded_run(name)
    assert np.array_equal(result.matrix, repeated.matrix, equal_nan=True)
    state, repeated_state = method.learned_state(), again.learned_state()
    assert state.keys() == repeated_state.keys()
    for key, tensor in state.items():
        assert torch.equal(tensor, repeated_state[key]), key

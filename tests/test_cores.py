"""Threads with cores of their own compute what one thread computes, in passes and in training."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_checkpointing
import torch
from distributed_run import two_tasks
from lightning_fabric import Fabric
from small import (
    AUGMENTED_VIEWS,
    PLAIN_VIEWS,
    TINY,
    brief,
    interrupted_repeatedly,
    patterns,
    quick_options,
    tiny_vit,
)
from test_checkpointing import assert_same, kept_run, whole_run
from test_distributed import check, one_process
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.errors import BadMethod, Interrupted, NonFiniteLoss
from coda_prompt.research import methods
from coda_prompt.research.methods import METHODS, Loss, Method, TrainingBatch
from coda_prompt.research.methods.coda import CodaConfig, CodaPrompt
from coda_prompt.research.methods.stages import ParameterGroup, Stage
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training import cores, gradients, passes
from coda_prompt.research.training.cores import Cores, images_per_part, parts_of
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.passes import Passes
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.vit import ViTConfig

PHOTO = ViTConfig(image_size=112, patch_size=14, width=384)
IN_PARTS = [
    name
    for name, entry in METHODS.items()
    if entry.type.loss_in_parts and entry.type.frozen_backbone
]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of each batch that was computed on several cores, if images are small."""
    used: list[int] = []
    monkeypatch.setattr(cores, "SMALL_IMAGE", 0)
    real = gradients.Gradients._on_cores

    def on_cores(self: Any, *given: Any) -> Tensor:
        used.append(given[-1])
        return real(self, *given)

    monkeypatch.setattr(gradients.Gradients, "_on_cores", on_cores)
    return used


# -- threads


def test_results_are_in_order_and_computed_on_one_core_each() -> None:
    threads = []

    def compute(number: int) -> int:
        threads.append(torch.get_num_threads())
        time.sleep(0.01 if number % 2 else 0.0)
        return number

    with Cores(2) as two:
        assert list(two.map(range(9), compute)) == [(number, number) for number in range(9)]
        assert torch.get_num_threads() == 2
    assert threads == [1] * 9
    assert torch.get_num_threads() == 2


def test_fewer_workers_than_cores_share_them() -> None:
    torch.set_num_threads(4)
    with Cores(2) as two:
        assert [used for _, used in two.map(range(4), lambda _: torch.get_num_threads())] == (
            [2] * 4
        )


def test_at_most_one_item_more_than_threads_waits() -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(9):
            read.append(number)
            yield number

    with Cores(2) as two:
        next(two.map(items(), torch.tensor))
        assert read == [0, 1, 2]


def test_an_error_of_a_thread_is_raised() -> None:
    def compute(number: int) -> Tensor:
        raise ValueError(f"batch {number}")

    with Cores(2) as two, pytest.raises(ValueError, match="batch 0"):
        list(two.map(range(9), compute))
    assert torch.get_num_threads() == 2


def test_a_long_pass_computes_the_rows_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_stream(patterns(2, train=4), tasks=1).tasks[0].train
    method = methods.make("ncm", tiny_vit())
    method.begin_task(brief(method, new=2))
    method.fit(torch.randn(2, 32), None, torch.arange(2))
    runner = Passes(PLAIN_VIEWS, Training(micro_batch=1))
    expected = runner.logits(method, samples)
    monkeypatch.setattr(passes, "PARALLEL_BATCHES", 1)
    used = []
    monkeypatch.setattr(Cores, "map", lambda *given, real=Cores.map: used.append(1) or real(*given))
    found = runner.logits(method, samples)
    assert used
    assert not found.requires_grad
    assert_close(found, expected)


# -- parts of a batch


@pytest.mark.parametrize(
    ("vit", "batch", "workers", "expected"),
    [
        (PHOTO, 7, 2, 7),  # too small to divide
        (PHOTO, 16, 2, 8),
        (PHOTO, 64, 2, 16),
        (PHOTO, 128, 2, 16),
        (PHOTO, 24, 2, 6),  # three parts of eight would leave a core idle
        (PHOTO, 128, 8, 16),
        (ViTConfig(), 16, 2, 4),  # ViT-B/16: less memory
        (ViTConfig(), 7, 2, 7),
        (ViTConfig(), 128, 2, 16),
        (TINY, 16, 2, 16),  # its operations are too short
    ],
)
def test_images_of_a_part(vit: ViTConfig, batch: int, workers: int, expected: int) -> None:
    assert images_per_part(batch, vit, workers) == expected


def test_every_worker_gets_as_many_parts() -> None:
    for batch in range(1, 140):
        for workers in (2, 3, 4):
            size = images_per_part(batch, PHOTO, workers)
            assert 1 <= size <= batch
            if parts_of(batch, PHOTO) == 1:
                assert size == batch
            else:
                assert -(-batch // size) <= -(-parts_of(batch, PHOTO) // workers) * workers


# -- training


@pytest.mark.parametrize("name", IN_PARTS)
def test_training_on_cores_equals_training_on_one(name: str, parts: list[int]) -> None:
    entry = METHODS[name]
    found = two_tasks(name, one_process("32-true"))
    assert set(parts) == {2}, "batches of 16 images"
    torch.set_num_threads(1)
    parts.clear()
    expected = two_tasks(name, one_process("32-true"))
    assert not parts
    if entry.type.fits:  # closed forms scale up rounding: compare what was trained
        expected = {key: value for key, value in expected.items() if "gradient" in key}
        found = {key: found[key] for key in expected}
    check(name, found, expected, "32-true")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_on_cores_has_the_same_bits_every_time(precision: str, parts: list[int]) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    first, second = (two_tasks("coda-p", fabric, batch_size=33) for _ in range(2))
    assert set(parts) == {4}
    for key, tensor in first.items():
        assert_close(second[key], tensor, rtol=0, atol=0, equal_nan=True, msg=key)


@pytest.mark.parametrize(
    "options", [{}, {"queries": "cached"}, {"views": 1}, {"views": 2, "micro_batch": 8}]
)
def test_training_on_two_cores_resumes_bit_identical(
    options: dict[str, Any],
    parts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    larger = make_stream(patterns(6, 17, test=4), tasks=3)
    monkeypatch.setattr(test_checkpointing, "stream", lambda: larger)
    options = {"batch_size": 16, "epochs": 3, **options}
    expected = whole_run.__wrapped__("coda-p", **options)
    assert set(parts) == (set() if "micro_batch" in options else {2})
    found, interruptions = interrupted_repeatedly(
        lambda stop: kept_run(tmp_path, "coda-p", stop, **options), first=1, attempts=30
    )
    assert interruptions > 0
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hide-prompt", {}),
        ("ft++", {}),
        ("coda-p", {"micro_batch": 8}),
        ("coda-p", {"recompute": True}),
        ("coda-p", {"batch_size": 4}),
    ],
)
def test_some_trainings_use_all_cores_for_every_batch(
    name: str, options: dict[str, Any], parts: list[int]
) -> None:
    training = {"epochs": 1, "batch_size": 16, **options}
    stream = make_stream(patterns(2, train=8), tasks=1)
    method = methods.make(name, tiny_vit(), **quick_options(name))
    Engine(PLAIN_VIEWS, Training(**training)).run(method, stream)
    assert not parts


class Wrong(CodaPrompt):
    """A method whose loss is wrong in one of two ways."""

    returns: Any = None

    def loss(self, batch: TrainingBatch) -> Loss:
        loss = super().loss(batch)
        return loss._replace(mean=loss.mean * torch.nan) if self.returns is None else self.returns


@pytest.mark.parametrize(("returns", "error"), [(None, NonFiniteLoss), (3, BadMethod)])
def test_an_error_on_a_core_leaves_the_method_as_it_was(
    returns: Any, error: type[Exception], parts: list[int]
) -> None:
    method: Method = Wrong(tiny_vit(), CodaConfig(components_per_task=3))
    method.returns = returns
    before = {key: value.clone() for key, value in method.learned_state().items()}
    task = make_stream(patterns(2, train=8), tasks=1).tasks[0]
    with pytest.raises(error):
        Engine(AUGMENTED_VIEWS, Training(epochs=1, batch_size=16)).learn(method, task)
    assert parts
    after = method.learned_state()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.get_num_threads() == 2


def test_weights_are_cast_once() -> None:
    """Threads would cast the weights of a layer at the same time, each in its own memory."""
    layer = tiny_vit().requires_grad_(False).blocks[0].attn.qkv
    with torch.autocast("cpu", torch.bfloat16):
        layer.weights("cpu")
        known = layer._cast
        layer(torch.randn(1, 17, TINY.width, requires_grad=True)).sum().backward()
    assert known is not None
    assert layer._cast is known


class Shared(CodaPrompt):
    """Two parameters that get the same gradient, and one that is frozen but in a group."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.a, self.b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.c = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def stages(self) -> list[Stage]:
        return [Stage(groups=[ParameterGroup([self.a, self.b, self.c])], optimizer="sgd")]

    def loss(self, batch: TrainingBatch) -> Loss:
        loss = super().loss(batch)
        return loss._replace(mean=(loss.mean.detach() - self.a - self.b).square())


def test_parameters_may_share_a_gradient_or_have_none(parts: list[int]) -> None:
    task = make_stream(patterns(2, train=8), tasks=1).tasks[0]
    learned = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        method = Shared(tiny_vit(), CodaConfig(components_per_task=3))
        settings = Training(epochs=1, batch_size=16, learning_rate=0.1)
        Engine(PLAIN_VIEWS, settings).learn(method, task)
        learned.append(torch.cat([method.a, method.b, method.c]).detach())
    assert parts == [2]
    assert learned[0][0] != 0
    assert_close(*learned)


def test_a_thread_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"), Cores(2):
        pass
    assert not started[0].is_alive()
    assert torch.get_num_threads() == 2


def test_only_views_that_recur_are_computed_again(
    parts: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped at the start of the last of four epochs: the second of two views recurs in it."""
    monkeypatch.setattr(
        test_checkpointing, "stream", lambda: make_stream(patterns(2, 16, test=4), tasks=1)
    )
    options = {"batch_size": 16, "epochs": 4, "views": 2}
    steps = itertools.count(1)
    with pytest.raises(Interrupted):
        kept_run(tmp_path, "coda-p", lambda: next(steps) == 6, **options)
    computed = []
    real = gradients.Gradients.cache_queries
    monkeypatch.setattr(
        gradients.Gradients, "cache_queries", lambda *given: computed.append(1) or real(*given)
    )
    kept_run(tmp_path, "coda-p", **options)
    assert len(computed) == 2, "the two batches of one epoch"

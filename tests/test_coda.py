"""CODA-P: how components start, grow, stay orthogonal, and what the switches do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from small import PLAIN_VIEWS, brief, patterns, tiny_vit
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.errors import BadOption
from coda_prompt.research import methods
from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.methods.frozen_cache import FrozenCache
from coda_prompt.research.methods.orthogonal import orthonormal_rows
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import batches
from coda_prompt.research.training.settings import Training


def coda(**options: Any) -> CodaPrompt:
    return methods.make("coda-p", tiny_vit(), **options)


def grow(method: CodaPrompt, tasks: int, disturb: float = 0.0, seed: int = 0) -> None:
    """Tasks of two classes; training would leave components off the orthonormal start."""
    for _ in range(tasks):
        method.begin_task(brief(method, new=2, seed=seed))
        for kind in method.prompt_banks:
            parameter = getattr(method, kind).trainable
            generator = torch.Generator().manual_seed(len(method.task_sizes))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + disturb * noise
        method.end_task()


def gram(rows: Tensor) -> Tensor:
    rows = rows.flatten(2)
    return rows @ rows.mT


@pytest.mark.parametrize(
    ("components", "tasks", "sizes"),
    [(100, 10, [10] * 10), (7, 3, [3, 2, 2]), (20, 6, [4, 4, 3, 3, 3, 3]), (5, 5, [1] * 5)],
)
def test_components_are_shared_out_and_none_is_unused(
    components: int, tasks: int, sizes: list[int]
) -> None:
    method = coda(components=components, tasks=tasks, length=4)
    grow(method, tasks)
    assert method.component_sizes.rows.tolist() == sizes
    assert method.components.frozen.shape == (5, components, 4, 32)


def test_open_ended_growth_adds_a_constant_number_per_task() -> None:
    method = coda(components_per_task=3, length=2)
    grow(method, 4)
    assert method.component_sizes.rows.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(("name", "each"), [("coda-p", 10), ("coda-p-s", 2)])
def test_open_ended_growth_is_that_of_ten_tasks(name: str, each: int) -> None:
    method = methods.make(name, tiny_vit())
    grow(method, 3)
    assert method.component_sizes.rows.tolist() == [each] * 3
    half = coda(components=50)
    grow(half, 1)
    assert half.component_sizes.rows.tolist() == [5]


def test_a_task_of_one_class_does_not_use_up_a_share() -> None:
    method = coda(components=8, tasks=3, length=2)
    grow(method, 1)
    mean = torch.ones(1, 32)
    method.begin_task(methods.TaskBrief(1, 0, (2,), torch.zeros(0, dtype=torch.int64), mean.clone))
    method.end_task()
    grow(method, 2)
    assert method.component_sizes.rows.tolist() == [3, 0, 3, 2]


def test_a_task_past_the_planned_number_is_learned_too() -> None:
    method = coda(components=4, tasks=2, components_per_task=5, preset="paper", length=2)
    grow(method, 3)
    assert method.component_sizes.rows.tolist() == [2, 2, 5]


@pytest.mark.parametrize("preset", ["paper", "release-2022"])
def test_all_components_start_orthonormal_together(preset: str) -> None:
    method = coda(components=9, tasks=4, preset=preset, length=4)
    grow(method, 4)
    for kind in method.prompt_banks:
        assert_close(
            gram(getattr(method, kind).frozen), torch.eye(9).expand(5, 9, 9), atol=1e-5, rtol=0
        )


def test_new_components_start_orthogonal_to_the_span_of_trained_ones() -> None:
    method = coda(components_per_task=4, length=4)
    grow(method, 2, disturb=0.3)
    before = {kind: getattr(method, kind).frozen for kind in method.prompt_banks}
    grow(method, 1)
    for kind, older in before.items():
        new = getattr(method, kind).frozen[:, older.shape[1] :]
        assert_close(gram(new), torch.eye(4).expand(5, 4, 4), atol=1e-5, rtol=0)
        overlap = new.flatten(2) @ older.flatten(2).mT
        assert overlap.abs().max() < 1e-5
        assert (gram(older) - torch.eye(8)).abs().max() > 0.1, "the older ones are not orthonormal"


def test_a_full_space_is_filled_with_random_unit_vectors() -> None:
    older = torch.eye(6)[None, :4]
    rows = orthonormal_rows(older, 5, torch.Generator().manual_seed(0))
    assert_close(rows.norm(dim=-1), torch.ones(1, 5))
    assert (rows[:, :2] @ older.mT).abs().max() < 1e-6


@pytest.mark.parametrize("preset", ["release-2023", "paper"])
def test_growth_beyond_the_width_continues_and_warns_once(
    preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = coda(components=80, tasks=4, preset=preset, length=2)
    with caplog.at_level(logging.WARNING):
        grow(method, 4)
    assert method.keys.frozen.shape == (5, 80, 32)
    assert_close(method.keys.frozen.norm(dim=-1), torch.ones(5, 80))
    assert len(caplog.records) == 1
    assert "40 components in 32 dimensions" in caplog.text


def test_the_same_seed_starts_the_same_components_and_another_does_not() -> None:
    first, second, other = coda(), coda(), coda()
    grow(first, 2)
    grow(second, 2)
    grow(other, 2, seed=1)
    assert torch.equal(first.components.frozen, second.components.frozen)
    assert not torch.equal(first.components.frozen, other.components.frozen)


@pytest.mark.parametrize("preset", ["paper", "release-2022", "release-2023"])
def test_the_penalty_of_each_preset(preset: str) -> None:
    """Four rows all equal to 3 e_1: every entry of B B^T is 9, so B B^T - I is known."""
    method = coda(components=4, tasks=1, preset=preset, length=2)
    method.begin_task(brief(method, new=2))
    with torch.no_grad():
        for kind in method.prompt_banks:
            parameter = getattr(method, kind).trainable
            parameter.zero_()
            parameter.flatten(2)[:, :, 0] = 3.0
    squares = 4 * 8.0**2 + 12 * 9.0**2
    wanted = {
        "paper": 0.1 * 15 * squares**0.5,
        "release-2022": 0.1 * 1e-6 * 15 * squares / 16,
        "release-2023": 0.0,
    }[preset]
    assert float(method.penalty().detach()) == pytest.approx(wanted, rel=1e-5)


def test_the_papers_penalty_is_smooth_where_training_starts() -> None:
    method = coda(components=4, tasks=2, preset="paper")
    method.begin_task(brief(method, new=2))
    method.penalty().backward()
    for kind in method.prompt_banks:
        gradient = getattr(method, kind).trainable.grad.flatten(2)
        assert gradient.norm(dim=(1, 2)).max() < 0.01, "rounding must not decide a direction"


def test_the_weight_of_the_penalty_is_an_option_of_its_own() -> None:
    method = coda(orthogonality_weight=2.0, components_per_task=3)
    method.begin_task(brief(method, new=2))
    with torch.no_grad():
        method.keys.trainable.mul_(2)
    # Keys of length 2: |2^2 - 1| = 3 on the diagonal, mean of squares 9 / 3, five blocks.
    assert float(method.penalty().detach()) == pytest.approx(2.0 * 5 * 3.0, rel=1e-4)


def test_without_freezing_older_components_keep_training() -> None:
    method = coda(freezing=False, components_per_task=3)
    grow(method, 1)
    method.begin_task(brief(method, new=2))
    assert method.components.trainable.shape[1] == 6
    assert method.components.frozen.shape[1] == 0
    method.end_task()
    assert method.components.frozen.shape[1] == 6


def test_without_attention_there_are_no_attention_vectors() -> None:
    method = coda(attention=False)
    grow(method, 2)
    assert len(method.attention) == 0
    assert len(method.keys) == 20


def test_without_orthogonality_components_start_uniform_and_unpenalised() -> None:
    method = coda(orthogonality=False, preset="paper", tasks=2, components=40)
    method.begin_task(brief(method, new=2))
    values = method.components.trainable.detach()
    assert 0 <= values.min() < 0.01 < 0.99 < values.max() < 1
    assert abs(float(values.mean()) - 0.5) < 0.01
    assert float(method.penalty()) == 0


@pytest.mark.parametrize("preset", ["paper", "release-2022"])
def test_a_preset_that_needs_the_number_of_tasks_says_so(preset: str) -> None:
    with pytest.raises(BadOption, match="needs the number of tasks"):
        coda(preset=preset)


def test_fewer_components_than_tasks_is_an_error() -> None:
    with pytest.raises(BadOption, match="at least one per task"):
        coda(components=4, tasks=5)


def test_the_small_variant_has_the_papers_sizes() -> None:
    small = methods.make("coda-p-s", tiny_vit())
    assert (small.config.components, small.config.length) == (20, 4)
    large = methods.make("coda-p", tiny_vit())
    assert (large.config.components, large.config.length) == (100, 8)


def test_products_of_frozen_components_are_cached_until_they_change() -> None:
    calls = []

    def doubled(tensor: Tensor) -> Tensor:
        calls.append(1)
        return 2 * tensor

    fold, tensor = FrozenCache(doubled), torch.ones(2)
    with torch.inference_mode():
        first = fold(tensor)
    assert fold(tensor) is first
    assert not first.is_inference(), "what testing asked for serves training too"
    tensor.add_(1)
    assert fold(tensor).tolist() == [4, 4]
    assert fold(tensor.clone()).tolist() == [4, 4]
    assert len(calls) == 3


def test_an_early_query_takes_no_second_pass_and_its_model_is_whole() -> None:
    method = methods.make("coda-p", tiny_vit(), query="early", blocks=(1, 2, 3), components=6)
    stream = make_stream(patterns(4, 6), tasks=2)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1))
    engine.run(method, stream)
    samples = stream.tasks[0].test
    passes: list[int] = []
    method.backbone.blocks[5].register_forward_hook(lambda *_: passes.append(1))
    (batch,) = batches(samples, PLAIN_VIEWS, [list(range(len(samples)))])
    images = batch.images
    assert_close(method.logits(images).double(), engine.logits(method, samples))
    assert len(passes) == 2, "one pass for each of the two"
    with pytest.raises(BadOption, match="block 0 is the same for every image"):
        methods.make("coda-p", tiny_vit(), query="early")

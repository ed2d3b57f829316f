"""Every method on every kind of stream, in miniature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import AUGMENTED_VIEWS, PLAIN_VIEWS, patterns, quick_options, tiny_vit

from coda_prompt.research import methods
from coda_prompt.research.methods import METHODS, Method
from coda_prompt.research.streams.stream import Stream, make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Result, Training
from coda_prompt.research.vit.vit import ViTConfig

MINIATURE = ViTConfig(
    image_size=16, patch_size=8, channels=1, width=16, depth=5, heads=2, mlp_width=16
)
KINDS: dict[str, dict[str, Any]] = {
    "class-incremental": {"tasks": 3},
    "base and increments": {"base_classes": 4, "classes_per_task": 1},
    "domain-incremental": {"domains_per_task": 1},
    "class-and-domain": {"classes_per_task": 3, "domains_per_task": 2},
    "few-shot": {"base_classes": 4, "classes_per_task": 2, "shots": 2},
    "online": {"tasks": 2, "chunk": 6},
    "blurry": {"tasks": 3, "blur": 0.5, "disjoint": 0.5, "random_sizes": True},
    "repeated": {"tasks": 3, "repeat": 0.5},
    "long-tailed": {"tasks": 2, "imbalance": 6},
    "long": {"classes_per_task": 1, "domains_per_task": 2},
    "budgeted": {"tasks": 3, "budget": 1},
}
EVERYTHING: dict[str, Any] = {
    "tasks": 2,
    "domains_per_task": 2,
    "blur": 0.5,
    "repeat": 0.5,
    "chunk": 12,
    "budget": 1,
}
"""All kinds in one stream: tasks without new classes, with few images, cut off by a budget."""


def made(name: str) -> Method:
    return methods.make(name, tiny_vit(config=MINIATURE), **quick_options(name))


def engine(**options: Any) -> Engine:
    views = AUGMENTED_VIEWS if "budget" in options.pop("fields", {}) else PLAIN_VIEWS
    return Engine(views, Training(**{"epochs": 1, "batch_size": 16} | options))


def run(name: str, fields: dict[str, Any]) -> tuple[Method, Stream, Result]:
    method = made(name)
    stream = make_stream(patterns(6, 6, test=3, domains=3), seed=1, **fields)
    return method, stream, engine(fields=fields).run(method, stream)


def check(name: str, fields: dict[str, Any]) -> None:
    method, stream, result = run(name, fields)
    assert method.classes_seen == 6
    assert result.matrix.shape == (len(stream.tasks), len(stream.groups))
    measured = result.matrix[~np.isnan(result.matrix)]
    assert ((measured >= 0) & (measured <= 1)).all()
    tested = [number for number, count in enumerate(stream.test_images) if count]
    assert not np.isnan(result.matrix[-1, tested]).any()
    over_all = np.average(result.matrix[-1, tested], weights=np.array(stream.test_images)[tested])
    assert result.anytime[-1] == pytest.approx(over_all)
    assert sum(result.domains.values()) / 3 == pytest.approx(over_all, abs=0.35)
    for value in method.learned_state().values():
        assert value.isfinite().all()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_stream_of_all_kinds_at_once(name: str) -> None:
    check(name, EVERYTHING)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_stream(kind: str) -> None:
    for name in ("coda-p", "ncm", "upper-bound"):
        check(name, KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_on_every_kind_of_stream(name: str, kind: str) -> None:
    check(name, KINDS[kind])


@pytest.mark.parametrize("name", ["coda-p", "dualprompt", "l2p++", "hide-prompt", "ranpac", "ncm"])
def test_answers_do_not_depend_on_order_or_batches(name: str) -> None:
    """Nothing at test time sees a task or a batch: shuffled and split images get their answers."""
    method, stream, _ = run(name, KINDS["blurry"])
    classes = range(method.classes_seen)
    for group in stream.groups:
        expected, expected_own = engine().correct(method, group.samples, classes)
        order = torch.randperm(len(group.samples), generator=torch.Generator().manual_seed(1))
        shuffled = group.samples.subset(order.numpy())
        for size in (1, 5):
            found, own = engine(batch_size=size).correct(method, shuffled, classes)
            assert found.tolist() == expected[order.numpy()].tolist()
            assert own.tolist() == expected_own[order.numpy()].tolist()


def test_a_group_is_measured_on_the_classes_seen_so_far() -> None:
    """Before the last chunk of a task, images of classes that did not arrive yet do not count."""
    method = made("ncm")
    stream = make_stream(patterns(6, 6, test=4), tasks=1, chunk=4, seed=2)
    first = engine().run(method, stream).matrix[0, 0]
    again = made("ncm")
    driver = engine()
    driver.learn(again, stream.tasks[0])
    (group,) = stream.groups
    seen = group.samples.subset(group.samples.labels < again.classes_seen)
    assert 0 < len(seen) < len(group.samples)
    assert first == driver.evaluate(again, seen, range(again.classes_seen))[0]


def test_a_domain_is_measured_before_it_is_learned() -> None:
    _, _, result = run("ncm", KINDS["domain-incremental"])
    assert not np.isnan(result.matrix).any()
    assert set(result.domains) == {"0", "1", "2"}

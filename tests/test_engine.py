"""The training loop: data, order, schedule, replay, non-finite losses, evaluation."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image
from small import (
    AUGMENTED_VIEWS,
    PLAIN_VIEWS,
    brief,
    patterns,
    quick_method,
    quick_options,
    tiny_vit,
)
from torch import Tensor

from coda_prompt.errors import (
    BadImage,
    BadOption,
    CodaError,
    EmptyTask,
    InvalidLabels,
    NonFiniteLoss,
    NotLearned,
    ProcessDied,
    UnfinishedTask,
    UnknownName,
)
from coda_prompt.images.labelled import MemorySplit
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research import methods
from coda_prompt.research.methods import Loss, Method, TrainingBatch
from coda_prompt.research.methods.base import cosines
from coda_prompt.research.methods.coda import component_weights
from coda_prompt.research.methods.options import make_config
from coda_prompt.research.methods.sums import TaskSums
from coda_prompt.research.streams.stream import Samples, Stream, Task, make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import Views
from coda_prompt.research.training.queries import QueryTable
from coda_prompt.research.training.schedule import learning_rate
from coda_prompt.research.training.settings import Event, Training
from coda_prompt.research.vit.vit import Images, StartedPass


def test_the_schedule_is_the_papers_cosine() -> None:
    rates = [learning_rate("cosine", 1e-3, epoch, 20) for epoch in range(20)]
    expected = [1e-3 * math.cos(99 * math.pi * epoch / (200 * 19)) for epoch in range(20)]
    assert rates == pytest.approx(expected)
    assert rates[0] == 1e-3
    assert 0 < rates[-1] < 2e-5


@pytest.mark.parametrize("schedule", ["cosine", "lagging-cosine"])
def test_one_epoch_trains_at_the_full_rate(schedule: Any) -> None:
    assert learning_rate(schedule, 0.5, 0, 1) == 0.5


class Watched:
    """A method whose every training batch is written down."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.labels: list[list[int]] = []
        self.images: list[Tensor] = []
        loss = method.loss

        def watched(batch: TrainingBatch) -> Loss:
            images = batch.images
            assert images is not None
            self.labels.append(batch.labels.tolist())
            seen = images.tokens if isinstance(images, StartedPass) else images
            self.images.append(seen.clone())
            return loss(batch)

        method.loss = watched  # type: ignore[method-assign]


def trained(
    name: str, views: Views = AUGMENTED_VIEWS, **training: Any
) -> tuple[Watched, list[Event]]:
    events: list[Event] = []
    watched = Watched(methods.make(name, tiny_vit()))
    settings = Training(**{"epochs": 2, "batch_size": 8} | training)
    engine = Engine(views, settings, on_event=events.append)
    engine.run(watched.method, make_stream(patterns(5, 5), tasks=2))
    return watched, events


def test_every_image_is_seen_once_an_epoch_and_the_last_small_batch_is_not_dropped() -> None:
    watched, _ = trained("coda-p")
    sizes = [len(labels) for labels in watched.labels]
    assert sizes == [8, 7, 8, 7, 8, 2, 8, 2]
    assert sorted(watched.labels[0] + watched.labels[1]) == [0] * 5 + [1] * 5 + [2] * 5
    assert sorted(watched.labels[4] + watched.labels[5]) == [3] * 5 + [4] * 5


def test_batches_are_reshuffled_every_epoch_and_equal_for_every_method() -> None:
    coda, _ = trained("coda-p", queries="cached")
    finetuned, _ = trained("ft++")
    assert coda.labels[:2] != coda.labels[2:4]
    assert coda.labels == finetuned.labels
    assert all(torch.equal(a, b) for a, b in zip(coda.images, finetuned.images, strict=True))


def test_every_epoch_augments_an_image_differently() -> None:
    watched, _ = trained("coda-p", batch_size=64)
    first, second = watched.images[:2]
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_loader_processes_do_not_change_what_is_learned() -> None:
    alone, _ = trained("coda-p")
    helped, _ = trained("coda-p", workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone.images, helped.images, strict=True))
    state, again = alone.method.learned_state(), helped.method.learned_state()
    assert all(torch.equal(tensor, again[key]) for key, tensor in state.items())


def test_events_report_progress() -> None:
    _, events = trained("coda-p")
    kinds = [event.kind for event in events]
    one_task = ["task", *["step", "step", "epoch"] * 2, "evaluation"]
    assert kinds == one_task * 2
    last = events[-1]
    assert (last.task, last.tasks, len(last.accuracies)) == (1, 2, 2)
    rates = [event.learning_rate for event in events if event.kind == "epoch"]
    assert rates == pytest.approx([1e-3, 1e-3 * math.cos(99 * math.pi / 200)] * 2)


def test_whole_networks_train_at_their_own_rate() -> None:
    _, events = trained("ft", epochs=1)
    assert {event.learning_rate for event in events if event.kind == "epoch"} == {1e-4}


def test_replay_shows_as_many_past_images_as_the_task_has() -> None:
    watched, _ = trained("er-5000", epochs=3, batch_size=1000, views=PLAIN_VIEWS)
    second_task = watched.labels[3:]
    assert len(second_task) == 3
    for labels in second_task:
        assert len(labels) == 20
        assert sum(label >= 3 for label in labels) == 10
    brightness = [sorted(image.mean().item() for image in batch) for batch in watched.images[3:]]
    assert brightness[0] != brightness[1], "drawn anew in every epoch"


def test_the_replay_buffer_is_balanced_and_bounded() -> None:
    method = methods.make("er-5000", tiny_vit(), buffer=7)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64))
    engine.run(method, make_stream(patterns(5, 6), tasks=2))
    counts = torch.bincount(method.buffer.frozen[:, 2], minlength=5)
    assert counts.tolist() == [2, 2, 1, 1, 1]
    tasks = method.buffer.frozen[:, 0]
    assert tasks.tolist() == [0 if row < 3 else 1 for row in method.buffer.frozen[:, 2].tolist()]


def test_lwf_distils_old_classes_from_the_network_before_the_task() -> None:
    method = methods.make("lwf-mc", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64))
    engine.learn(method, make_stream(patterns(4, 5), tasks=2).tasks[0])
    images = torch.rand(3, 1, 16, 16)
    before = method.logits(images).sigmoid()
    method.begin_task(brief(method, new=2))
    outputs = method.logits(images).sigmoid()
    found = method.loss(TrainingBatch(images, torch.tensor([2, 3, 2]), None))
    one_hot = torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    targets = torch.cat([before, one_hot], dim=1)
    terms = -(targets * outputs.log() + (1 - targets) * (1 - outputs).log())
    torch.testing.assert_close(found.mean, terms.sum(dim=1), rtol=1e-5, atol=1e-5)


def test_an_upper_bound_learns_everything_at_once() -> None:
    watched, _ = trained("upper-bound", epochs=1, batch_size=1000)
    assert sorted(set(watched.labels[0])) == [0, 1, 2, 3, 4]
    assert len(watched.labels) == 1


def break_fourth_loss(method: Method) -> Callable[[TrainingBatch], Loss]:
    """Let the fourth loss of a method be infinite; return its real loss."""
    loss, calls = method.loss, itertools.count(1)

    def breaks(batch: TrainingBatch) -> Loss:
        found = loss(batch)
        return found._replace(mean=found.mean * math.inf) if next(calls) == 4 else found

    method.loss = breaks  # type: ignore[method-assign]
    return loss


@pytest.mark.parametrize("name", ["coda-p", "l2p++", "dualprompt", "ft", "lwf-mc", "er-5000"])
def test_a_non_finite_loss_stops_and_keeps_the_last_good_state(name: str) -> None:
    first, second = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make(name, tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    loss = break_fourth_loss(method)
    where = "epoch 2, step 1" if name == "er-5000" else "epoch 2, step 2"  # replay: 3 steps
    with pytest.raises(NonFiniteLoss, match=f"task 2, {where}"):
        engine.learn(method, second, past=[first])
    after = method.learned_state()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())

    method.loss = loss  # type: ignore[method-assign]
    engine.learn(method, second, past=[first])
    assert method.task_sizes.rows.tolist() == [3, 2], "the task can be learned after all"


def test_a_non_finite_gradient_of_a_finite_loss_is_detected() -> None:
    (task,) = make_stream(patterns(3, 6), tasks=1).tasks
    method = methods.make("ft", tiny_vit())
    loss = method.loss

    def steep(batch: TrainingBatch) -> Loss:
        found = loss(batch)
        return found._replace(penalty=(found.mean.sum() * 0).sqrt())

    method.loss = steep  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="task 1, epoch 1, step 1"):
        Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64)).learn(method, task)
    assert method.classes_seen == 0
    assert all(bool(parameter.isfinite().all()) for parameter in method.parameters())


SYNCHRONISING = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        *itertools.product(("coda-p", "dualprompt", "l2p++"), ("exact", "cached")),
        ("ft++", "exact"),  # needs no queries
    ],
)
def test_the_host_waits_for_losses_once_in_ten_steps(
    name: str, queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            # The counters of an optimizer are tensors of the host on every device.
            calls += not sys._getframe(1).f_globals["__name__"].startswith("torch.optim")
            return real(*arguments, **options)

        return call

    def waits(steps: int) -> tuple[int, list[float]]:
        nonlocal calls
        (task,) = make_stream(patterns(4, steps), tasks=1).tasks
        method = methods.make(name, tiny_vit())
        engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=4, queries=queries))
        engine.wait_every = 10
        calls = 0
        losses = engine.learn(method, task)
        return calls, losses

    every_step = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=4, queries=queries))
    (task,) = make_stream(patterns(4, 20), tasks=1).tasks
    expected = every_step.learn(methods.make(name, tiny_vit()), task)
    for method in SYNCHRONISING:
        monkeypatch.setattr(torch.Tensor, method, counted(getattr(torch.Tensor, method)))
    (few, losses), (many, _) = waits(20), waits(40)
    assert losses == expected, "waiting less does not change the training"
    assert many - few == 2


def test_a_non_finite_loss_is_noticed_when_the_host_waits() -> None:
    (task,) = make_stream(patterns(4, 40), tasks=1).tasks
    method = methods.make("ft++", tiny_vit())
    break_fourth_loss(method)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8))
    engine.wait_every = 10
    with pytest.raises(NonFiniteLoss, match="task 1, epoch 1, step 10"):
        engine.learn(method, task)
    assert method.classes_seen == 0
    assert all(bool(parameter.isfinite().all()) for parameter in method.parameters())


def test_a_task_without_images_is_refused() -> None:
    (task,) = make_stream(patterns(3, 6), tasks=1).tasks
    empty = Task(0, (0, 1, 2), task.train.subset([]), task.test)
    with pytest.raises(EmptyTask, match="Task 1 has no training image"):
        Engine(PLAIN_VIEWS).learn(methods.make("coda-p", tiny_vit()), empty)


def test_a_class_without_training_images_keeps_its_row_and_counts_in_the_test() -> None:
    (task,) = make_stream(patterns(3, 6), tasks=1).tasks
    partial = Task(0, (0, 1, 2), task.train.subset(task.train.labels != 1), task.test, (1,))
    for name in ("coda-p", "ncm", "ranpac"):
        method = methods.make(name, tiny_vit())
        engine = Engine(PLAIN_VIEWS, Training(epochs=2))
        engine.learn(method, partial)
        assert method.logits(torch.rand(2, 1, 16, 16)).shape == (2, 3)
        accuracy, _ = engine.evaluate(method, task.test, [0, 1, 2])
        assert accuracy <= 2 / 3 + 1e-9 or name == "coda-p"


def test_more_images_of_one_known_class_train_its_row_alone() -> None:
    """The masked loss of one class is zero: its row is trained against all others."""
    first, _ = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make("coda-p", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=3, batch_size=8))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    again = Task(1, (1,), first.train.subset(first.train.labels == 1), first.test)
    engine.learn(method, again)
    after = method.learned_state()
    changed = (after["head.weight.frozen"] != before["head.weight.frozen"]).any(dim=1).tolist()
    assert changed == [False, True, False]
    assert torch.equal(after["components.frozen"], before["components.frozen"])
    assert after["task_sizes.frozen"].tolist() == [3, 0]


def test_imprinted_rows_are_the_mean_features_scaled_to_older_rows() -> None:
    first, second = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make("coda-p", tiny_vit(), head_init="imprint")
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, learning_rate=1e-30))
    engine.learn(method, first)
    images = torch.stack([plain_view(first.train, position) for position in range(18)])
    queries = method.queries(images)
    frozen = queries.view(3, 6, -1).mean(dim=1)
    cosines = torch.nn.functional.cosine_similarity(method.head.weight.frozen, frozen)
    torch.testing.assert_close(cosines, torch.ones(3))
    lengths = method.head.weight.frozen.norm(dim=1)
    torch.testing.assert_close(lengths, torch.full((3,), 3**-0.5))
    with torch.no_grad():
        method.head.weight.frozen.mul_(5)
    engine.learn(method, second)
    torch.testing.assert_close(method.head.weight.frozen.norm(dim=1), torch.full((5,), 5 * 3**-0.5))


def plain_view(samples: Samples, position: int) -> Tensor:
    pixels = np.asarray(samples.image(position), dtype=np.float32) / 255
    return torch.from_numpy((pixels - 0.5) / 0.5)[None]


def test_evaluation_counts_every_image_once_whatever_the_batch() -> None:
    stream = make_stream(patterns(4, 6, test=7), tasks=2)
    method = methods.make("ncm", tiny_vit())
    rows = []
    for batch_size in (1, 5, 1000):
        method = methods.make("ncm", tiny_vit())
        engine = Engine(PLAIN_VIEWS, Training(batch_size=batch_size))
        rows.append(engine.run(method, stream).matrix)
    logits = torch.cat(
        [
            method.logits(plain_view(stream.tasks[0].test, position)[None])
            for position in range(len(stream.tasks[0].test))
        ]
    )
    right = (logits.argmax(dim=1).numpy() == stream.tasks[0].test.labels).mean()
    for matrix in rows:
        assert matrix[1, 0] == pytest.approx(right)


def test_cached_queries_equal_exact_ones_without_augmentation() -> None:
    stream = make_stream(patterns(5, 6), tasks=2)
    states = []
    for queries in ("exact", "cached"):
        method = methods.make("coda-p", tiny_vit())
        training = Training(epochs=2, batch_size=8, queries=queries)
        Engine(PLAIN_VIEWS, training, fabric=double()).run(method, stream)
        states.append(method.learned_state())
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-9, atol=1e-11)


def test_no_gradient_reaches_the_backbone() -> None:
    watched, _ = trained("coda-p")
    backbone = watched.method.backbone
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_tasks_of_one_size_are_shuffled_differently() -> None:
    watched = Watched(methods.make("coda-p", tiny_vit()))
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=100))
    engine.run(watched.method, make_stream(patterns(4, 8), tasks=2))
    first, second = watched.labels
    assert first != [label - 2 for label in second]


def test_weight_decay_acts_on_what_trains() -> None:
    (task,) = make_stream(patterns(3, 6), tasks=1).tasks
    lengths = []
    for decay in (0.0, 10.0):
        method = methods.make("coda-p", tiny_vit())
        Engine(PLAIN_VIEWS, Training(epochs=3, weight_decay=decay)).learn(method, task)
        lengths.append(float(method.components.frozen.norm()))
    assert lengths[1] < 0.999 * lengths[0]


def test_accuracy_among_a_tasks_own_classes_leaves_other_classes_out() -> None:
    stream = make_stream(patterns(6, 8, test=8), tasks=2)
    method = methods.make("ft", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=5, learning_rate=1e-3, batch_size=8))
    result = engine.run(method, stream)
    test = stream.tasks[0].test
    images = torch.stack([plain_view(test, position) for position in range(len(test))])
    logits = method.logits(images)
    own = (logits[:, :3].argmax(dim=1).numpy() == test.labels).mean()
    assert result.own_classes[1, 0] == pytest.approx(own)
    assert result.matrix[1, 0] == pytest.approx((logits.argmax(1).numpy() == test.labels).mean())
    assert result.own_classes[1, 0] > result.matrix[1, 0], "it forgot, but not its own differences"


def test_skipped_evaluations_are_unknown_and_change_no_other_row() -> None:
    stream = make_stream(patterns(10, 4), tasks=5)
    found = []
    for every in (1, 2):
        engine = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=4))
        method = methods.make("coda-p", tiny_vit())
        found.append(engine.run(method, stream, measure_every=every))
    whole, some = (result.matrix for result in found)
    assert np.isnan(some[[0, 2]]).all()
    np.testing.assert_array_equal(some[[1, 3, 4]], whole[[1, 3, 4]])
    np.testing.assert_array_equal(found[1].own_classes[4], found[0].own_classes[4])


def double() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision="64-true")


def test_evaluation_runs_in_inference_mode_and_leaves_the_method_trainable() -> None:
    first, second = make_stream(patterns(4, 5), tasks=2).tasks
    method = methods.make("coda-p", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, queries="cached"), fabric=double())
    Engine(PLAIN_VIEWS, Training(epochs=1)).learn(method, first)
    modes, logits = [], method.logits

    def watched(images: Tensor, queries: Tensor | None = None) -> Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return logits(images, queries)

    method.logits = watched  # type: ignore[method-assign]
    engine.evaluate(method, second.train, [0, 1])
    assert modes
    assert all(modes)
    engine.learn(method, second)  # on the table of queries that testing asked for
    assert method.task_sizes.rows.tolist() == [2, 2]


def test_cached_queries_are_computed_once_for_each_image() -> None:
    stream = make_stream(patterns(4, 5, test=3), tasks=2)
    assert query_passes(stream, queries="cached") == 20 + 12


def query_passes(stream: Stream, **training: Any) -> int:
    """Images whose query was computed while a stream was learned in five epochs and tested."""
    method = methods.make("coda-p", tiny_vit())
    seen, queries = [], method.queries

    def counted(images: Images) -> Tensor:
        seen.append(len(images.tokens if isinstance(images, StartedPass) else images))
        return queries(images)

    method.queries = counted  # type: ignore[method-assign]
    engine = Engine(AUGMENTED_VIEWS, Training(epochs=5, **training))
    engine.run(method, stream)
    assert len(engine.queries.tables) == 2, "only the test images' are still needed"
    return sum(seen)


def test_queries_of_test_images_are_computed_once_and_of_training_views_as_they_come() -> None:
    stream = make_stream(patterns(4, 5, test=3), tasks=2)
    assert query_passes(stream) == 5 * 20 + 12
    assert query_passes(stream, views=2) == 2 * 20 + 12
    assert query_passes(stream, views=9) == 5 * 20 + 12


def test_a_finite_number_of_views_is_exact() -> None:
    """Remembered queries are those of the views: learning without remembering gives the same."""
    stream = make_stream(patterns(4, 6), tasks=2)
    states = []
    for remembers in (True, False):
        method = methods.make("coda-p", tiny_vit())
        engine = Engine(AUGMENTED_VIEWS, Training(epochs=4, batch_size=8, views=2))
        if not remembers:
            engine.queries._table = lambda *_: QueryTable(24, 32, torch.float32)  # type: ignore[method-assign]
        engine.run(method, stream)
        states.append(method.learned_state())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_recomputed_activations_give_the_same_step() -> None:
    stream = make_stream(patterns(4, 6), tasks=2)
    states = []
    for recompute in (False, True):
        method = methods.make("coda-p", tiny_vit())
        Engine(PLAIN_VIEWS, Training(epochs=2, recompute=recompute)).run(method, stream)
        assert method.backbone.recompute == recompute
        states.append(method.learned_state())
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-5, atol=1e-6)


def test_cached_queries_are_separate_for_each_backbone() -> None:
    stream = make_stream(patterns(4, 5), tasks=2)
    shared = Engine(PLAIN_VIEWS, Training(queries="cached"))
    for seed in (0, 1):
        exact = Engine(PLAIN_VIEWS, Training()).run(methods.make("ncm", tiny_vit(seed)), stream)
        cached = shared.run(methods.make("ncm", tiny_vit(seed)), stream)
        assert np.array_equal(exact.matrix, cached.matrix, equal_nan=True)


@pytest.mark.parametrize("error", [BadImage("a.png", "is truncated"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["coda-p", "dualprompt", "ft", "lwf-mc", "er-5000", "ranpac"])
def test_an_interrupted_task_leaves_the_method_unchanged(name: str, error: BaseException) -> None:
    first, second = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make(name, tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}

    class Broken:
        labels, domains = second.train.split.labels, None

        def __len__(self) -> int:
            return len(self.labels)

        def fingerprint(self) -> str:
            return ""

        def image(self, index: int, min_side: int | None = None) -> Any:
            if index == second.train.indices[-1]:
                raise error
            return second.train.split.image(index)

    broken = Samples(Broken(), second.train.indices, second.train.labels)
    with pytest.raises(type(error)):
        engine.learn(method, Task(1, second.classes, broken, second.test), past=[first])
    after = method.learned_state()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    engine.learn(method, second, past=[first])
    assert method.task_sizes.rows.tolist() == [3, 2]


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_mixed_precision_learns(name: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    options = {"preset": "paper", "tasks": 2} if name == "coda-p" else {}
    method = methods.make(name, tiny_vit(), **quick_options(name), **options)
    backbone = method.backbone.fingerprint() if method.frozen_backbone else None
    stream = make_stream(patterns(5, 6), tasks=2)
    result = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8), fabric=fabric).run(
        method, stream
    )
    assert all(np.isfinite(loss) for losses in result.losses for loss in losses)
    if method.frozen_backbone:
        assert method.backbone.fingerprint() == backbone
    assert method.logits(torch.rand(2, 1, 16, 16)).dtype == torch.float32


def test_mixed_precision_keeps_the_penalty_exact() -> None:
    method = methods.make("coda-p", tiny_vit(), preset="paper", tasks=2)
    method.begin_task(brief(method, new=2))
    exact = method.penalty()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(method.penalty(), exact)
        queries = torch.randn(4, 32)
        weights = component_weights(queries, method.keys.trainable, method.attention.trainable)
        similarity = cosines(queries, method.keys.trainable)
    exactly = component_weights(queries, method.keys.trainable, method.attention.trainable)
    assert torch.equal(weights, exactly)
    assert torch.equal(similarity, cosines(queries, method.keys.trainable))


def test_a_backbone_rounded_to_half_precision_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    with pytest.raises(BadOption, match="would round the backbone"):
        Engine(PLAIN_VIEWS, fabric=fabric)


def test_replay_without_past_tasks_is_refused() -> None:
    first, second = make_stream(patterns(4, 5), tasks=2).tasks
    method = methods.make("er-5000", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1))
    engine.learn(method, first)
    with pytest.raises(BadOption, match="give all 1 past tasks"):
        engine.learn(method, second)


def test_an_image_of_a_class_that_is_not_the_tasks_is_refused() -> None:
    (task,) = make_stream(patterns(3, 5), tasks=1).tasks
    with pytest.raises(
        InvalidLabels, match=r"images of rows \[2\] are not of its classes \(0, 1\)"
    ):
        Engine(PLAIN_VIEWS).learn(
            methods.make("coda-p", tiny_vit()), Task(0, (0, 1), task.train, task.test)
        )


def test_new_classes_of_a_stream_take_the_next_rows() -> None:
    stream = make_stream(patterns(4, 5), tasks=2)
    broken = replace(stream, tasks=stream.tasks[::-1])
    with pytest.raises(InvalidLabels, match=r"0 classes are known, new ones cannot be rows"):
        Engine(PLAIN_VIEWS).run(methods.make("coda-p", tiny_vit()), broken)


def test_testing_before_learning_is_refused() -> None:
    (task,) = make_stream(patterns(3, 5), tasks=1).tasks
    with pytest.raises(NotLearned, match="coda-p has not learned 0, 2"):
        Engine(PLAIN_VIEWS).evaluate(methods.make("coda-p", tiny_vit()), task.test, [0, 2])


def test_pixels_that_do_not_fit_the_backbone_are_refused() -> None:
    (task,) = make_stream(patterns(3, 5), tasks=1).tasks
    wrong = Views(Preprocessing(32, 3))
    with pytest.raises(BadOption, match="32 px x 3 channels do not fit"):
        Engine(wrong).learn(methods.make("coda-p", tiny_vit()), task)


def test_training_options_are_checked_like_any_others() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'epochs'"):
        make_config(Training, "the training", {"epoch": 3})
    with pytest.raises(BadOption, match="Option 'betas'"):
        make_config(Training, "the training", {"betas": (1.5, 2.0)})


def test_learning_inside_an_unfinished_task_is_refused_and_leaves_it_open() -> None:
    (task,) = make_stream(patterns(3, 5), tasks=1).tasks
    for name in sorted(methods.METHODS):
        method = methods.make(name, tiny_vit())
        method.begin_task(brief(method, new=2))
        with pytest.raises(UnfinishedTask, match="in the middle of a task"):
            Engine(PLAIN_VIEWS).learn(method, task)
        assert method.in_task
        assert method.task_sizes.rows.tolist() == [2]


@pytest.mark.parametrize(
    "name", [n for n, e in methods.METHODS.items() if e.type.trains_on == "task"]
)
def test_a_gap_in_the_rows_is_named_and_leaves_no_trace(name: str) -> None:
    tasks = make_stream(patterns(6, 5), tasks=3).tasks
    method = quick_method(name)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1))
    engine.learn(method, tasks[0])
    before = method.learned_state()
    with pytest.raises(InvalidLabels, match="2 classes are known"):
        engine.learn(method, tasks[2], past=tasks[:2])
    after = method.learned_state()
    assert after.keys() == before.keys()
    engine.learn(method, tasks[1], past=tasks[:1])
    assert method.task_sizes.rows.tolist() == [2, 2]


@pytest.mark.parametrize("name", ["coda-p", "l2p++", "dualprompt", "ft", "lwf-mc", "er-5000"])
def test_a_task_that_cannot_begin_leaves_no_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are made one after another; memory may run out at each of them."""
    first, second = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make(name, tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    attributes = set(vars(method))
    parameter, failures = torch.nn.Parameter, 0
    for failing in range(1, 8):
        made: list[int] = []

        def scarce(*arguments: Any, made: list[int] = made, failing: int = failing) -> Any:
            made.append(1)
            if len(made) == failing:
                raise MemoryError
            return parameter(*arguments)

        monkeypatch.setattr("coda_prompt.research.methods.bank.nn.Parameter", scarce)
        try:
            engine.learn(method, second, past=[first])
        except MemoryError:
            failures += 1
        else:
            break
        finally:
            monkeypatch.undo()
        after = method.learned_state()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        assert set(vars(method)) == attributes
        assert not method.trainable_parameters()
    assert failures >= 2
    assert method.task_sizes.rows.tolist() == [3, 2]


def test_buffers_changed_in_place_are_restored() -> None:
    first, second = make_stream(patterns(5, 6), tasks=2).tasks
    method = methods.make("ncm", tiny_vit())
    engine = Engine(PLAIN_VIEWS)
    engine.learn(method, first)
    sums = method.sums.frozen.clone()

    def add_sums(sums: TaskSums) -> None:
        method.sums.frozen.add_(1)
        raise KeyboardInterrupt

    method.add_sums = add_sums  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.learn(method, second)
    assert torch.equal(method.sums.frozen, sums)


def test_a_large_but_finite_gradient_is_not_taken_for_overflow() -> None:
    (task,) = make_stream(patterns(3, 6), tasks=1).tasks
    method = methods.make("coda-p", tiny_vit())
    loss = method.loss

    def large(batch: TrainingBatch) -> Loss:
        found = loss(batch)
        return found._replace(mean=found.mean * 1e21)

    method.loss = large  # type: ignore[method-assign]
    Engine(PLAIN_VIEWS, Training(epochs=1)).learn(method, task)
    assert method.classes_seen == 3


def test_a_stream_is_run_by_a_method_that_has_learned_nothing() -> None:
    stream = make_stream(patterns(4, 5), tasks=2)
    method = methods.make("ncm", tiny_vit())
    engine = Engine(PLAIN_VIEWS)
    engine.run(method, stream)
    with pytest.raises(BadOption, match="ncm has learned before"):
        engine.run(method, stream)


def test_the_loss_of_an_epoch_is_the_mean_over_its_images() -> None:
    events: list[Event] = []
    (task,) = make_stream(patterns(3, 3), tasks=1).tasks
    method = methods.make("coda-p", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=8), on_event=events.append)
    losses = engine.learn(method, task)
    steps = [event.loss for event in events if event.kind == "step"]
    assert losses == [pytest.approx((8 * steps[0] + 1 * steps[1]) / 9)]


# -- processes that read images


class Reads(MemorySplit):
    """Images that rank 0 can read; other ranks behave as requested."""

    def __init__(self, deed: str) -> None:
        super().__init__(np.zeros((8, 16, 16), np.uint8), np.zeros(8, np.int64))
        self.deed, self.parent = deed, os.getpid()

    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        if os.getpid() != self.parent and self.deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed == "refuse":
            raise BadImage("a.png", "it cannot be decoded")
        return super().image(index)


@pytest.mark.parametrize(
    ("deed", "workers", "kind", "words"),
    [
        pytest.param("die", 1, ProcessDied, "reads images died", marks=pytest.mark.posix),
        ("refuse", 1, CodaError, "a.png: it cannot be decoded"),
        ("refuse", 0, BadImage, "a.png: it cannot be decoded"),
    ],
)
def test_failure_of_a_loader_process_raises_a_readable_error(
    deed: str, workers: int, kind: type[CodaError], words: str
) -> None:
    samples = Samples(Reads(deed), np.arange(8), np.zeros(8, np.int64))
    method = methods.make("coda-p", tiny_vit())
    before = {name: tensor.clone() for name, tensor in method.learned_state().items()}
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=4, workers=workers))
    with pytest.raises(kind, match=words):
        engine.learn(method, Task(0, (0,), samples, samples))
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.learned_state().items())

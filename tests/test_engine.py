"""The training loop: data, order, schedule, replay, non-finite losses, evaluation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from small import AUGMENTED_VIEWS, PLAIN_VIEWS, brief, patterns, tiny_vit
from torch import Tensor

from coda_prompt import methods
from coda_prompt.data.stream import Samples, Task, cut
from coda_prompt.errors import EmptyTask, NonFiniteLoss
from coda_prompt.methods import Loss, Method
from coda_prompt.training.engine import Engine, Event, Training
from coda_prompt.training.schedule import learning_rate


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

        def watched(images: Tensor, labels: Tensor, queries: Tensor | None) -> Loss:
            self.labels.append(labels.tolist())
            self.images.append(images.clone())
            return loss(images, labels, queries)

        method.loss = watched  # type: ignore[method-assign]


def trained(name: str, stream_seed: int = 0, **training: Any) -> tuple[Watched, list[Event]]:
    events: list[Event] = []
    watched = Watched(methods.make(name, tiny_vit()))
    settings = Training(**{"epochs": 2, "batch_size": 8} | training)
    engine = Engine(AUGMENTED_VIEWS, settings, on_event=events.append)
    engine.run(watched.method, cut(patterns(5, 5), tasks=2, seed=stream_seed))
    return watched, events


def test_every_image_is_seen_once_an_epoch_and_the_last_small_batch_is_not_dropped() -> None:
    watched, _ = trained("coda-p")
    sizes = [len(labels) for labels in watched.labels]
    assert sizes == [8, 7, 8, 7, 8, 2, 8, 2]
    assert sorted(watched.labels[0] + watched.labels[1]) == [0] * 5 + [1] * 5 + [2] * 5
    assert sorted(watched.labels[4] + watched.labels[5]) == [3] * 5 + [4] * 5


def test_batches_are_shuffled_anew_in_every_epoch_and_the_same_for_every_method() -> None:
    coda, _ = trained("coda-p")
    finetuned, _ = trained("ft++")
    assert coda.labels[:2] != coda.labels[2:4]
    assert coda.labels == finetuned.labels
    assert all(torch.equal(a, b) for a, b in zip(coda.images, finetuned.images, strict=True))


def test_an_image_is_augmented_anew_in_every_epoch() -> None:
    watched, _ = trained("coda-p", batch_size=64)
    first, second = watched.images[:2]
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_loader_processes_do_not_change_what_is_learned() -> None:
    alone, _ = trained("coda-p")
    helped, _ = trained("coda-p", workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone.images, helped.images, strict=True))
    state, again = alone.method.learned_state(), helped.method.learned_state()
    assert all(torch.equal(tensor, again[key]) for key, tensor in state.items())


def test_progress_is_told_in_events() -> None:
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
    watched, _ = trained("er-5000", epochs=3, batch_size=1000)
    second_task = watched.labels[3:]
    assert len(second_task) == 3
    for labels in second_task:
        assert len(labels) == 20
        assert sum(label >= 3 for label in labels) == 10
    assert second_task[0] != second_task[1], "drawn anew in every epoch"


def test_the_replay_buffer_is_balanced_and_bounded() -> None:
    method = methods.make("er-5000", tiny_vit(), buffer=7)
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64))
    engine.run(method, cut(patterns(5, 6), tasks=2))
    counts = torch.bincount(method.buffer[:, 2], minlength=5)
    assert counts.tolist() == [2, 2, 1, 1, 1]
    tasks = method.buffer[:, 0]
    assert tasks.tolist() == [0 if row < 3 else 1 for row in method.buffer[:, 2].tolist()]


def test_lwf_holds_old_classes_by_the_outputs_of_the_network_before_the_task() -> None:
    method = methods.make("lwf-mc", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64))
    engine.learn(method, cut(patterns(4, 5), tasks=2).tasks[0])
    images = torch.rand(3, 1, 16, 16)
    before = method.logits(images).sigmoid()
    method.begin_task(brief(method, new=2))
    outputs = method.logits(images).sigmoid()
    found = method.loss(images, torch.tensor([2, 3, 2]), None)
    one_hot = torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    targets = torch.cat([before, one_hot], dim=1)
    terms = -(targets * outputs.log() + (1 - targets) * (1 - outputs).log())
    torch.testing.assert_close(found.mean, terms.sum(dim=1), rtol=1e-5, atol=1e-5)


def test_an_upper_bound_learns_everything_at_once() -> None:
    watched, _ = trained("upper-bound", epochs=1, batch_size=1000)
    assert sorted(set(watched.labels[0])) == [0, 1, 2, 3, 4]
    assert len(watched.labels) == 1


@pytest.mark.parametrize("name", ["coda-p", "l2p++", "dualprompt", "ft", "lwf-mc", "er-5000"])
def test_a_non_finite_loss_stops_and_keeps_the_last_good_state(name: str) -> None:
    first, second = cut(patterns(5, 6), tasks=2).tasks
    method = methods.make(name, tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    loss, calls = method.loss, []

    def breaks(images: Tensor, labels: Tensor, queries: Tensor | None) -> Loss:
        calls.append(len(labels))
        found = loss(images, labels, queries)
        return found._replace(mean=found.mean * math.inf) if len(calls) == 4 else found

    method.loss = breaks  # type: ignore[method-assign]
    where = "epoch 2, step 1" if name == "er-5000" else "epoch 2, step 2"  # replay: 3 steps
    with pytest.raises(NonFiniteLoss, match=f"task 2, {where}"):
        engine.learn(method, second, past=[first])
    after = method.learned_state()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())

    method.loss = loss  # type: ignore[method-assign]
    engine.learn(method, second, past=[first])
    assert method.task_sizes.tolist() == [3, 2], "the task can be learned after all"


def test_a_non_finite_gradient_is_noticed_though_its_loss_was_finite() -> None:
    (task,) = cut(patterns(3, 6), tasks=1).tasks
    method = methods.make("ft", tiny_vit())
    loss = method.loss

    def steep(images: Tensor, labels: Tensor, queries: Tensor | None) -> Loss:
        found = loss(images, labels, queries)
        return found._replace(penalty=(found.mean.sum() * 0).sqrt())

    method.loss = steep  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="task 1, epoch 1, step 1"):
        Engine(PLAIN_VIEWS, Training(epochs=1, batch_size=64)).learn(method, task)
    assert method.classes_seen == 0
    assert all(bool(parameter.isfinite().all()) for parameter in method.parameters())


def test_a_task_without_images_is_refused() -> None:
    (task,) = cut(patterns(3, 6), tasks=1).tasks
    empty = Task(0, (0, 1, 2), task.train.subset([]), task.test)
    with pytest.raises(EmptyTask, match="Task 1 has no training image"):
        Engine(PLAIN_VIEWS).learn(methods.make("coda-p", tiny_vit()), empty)


def test_a_class_without_training_images_keeps_its_row_and_counts_in_the_test() -> None:
    (task,) = cut(patterns(3, 6), tasks=1).tasks
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
    first, _ = cut(patterns(5, 6), tasks=2).tasks
    method = methods.make("coda-p", tiny_vit())
    engine = Engine(PLAIN_VIEWS, Training(epochs=3, batch_size=8))
    engine.learn(method, first)
    before = {key: tensor.clone() for key, tensor in method.learned_state().items()}
    again = Task(1, (1,), first.train.subset(first.train.labels == 1), first.test)
    engine.learn(method, again)
    after = method.learned_state()
    changed = (after["head.weight"] != before["head.weight"]).any(dim=1).tolist()
    assert changed == [False, True, False]
    assert torch.equal(after["components"], before["components"])
    assert after["task_sizes"].tolist() == [3, 0]


def test_imprinted_rows_are_the_mean_features_scaled_to_older_rows() -> None:
    first, second = cut(patterns(5, 6), tasks=2).tasks
    method = methods.make("coda-p", tiny_vit(), head_init="imprint")
    engine = Engine(PLAIN_VIEWS, Training(epochs=1, learning_rate=1e-30))
    engine.learn(method, first)
    images = torch.stack([plain_view(first.train, position) for position in range(18)])
    queries = method.queries(images)
    frozen = queries.view(3, 6, -1).mean(dim=1)
    cosines = torch.nn.functional.cosine_similarity(method.head.weight, frozen)
    torch.testing.assert_close(cosines, torch.ones(3))
    lengths = method.head.weight.norm(dim=1)
    torch.testing.assert_close(lengths, torch.full((3,), 3**-0.5))
    with torch.no_grad():
        method.head.weight.mul_(5)
    engine.learn(method, second)
    torch.testing.assert_close(method.head.weight.norm(dim=1), torch.full((5,), 5 * 3**-0.5))


def plain_view(samples: Samples, position: int) -> Tensor:
    pixels = np.asarray(samples.image(position), dtype=np.float32) / 255
    return torch.from_numpy((pixels - 0.5) / 0.5)[None]


def test_evaluation_counts_every_image_once_whatever_the_batch() -> None:
    stream = cut(patterns(4, 6, test=7), tasks=2)
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
    stream = cut(patterns(5, 6), tasks=2)
    states = []
    for queries in ("exact", "cached"):
        method = methods.make("coda-p", tiny_vit())
        Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8, queries=queries)).run(method, stream)
        states.append(method.learned_state())
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-4, atol=1e-5)


def test_no_gradient_reaches_the_backbone() -> None:
    watched, _ = trained("coda-p")
    backbone = watched.method.backbone
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())

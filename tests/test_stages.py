"""The contract beyond one stage: stages, their data and optimizers, hooks, and resuming in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import AUGMENTED_VIEWS, PLAIN_VIEWS, patterns, tiny_vit
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import Interrupted
from coda_prompt.research.methods import Loss, Stage, TaskBrief, TrainingBatch
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, TrainedMethod
from coda_prompt.research.methods.stages import ParameterGroup
from coda_prompt.research.streams.stream import Task, make_stream
from coda_prompt.research.training.checkpointing import Checkpointer
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.schedule import learning_rate
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.vit import BlockEdits, Images, LowRank, ViT


class LowRankWithAlignment(TrainedMethod):
    """Low-rank deltas on k and v in the first task, then the head aligned on class Gaussians.

    The input side of a delta comes from a statistics pass over the task (as InfLoRA), the head is
    restored after the alignment (as SLCA).
    """

    needs_queries = True
    fits = True
    prepares_on = "plain"
    restores = False

    def __init__(self, backbone: ViT, config: MethodConfig) -> None:
        super().__init__(backbone, config)
        width = backbone.config.width
        self.down = Bank((width,))
        self.up = Bank((width,))
        self.means, self.counts = Bank((width,)), Bank(dtype=torch.int64)
        self.register_buffer("backup", torch.zeros(0, width))
        self.log: list[Any] = []

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        new = self.classes_seen - len(self.means)
        self.means.append(torch.zeros(new, self.vit_config.width))
        self.counts.append([0] * new)
        self.first = brief.index == 0
        if self.first:
            self.up.open(torch.zeros(4, self.vit_config.width))

    def prepare(self, batches: Iterator[TrainingBatch]) -> None:
        second = torch.zeros(self.vit_config.width, self.vit_config.width)
        count = 0

        def tap(tokens: Tensor) -> None:
            nonlocal second
            second = second + tokens.flatten(0, 1).T @ tokens.flatten(0, 1)

        for batch in batches:
            assert not torch.is_grad_enabled()
            assert batch.images is not None
            self.backbone.features(batch.images, {1: BlockEdits(tap=tap)})
            count += len(batch.labels)
        self.log.append(("prepare", count))
        if self.first:
            self.down.append(torch.linalg.svd(second).U[:, :4].T)

    def edits(self) -> dict[int, BlockEdits]:
        if not len(self.down):
            return {}
        delta = LowRank(self.down.rows, self.up.rows.T)
        return {1: BlockEdits(deltas={"k": delta, "v": delta})}

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.backbone.features(images, self.edits())

    def stages(self) -> Sequence[Stage]:
        head = [self.head.weight.trainable, self.head.bias.trainable]
        opened = [parameter for parameter in head if parameter is not None]
        groups = [ParameterGroup(opened, factor=0.5)]
        if self.up.trainable is not None:
            groups.append(ParameterGroup([self.up.trainable], learning_rate=0.02, weight_decay=0.1))
        return [
            Stage("adapt", groups, optimizer="adamw", clip_norm=1.0, epochs=2),
            Stage(
                "probe",
                [ParameterGroup(opened)],
                optimizer="sgd",
                schedule="annealing",
                per_iteration=True,
                epochs=2,
                batch_size=4,
                data="features",
            ),
            Stage("align", [ParameterGroup(opened)], epochs=1, data="generated"),
        ]

    def generate(self, stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.arange(self.classes_seen).repeat(3)
        return torch.randn(len(labels), self.vit_config.width, generator=generator), labels

    def loss(self, batch: TrainingBatch) -> Loss:
        features = batch.features
        if features is None:
            assert batch.images is not None
            features = self.features(batch.images, batch.queries)
        self.log.append((batch.stage, len(batch.labels), batch.features is None))
        if batch.stage == "align":
            return Loss.of(F.cross_entropy(self.head(features), batch.labels, reduction="none"))
        return Loss.of(self.head.masked_loss(features, batch.labels))

    def end_stage(self, stage: Stage) -> None:
        self.log.append(("end", stage.name))
        if stage.name == "probe":
            self.backup = self.head.weight.rows.detach().clone()
        if stage.name == "align" and self.restores:
            assert self.head.weight.trainable is not None
            self.head.weight.trainable.data.copy_(self.backup[self.head.weight.reopened])

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        assert queries is not None
        self.log.append(("fit", features.shape, queries.shape))
        self.plain_differs = bool((features != queries).any())
        self.means.frozen = self.means.frozen.index_add(0, labels, features)
        self.counts.frozen = self.counts.frozen + torch.bincount(labels, minlength=len(self.counts))


class RestoresHead(LowRankWithAlignment):
    restores = True


def two_tasks() -> tuple[Task, ...]:
    return make_stream(patterns(5, 6), class_lists=[["0", "1", "2"], ["3", "4"]]).tasks


def made(kind: type[LowRankWithAlignment] = LowRankWithAlignment) -> LowRankWithAlignment:
    method = kind(tiny_vit(), MethodConfig())
    method.name = "mine"
    return method


def engine(**options: Any) -> Engine:
    return Engine(PLAIN_VIEWS, Training(batch_size=8, learning_rate=0.01), **options)


def test_stages_run_in_order_with_their_data_and_hooks() -> None:
    method, (first, second) = made(), two_tasks()
    losses = engine().learn(method, first)
    assert len(losses) == 2 + 2 + 1
    images = len(first.train)
    assert method.log[0] == ("prepare", images)
    steps = [entry for entry in method.log if entry[0] in ("adapt", "probe", "align")]
    assert [name for name, _, _ in steps] == ["adapt"] * 6 + ["probe"] * 10 + ["align"] * 2
    assert sum(count for name, count, _ in steps if name == "adapt") == 2 * images
    assert all(from_images == (name == "adapt") for name, _, from_images in steps)
    ends = [entry for entry in method.log if entry[0] in ("end", "fit")]
    assert ends == [
        ("end", "adapt"),
        ("end", "probe"),
        ("fit", (18, 32), (18, 32)),
        ("end", "align"),
    ]
    assert method.plain_differs, "the delta changed the features"
    assert method.counts.rows.tolist() == [6, 6, 6]
    up = method.up.rows.clone()
    engine().learn(method, second)
    assert torch.equal(method.up.rows, up), "deltas train in the first task only"
    assert len(method.down) == 4


def test_groups_train_only_in_their_stage() -> None:
    method, (first, _) = made(), two_tasks()
    snapshots: dict[str, Tensor] = {}
    end = method.end_stage

    def record(stage: Stage) -> None:
        snapshots[stage.name] = method.up.rows.detach().clone()
        end(stage)

    method.end_stage = record  # type: ignore[method-assign]
    engine().learn(method, first)
    assert snapshots["adapt"].abs().max() > 0
    assert torch.equal(snapshots["adapt"], snapshots["probe"])
    assert torch.equal(snapshots["adapt"], method.up.rows)


def test_a_hook_after_a_stage_restores_the_head() -> None:
    first, _ = two_tasks()
    plain, restoring = made(), made(RestoresHead)
    engine().learn(plain, first)
    engine().learn(restoring, first)
    assert torch.equal(restoring.head.weight.rows, restoring.backup)
    assert not torch.equal(plain.head.weight.rows, plain.backup)
    assert torch.equal(plain.backup, restoring.backup)


@pytest.mark.parametrize("stopped", range(1, 19, 2))
def test_a_stop_in_any_stage_resumes_bit_identical(stopped: int, tmp_path: Path) -> None:
    task = two_tasks()[0]
    whole = made()
    losses = engine().learn(whole, task)
    steps = 0

    def count(event: Any) -> None:
        nonlocal steps
        steps += event.kind == "step"

    def checkpointer() -> Checkpointer:
        return Checkpointer(tmp_path, "mine")

    stopping = engine(on_event=count, should_stop=lambda: steps >= stopped)
    with pytest.raises(Interrupted):
        stopping.learn(made(), task, checkpointer=checkpointer())
    resumed = made()
    before = steps
    assert engine(on_event=count).learn(resumed, task, checkpointer=checkpointer()) == losses
    assert steps == 18
    assert steps - before == 18 - stopped
    expected = whole.learned_state()
    for name, tensor in resumed.learned_state().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_stop_without_a_checkpointer_leaves_the_method_unchanged() -> None:
    method, (first, _) = made(), two_tasks()
    polls = iter([False] * 12)
    stopping = engine(should_stop=lambda: next(polls, True))
    with pytest.raises(Interrupted):
        stopping.learn(method, first)
    assert method.classes_seen == 0
    assert not method.in_task
    assert not method.trainable_parameters()


class NothingTrains(LowRankWithAlignment):
    prepares_on = "augmented"

    def stages(self) -> Sequence[Stage]:
        return []


def test_a_task_without_stages_is_legal() -> None:
    method, (first, _) = made(NothingTrains), two_tasks()
    driver = Engine(AUGMENTED_VIEWS, Training(batch_size=8))
    assert driver.learn(method, first) == []
    assert method.log == [("prepare", 18), ("fit", (18, 32), (18, 32))]


class Concludes(LowRankWithAlignment):
    concludes_on = "augmented"

    def conclude(self, batches: Iterator[TrainingBatch]) -> None:
        assert not torch.is_grad_enabled()
        seen = [batch.images for batch in batches if isinstance(batch.images, Tensor)]
        self.log.append(("conclude", sum(len(images) for images in seen)))
        self.images = torch.cat(seen)


class ConcludesPlain(Concludes):
    concludes_on = "plain"


def test_a_task_is_concluded_after_training_with_its_own_view_of_the_images() -> None:
    method, (first, _) = made(Concludes), two_tasks()
    driver = Engine(AUGMENTED_VIEWS, Training(batch_size=8))
    driver.learn(method, first)
    assert [entry[0] for entry in method.log[-2:]] == ["end", "conclude"]
    assert method.log[-1] == ("conclude", len(first.train))
    plain = made(ConcludesPlain)
    driver.learn(plain, first)
    assert not torch.equal(plain.images, method.images)


def test_optimizers_and_groups_are_those_of_the_stage() -> None:
    method = made()
    method.begin_task(TaskBrief(0, 0, (0, 1, 2), torch.zeros(0, dtype=torch.int64)))
    adapt, probe, align = method.stages()
    driver = engine()
    adamw = driver._optimizer(method, adapt, adapt.groups)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [group["lr"] for group in adamw.param_groups] == [0.005, 0.02]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.0, 0.1]
    still = driver._optimizer(method, replace(adapt, learning_rate=0.0), adapt.groups)
    assert [group["lr"] for group in still.param_groups] == [0.0, 0.02], "0.0 is a rate"
    sgd = driver._optimizer(method, probe, probe.groups)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["momentum"] == 0.9
    assert type(driver._optimizer(method, align, align.groups)) is torch.optim.Adam


def test_clipping_bounds_the_gradient() -> None:
    norms: list[float] = []

    class Clipped(LowRankWithAlignment):
        def stages(self) -> Sequence[Stage]:
            return [Stage("adapt", optimizer="sgd", momentum=0.0, clip_norm=1e-3, epochs=1)]

    method, (first, _) = made(Clipped), two_tasks()
    starts: list[list[Tensor]] = []

    def record(event: Any) -> None:
        values = [parameter.detach().clone() for parameter in method.trainable_parameters()]
        if starts:
            moved = torch.cat([(a - b).flatten() for a, b in zip(values, starts[-1], strict=True)])
            norms.append(float(moved.norm()) / 0.01)
        starts.append(values)

    engine(on_event=lambda event: record(event) if event.kind == "step" else None).learn(
        method, first
    )
    assert norms
    assert max(norms) <= 1e-3 * 1.01


def test_annealing_is_half_a_cosine_wave_per_iteration() -> None:
    rates = [learning_rate("annealing", 1.0, step / 4, 2, 0.1) for step in range(9)]
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.55)
    assert rates[8] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)
    assert learning_rate("constant", 0.3, 7, 9) == 0.3
    dropped = [learning_rate("drop", 1.0, epoch, 5, 0.1, 0.6) for epoch in range(5)]
    assert dropped == [1, 1, 1, 0.1, 0.1]

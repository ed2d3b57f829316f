"""SD-LoRA and InfLoRA: loops written from the equations, merging, and what stays fixed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from naive import naive_features, random_vit
from small import PLAIN_VIEWS, brief, patterns, tiny_vit
from torch import Tensor
from torch.testing import assert_close

from coda_prompt.errors import BadOption
from coda_prompt.research import methods
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.inflora import InfLoRA, directions_to_protect
from coda_prompt.research.methods.lowrank import LowRankMethod
from coda_prompt.research.methods.sdlora import SMOOTHING, SDLoRA
from coda_prompt.research.streams.stream import make_stream
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.vit import ViT, ViTConfig

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
VIT = ViTConfig(image_size=8, patch_size=4, width=16, depth=3, heads=2, mlp_width=24)
SIZES = (3, 2, 4)


@pytest.fixture
def vit() -> ViT:
    return random_vit(VIT)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def made(name: str, vit: ViT, **options: object) -> LowRankMethod:
    method = methods.make(name, vit, **{"rank": 3, **options})
    assert isinstance(method, LowRankMethod)
    return method


def batches(images: Tensor) -> Iterator[TrainingBatch]:
    for part in images.split(3):
        yield TrainingBatch(part, torch.zeros(len(part), dtype=torch.int64))


def begin(method: LowRankMethod, images: Tensor, new: int = 2) -> None:
    method.begin_task(brief(method, new=new))
    with torch.no_grad():
        method.prepare(batches(images))


def scatter(method: LowRankMethod) -> None:
    """Move all parameters somewhere random."""
    generator = torch.Generator().manual_seed(len(method.task_sizes))
    for parameter in method.trainable_parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def learn(method: LowRankMethod, images: Tensor, tasks: int) -> None:
    for task in range(tasks):
        begin(method, images + task, SIZES[task])
        scatter(method)
        with torch.no_grad():
            method.conclude(batches(images + task))
        method.end_task()


def sdlora_changes(method: SDLoRA) -> dict[tuple[int, str], Tensor]:
    """dW = sum_i alpha_i B_i A_i / (|B_i| |A_i|), one rank-one matrix at a time."""
    changes = {}
    for target in ("q", "v"):
        down, up = method.directions.factors()[target]
        for block in range(VIT.depth):
            total, first = torch.zeros(VIT.width, VIT.width), 0
            for index, rank in enumerate(method.ranks.rows.tolist()):
                a, b = (rows[block, first : first + rank] for rows in (down, up))
                norm_a, norm_b = a.square().sum().sqrt(), b.square().sum()
                if method.config.preset == "paper":
                    norm = norm_a * (norm_b + SMOOTHING**2).sqrt()
                elif index < len(method.ranks) - 1:
                    norm = norm_a * norm_b.sqrt()
                else:
                    norm = torch.ones(())
                for row in range(rank):
                    product = torch.outer(b[row], a[row])
                    total = total + method.magnitudes.rows[index] / norm * product
                first += rank
            changes[block, target] = total
    return changes


def inflora_changes(method: InfLoRA) -> dict[tuple[int, str], Tensor]:
    return {
        (block, target): sum(
            (torch.outer(b, a) for a, b in zip(down[block], up[block], strict=True)),
            torch.zeros(VIT.width, VIT.width),
        )
        for target, (down, up) in method.delta.factors().items()
        for block in range(VIT.depth)
    }


def changes_of(method: LowRankMethod) -> dict[tuple[int, str], Tensor]:
    return sdlora_changes(method) if isinstance(method, SDLoRA) else inflora_changes(method)


CASES = [
    ("sd-lora", {}),
    ("sd-lora", {"preset": "paper"}),
    ("sd-lora-rr", {"rank_changes": ((1, 2), (2, 1))}),
    ("inflora", {"tasks": 4}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("before", [0, 2])
def test_loss_and_gradients_equal_the_equations(
    vit: ViT, images: Tensor, name: str, options: dict[str, object], before: int
) -> None:
    method = made(name, vit, **options)
    learn(method, images, before)
    begin(method, images, new=3)
    scatter(method)
    first = sum(SIZES[:before])
    labels = torch.tensor([2, 1, 0, 2]) + first
    expected = torch.zeros(())
    for image, label in zip(images, labels, strict=True):
        features = naive_features(vit, image[None], None, changes_of(method))[0]
        logits = features @ method.head.weight.trainable.T + method.head.bias.trainable
        expected = expected - (logits.softmax(0)[int(label) - first]).log() / len(images)
    loss = method.loss(TrainingBatch(images, labels)).mean.mean()
    assert_close(loss, expected, **TOLERANCE)
    parameters = method.trainable_parameters()
    for found, wanted in zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        assert_close(found, wanted, **TOLERANCE)
    assert len(parameters) == (4 + 1 + 2 if name != "inflora" else 2 + 2)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_after_tasks_of_unequal_size(
    vit: ViT, images: Tensor, name: str, options: dict[str, object]
) -> None:
    method = made(name, vit, **options)
    learn(method, images, 3)
    logits = method.logits(images)
    features = naive_features(vit, images, None, changes_of(method))
    assert logits.shape == (4, 9)
    assert_close(logits, method.head(features), **TOLERANCE)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_merged_weights_give_the_same_features(
    vit: ViT, images: Tensor, name: str, options: dict[str, object]
) -> None:
    method = made(name, vit, **options)
    learn(method, images, 3)
    merged = copy.deepcopy(vit)
    merged.merge(method.edits())
    assert_close(merged.features(images), method.features(images, None), **TOLERANCE)
    assert (vit.features(images) - method.features(images, None)).abs().max() > 0.01


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_new_component_changes_nothing_until_it_trains(
    vit: ViT, images: Tensor, name: str, options: dict[str, object]
) -> None:
    method = made(name, vit, **options)
    begin(method, images)
    assert_close(method.features(images, None), vit.features(images), **TOLERANCE)
    scatter(method)
    method.end_task()
    if name == "inflora":  # SD-LoRA resets the magnitudes of older components
        before = method.features(images, None)
        begin(method, images)
        assert_close(method.features(images, None), before, **TOLERANCE)


# -- SD-LoRA


def test_magnitudes_start_again_and_directions_stay() -> None:
    tasks = make_stream(patterns(9, 6), class_lists=[["0", "1", "2"], ["3"], ["4", "5"]]).tasks
    method = methods.make("sd-lora", tiny_vit(), rank=3)
    driver = Engine(PLAIN_VIEWS, Training(epochs=2, batch_size=8, weight_decay=0.1))
    driver.learn(method, tasks[0])
    rows = [bank.frozen.clone() for bank in method.directions.banks()]
    (first,) = method.magnitudes.rows.tolist()
    assert first != pytest.approx(0.8, abs=1e-6)
    driver.learn(method, tasks[1])
    assert method.magnitudes.rows.tolist() == [first], "a single class trains nothing"
    method.begin_task(brief(method, new=2))
    assert method.magnitudes.rows.tolist() == pytest.approx([0.8, 0.8])
    assert sum(each.numel() for each in method.trainable_parameters()) == (
        2 + 4 * 6 * 3 * 32 + 2 * 33
    )
    method.end_task()
    for bank, old in zip(method.directions.banks(), rows, strict=True):
        assert torch.equal(bank.frozen[:, :3], old)


def test_ranks_of_later_tasks_are_reduced(vit: ViT, images: Tensor) -> None:
    method = methods.make("sd-lora-rr", vit)
    for _ in range(10):
        begin(method, images)
        method.end_task()
    assert method.ranks.rows.tolist() == [10, 10, 10, 10, 8, 8, 8, 8, 6, 6]


def test_an_untrained_component_of_an_older_task_is_not_divided_by_zero(
    vit: ViT, images: Tensor
) -> None:
    method = made("sd-lora", vit)
    begin(method, images)
    method.end_task()
    begin(method, images)
    assert_close(method.features(images, None), vit.features(images), **TOLERANCE)


# -- InfLoRA


def naive_moments(method: LowRankMethod, images: Tensor) -> list[Tensor]:
    """mean(x x^T) over tokens, in a copy of the ViT with merged weights."""
    merged = copy.deepcopy(method.backbone)
    merged.merge(method.edits())
    tokens, moments = merged.embed(images), []
    for index, block in enumerate(merged.blocks):
        inputs = block.norm1(tokens).flatten(0, 1).double()
        moments.append(sum(torch.outer(row, row) for row in inputs) / len(inputs))
        if index < VIT.depth - 1:
            tokens = merged.run(tokens, [index])
    return moments


def test_inputs_of_new_components_and_protected_directions(vit: ViT, images: Tensor) -> None:
    """Task by task: A from the projected moments, then directions up to the rising share."""
    method = made("inflora", vit, tasks=3, threshold=0.6)
    assert isinstance(method, InfLoRA)
    bases = [torch.zeros(VIT.width, 0, dtype=torch.float64) for _ in range(VIT.depth)]
    for task in range(3):
        seen = images * (task + 1) - task
        method.begin_task(brief(method, new=SIZES[task]))
        expected = naive_moments(method, seen)
        with torch.no_grad():
            method.prepare(batches(seen))
        for block, moment in enumerate(expected):
            free = moment - bases[block] @ bases[block].T @ moment
            leading = torch.linalg.svd(free).U[:, :3]
            a = method.delta.banks()[0].frozen[block, -3:].double()
            assert_close(a.T @ a, leading @ leading.T / 3, **TOLERANCE)
            assert (a @ bases[block]).abs().sum() < 1e-5, "orthogonal to old inputs"
        scatter(method)
        expected = naive_moments(method, seen)
        with torch.no_grad():
            method.conclude(batches(seen))
        method.end_task()
        for block, moment in enumerate(expected):
            bases[block] = naive_protected(moment, bases[block], 0.6 + 0.4 * task / 3)
            found = method.protected[block].frozen.double()
            assert_close(found.T @ found, bases[block] @ bases[block].T, **TOLERANCE)
    assert min(len(bank) for bank in method.protected) > 1
    assert max(len(bank) for bank in method.protected) < VIT.width


def naive_protected(moment: Tensor, basis: Tensor, share: float) -> Tensor:
    """One direction after another until the share is reached; the first time one less."""
    total = torch.linalg.svdvals(moment).square().sum()
    first = not basis.shape[1]
    while True:
        free = moment - basis @ basis.T @ moment
        vectors, values, _ = torch.linalg.svd(free)
        captured = (total - values.square().sum()) / total
        reached = captured + values[0] ** 2 / total if first else captured
        if basis.shape[1] and reached >= share:
            return basis
        basis = torch.cat([basis, vectors[:, :1]], dim=1)


def test_a_share_of_one_protects_only_directions_with_energy() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    moment = rows.T @ rows
    some = torch.linalg.qr(rows.T).Q.T[:1]
    new = directions_to_protect(moment, some, 1.0)
    assert new.shape == (2, 8)
    assert_close(new @ new.T, torch.eye(2, dtype=torch.float64))
    assert directions_to_protect(moment, torch.linalg.qr(rows.T).Q.T, 1.0).shape == (0, 8)
    assert directions_to_protect(moment, rows[:0], 1e-9).shape == (1, 8), "at least one"


def test_a_full_space_leaves_no_input_for_a_new_component(vit: ViT, images: Tensor) -> None:
    method = made("inflora", vit)
    learn(method, images, 1)
    for bank in method.protected:
        bank.frozen = torch.eye(VIT.width)
    begin(method, images)
    scatter(method)
    assert not method.delta.banks()[0].frozen[:, -3:].any()
    assert math.isfinite(
        float(method.loss(TrainingBatch(images, torch.full((4,), 3))).mean.sum().detach())
    )


@pytest.mark.parametrize("name", ["sd-lora", "inflora"])
def test_a_rank_above_the_width_is_refused(vit: ViT, name: str) -> None:
    with pytest.raises(BadOption, match="17 is more than the width of the ViT, 16"):
        methods.make(name, vit, rank=17)

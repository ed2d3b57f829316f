"""Scripts that measure and predict speed: the textbook, the baseline of `make bench`, scaling."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import tiny_vit
from torch.testing import assert_close

from coda_prompt.research import methods
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.bench.cost import multiply_adds
from coda_prompt.research.methods import TaskBrief, TrainingBatch
from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.vit import ViT, ViTConfig

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]
import regression  # noqa: E402
import scale  # noqa: E402
import speed  # noqa: E402
from textbook import TextbookCoda  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
BASELINE = {"exact": 1.6, "cached": 2.2}


def tiny_in_task(tasks: int, layer_scale: bool = False) -> CodaPrompt:
    """Return CODA-P at the start of a task, after tasks that changed its components."""
    vit = tiny_vit()
    if layer_scale:
        vit = ViT(replace(vit.config, layer_scale=True)).initialise(torch.Generator())
        for block in vit.blocks:
            block.ls1.gamma.data.fill_(0.5)
            block.ls2.gamma.data.fill_(0.7)
    method = methods.make("coda-p", vit, components_per_task=3)
    assert isinstance(method, CodaPrompt)
    for task in range(tasks):
        rows = (2 * task, 2 * task + 1)
        method.begin_task(TaskBrief(task, 0, rows, torch.tensor(rows)))
        for kind in method.prompt_banks:
            getattr(method, kind).trainable.data *= 1.5
        if task < tasks - 1:
            method.end_task()
    return method


@pytest.mark.parametrize("layer_scale", [False, True])
@pytest.mark.parametrize("tasks", [1, 3])
def test_textbook_has_the_same_loss_and_gradients(tasks: int, layer_scale: bool) -> None:
    method = tiny_in_task(tasks, layer_scale)
    book = TextbookCoda(method)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 1, 16, 16, generator=generator)
    labels = torch.randint(2 * tasks - 2, 2 * tasks, (5,), generator=generator)
    queries = method.queries(images)
    for seen, known in (
        (method.backbone.start(images, method.first_block), None),
        (images, queries),
    ):
        method.zero_grad()
        book.zero_grad()
        own = method.loss(
            TrainingBatch(seen, labels, method.queries(seen) if known is None else known)
        )
        own.mean.mean().backward()
        expected = book.loss(images, labels)
        expected.backward()
        assert_close(own.mean.mean(), expected, atol=1e-6, rtol=1e-5)
        for kind in method.prompt_banks:
            mine, theirs = getattr(method, kind).trainable.grad, book.parts[f"new_{kind}"].grad
            assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
        assert method.head.weight.trainable is not None
        first = 2 * tasks - 2
        assert_close(
            method.head.weight.trainable.grad, book.head_weight.grad[first:], atol=1e-6, rtol=1e-4
        )


def test_textbook_costs_four_forward_passes_and_the_package_fewer() -> None:
    """Count multiply-adds of a step of ViT-B/16 on the meta device."""
    with torch.device("meta"):
        method = methods.make("coda-p", ViT(speed.VITS["ViT-B/16"]), components_per_task=10)
        assert isinstance(method, CodaPrompt)
        for name in ("task_sizes", "component_sizes"):
            bank = getattr(method, name)
            bank.frozen = torch.zeros(0, dtype=torch.int64, device="cpu")
        rows = tuple(range(20))
        method.begin_task(TaskBrief(0, 0, rows, torch.tensor(rows)))
        book = TextbookCoda(method)
        images = torch.zeros(2, 3, 224, 224)
        labels = torch.zeros(2, dtype=torch.int64)
        forward = speed.multiply_adds(lambda: book.vit(images))
        textbook = speed.multiply_adds(speed.textbook_step(book, images, labels))
        exact = speed.multiply_adds(speed.product_step(method, images, labels, cached=False))
        cached = speed.multiply_adds(speed.product_step(method, images, labels, cached=True))
    assert textbook / forward == pytest.approx(4, rel=0.05)
    assert exact / forward < 2.9
    assert cached / forward < 1.95


def test_memory_of_a_step_relative_to_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count tensors, not resident memory, with 65 tokens and heads of 64 channels as in `photo`."""
    small = ViTConfig(image_size=32, patch_size=4, width=192, heads=3, mlp_width=768)
    monkeypatch.setitem(speed.VITS, "small", small)
    steps = speed.steps_of("small", 16)
    peaks = {name: speed.peak_of_tensors(step) for name, step in steps.items()}
    ratios = {name: peak / peaks["textbook"] for name, peak in peaks.items()}
    assert ratios["exact, whole batch"] < 0.56
    assert ratios["cached, whole batch"] < 0.54
    assert ratios["exact"] < 0.56
    assert ratios["cached"] < 0.55
    assert ratios["exact, bfloat16"] < 0.45  # with weights cast to bfloat16
    assert ratios["cached, bfloat16"] < 0.34
    monkeypatch.setitem(speed.VITS, "large", replace(small, image_size=80))
    steps = speed.steps_of("large", 16)
    peaks = {name: speed.peak_of_tensors(steps[name]) for name in ("textbook", "exact", "cached")}
    assert peaks["cached"] / peaks["textbook"] < 0.29, "parts of four images, two at a time"


def test_memory_of_tensors_is_counted_while_they_exist() -> None:
    def step() -> None:
        first = torch.ones(2**18)  # 1 MiB
        second = first + 1
        del first
        second.view(2, -1).add_(1)
        torch.cat([second, second])

    assert speed.peak_of_tensors(step) == 3.0


def test_micro_batches_accumulate_the_gradient_of_the_batch() -> None:
    method = tiny_in_task(2)
    images, labels = torch.randn(5, 1, 16, 16), torch.tensor([2, 3, 3, 2, 3])
    gradients = []
    for micro_batch in (None, 2):
        speed.product_step(method, images, labels, cached=False, micro_batch=micro_batch)()
        gradients.append([each.grad for each in method.trainable_parameters()])
    for whole, accumulated in zip(*gradients, strict=True):
        assert_close(accumulated, whole)


# -- make bench


def never() -> dict[str, float]:
    raise AssertionError("measured a second time")


@pytest.mark.parametrize(
    "measured",
    [
        {"exact": 1.6, "cached": 2.2},
        {"exact": 1.37, "cached": 1.88},  # 14 % less
        {"exact": 3.0, "cached": 4.0, "new": 0.1},  # faster, and one that has no baseline
    ],
)
def test_speeds_within_the_tolerance_pass_in_one_run(measured: dict[str, float]) -> None:
    assert regression.slower(BASELINE, measured) == []
    assert regression.confirmed(BASELINE, never, measured) == []


def test_a_regression_fails_if_the_second_run_confirms_it() -> None:
    first = {"exact": 1.35, "cached": 2.2}  # 16 % less
    assert regression.slower(BASELINE, first) == ["exact"]
    again = {"exact": 1.3, "cached": 2.2}
    assert regression.confirmed(BASELINE, lambda: again, first) == ["exact"]
    assert regression.confirmed(BASELINE, lambda: BASELINE, first) == []
    other = {"exact": 1.6, "cached": 1.0}  # each run has another outlier
    assert regression.confirmed(BASELINE, lambda: other, first) == []


def test_a_step_that_is_not_measured_any_more_fails() -> None:
    missing = {"exact": 1.6}
    assert regression.confirmed(BASELINE, lambda: missing, missing) == ["cached"]


def test_the_committed_baseline_has_every_measured_step() -> None:
    content = json.loads((BENCHMARKS / "baseline.json").read_text("utf-8"))
    names = {
        f"{backbone}, {step}"
        for backbone in regression.REPETITIONS
        for step in regression.STEPS
        if step != "textbook"
    }
    assert content["times faster than the textbook"].keys() == names


def test_steps_are_measured_as_ratios_to_the_textbook() -> None:
    ratios = regression.measure({"pocket": 1})
    assert ratios.keys() == {"pocket, exact", "pocket, cached"}
    assert all(ratio > 0 for ratio in ratios.values())


# -- tools/scale.py


@pytest.mark.parametrize("name", ["ViT-B/16", "pocket"])
def test_estimated_operations_equal_counted_ones(name: str) -> None:
    net = scale.NETS["ViT-B/16"] if name == "ViT-B/16" else scale.pocket()
    vit = ViTConfig() if name == "ViT-B/16" else load_backbone("pocket").vit.config
    options = ("methods.coda-p.options.length=8", "methods.coda-p.options.components=50")
    benchmark = load_benchmark("pocket", [*options, "training.queries=exact"])
    counted = multiply_adds(benchmark, "coda-p", vit, [20] * 5)
    sums = net.prompt_sum(50)
    assert net.forward + net.prompted + sums == pytest.approx(counted.inference, rel=0.03)
    whole = net.forward + net.prompted + net.backward + 2 * sums
    assert whole == pytest.approx(counted.training, rel=0.05)


def test_measured_points_are_predicted_within_25_percent() -> None:
    measured = json.loads((ROOT / "benchmarks" / "speed.json").read_text("utf-8"))
    points = list(scale.points(measured))
    assert len(points) >= 10
    assert [point for point in points if abs(point[1] / point[2] - 1) > 0.25] == []


def test_docs_contain_the_printed_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "lab" / "scaling.md").read_text("utf-8").splitlines()
    for more, least in ((), 40), (("--check",), 16):
        monkeypatch.setattr(sys, "argv", ["scale.py", *more])
        scale.main()
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) > least
        assert [line for line in printed if line not in page] == []

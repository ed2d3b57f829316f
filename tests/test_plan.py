"""tools/scale.py counts operations as the package does and predicts the measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coda_prompt.bench.config import load_benchmark
from coda_prompt.bench.cost import multiply_adds
from coda_prompt.model.catalog import load_backbone
from coda_prompt.model.vit import ViTConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import scale  # noqa: E402


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

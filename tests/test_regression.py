"""The comparison of measured speeds with the committed baseline (`make bench`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import regression

BENCHMARKS = Path(regression.__file__).parent
BASELINE = {"exact": 1.6, "cached": 2.2}


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

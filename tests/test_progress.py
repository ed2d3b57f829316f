"""Progress display of running benchmarks."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from coda_prompt.bench.config import load_benchmark
from coda_prompt.bench.progress import BenchProgress
from coda_prompt.bench.runs import Point, Run, runs_of
from coda_prompt.training.settings import Event


def make_progress(runs: list[Run], *, terminal: bool) -> tuple[BenchProgress, Console, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    return BenchProgress(runs, console), console, output


def four_runs(folder: Path) -> list[Run]:
    benchmark = load_benchmark("pocket", ["trials=2", "training.epochs=4"])
    return runs_of(benchmark, ["coda-p", "ncm"], folder)


def test_table_lists_running_runs(tmp_path: Path) -> None:
    runs = four_runs(tmp_path)
    progress, console, output = make_progress(runs, terminal=True)
    progress.on_event(runs[0], Event("evaluation", 0, 5, accuracies=(0.5,)))
    progress.on_event(runs[0], Event("step", 1, 5, epoch=1, epochs=4, step=50, steps=100))
    progress.on_event(runs[1], Event("task", 0, 5))
    console.print(progress._table())
    lines = output.getvalue().splitlines()
    assert any("coda-p" in line and "task 2/5, epoch 2/4, 50.0 % so far" in line for line in lines)
    assert any("ncm" in line and "task 1/5" in line for line in lines)
    assert " at " not in output.getvalue()
    assert "0 finished, 2 running, 2 waiting" in output.getvalue()
    assert progress._completed() == pytest.approx(4 * (1 + 1.5 / 4) / 5)
    progress.finish(runs[1])
    console.print(progress._table())
    assert "1 finished, 1 running, 2 waiting" in output.getvalue()


def test_accuracy_of_a_finished_run_is_printed_at_once(tmp_path: Path) -> None:
    runs = four_runs(tmp_path)
    progress, _, output = make_progress(runs, terminal=True)
    progress.on_event(runs[0], Event("evaluation", 4, 5, accuracies=(0.5, 0.25)))
    assert output.getvalue() == ""
    progress.finish(runs[0])
    assert output.getvalue() == "coda-p, 1: 37.5 % over all classes\n"


def test_table_of_a_sweep_shows_the_value_of_each_run(tmp_path: Path) -> None:
    point = Point("length", "prompt length", "length", 8)
    runs = [dataclasses.replace(run, point=point) for run in four_runs(tmp_path)]
    progress, console, output = make_progress(runs, terminal=True)
    progress.on_event(runs[0], Event("task", 0, 5))
    console.print(progress._table())
    assert "length = 8" in output.getvalue()


def test_without_a_terminal_each_task_prints_a_line(tmp_path: Path) -> None:
    runs = four_runs(tmp_path)
    progress, _, output = make_progress(runs, terminal=False)
    with progress:
        progress.on_event(runs[0], Event("step", 0, 5, epoch=0, epochs=4, step=1, steps=100))
        assert output.getvalue() == ""
        progress.on_event(runs[0], Event("evaluation", 0, 5, accuracies=(0.25, 0.75)))
    (line,) = output.getvalue().strip().splitlines()
    assert line.startswith("coda-p, trial 1, task 1/5: 50.0 % over all classes so far, ")
    assert line.endswith(" left")

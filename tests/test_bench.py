"""`coda bench` on a tiny benchmark: presets, overrides, run folders, tables and progress."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import PATIENCE
from PIL import Image
from rich.console import Console
from small import coda, started_coda

from coda_prompt.errors import BadOption, CodaError, MissingData, RunConfigChanged, UnknownName
from coda_prompt.research.bench import report
from coda_prompt.research.bench.config import load_benchmark, shipped
from coda_prompt.research.bench.progress import BenchProgress
from coda_prompt.research.bench.runs import Point, Run, runs_of
from coda_prompt.research.methods import METHODS
from coda_prompt.research.training.settings import Event


def test_json_output_has_one_row_per_method_only(tiny_runs: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["method"]: row for row in tiny_runs[1]["rows"]}
    assert list(rows) == ["coda-p", "ncm", "upper-bound"]
    for row in rows.values():
        assert row["trials"] == 2
        assert 0 <= row["A_N"]["mean"] <= 100
        assert row["A_N"]["std"] >= 0
    assert rows["upper-bound"]["F_paper"]["mean"] is None, "it has no accuracy before the end"
    assert rows["coda-p"]["difference"] is None
    assert len(rows["ncm"]["difference"]["interval"]) == 2


def test_what_a_run_stores_is_counted(tiny_runs: tuple[Path, dict[str, Any]]) -> None:
    """Nearest class mean: the sum and the count of each class, the number of classes of tasks."""
    out, printed = tiny_runs
    result = json.loads((out / "tiny" / "ncm" / "trial-0" / "result.json").read_text())
    classes, tasks = len(result["class_names"]), len(result["tasks"])
    width = result["parameters"]["head"] // classes
    assert result["learned_bytes"] == classes * (4 * width + 8) + 8 * tasks
    (row,) = (row for row in printed["rows"] if row["method"] == "ncm")
    assert row["learned_mib"]["mean"] == pytest.approx(result["learned_bytes"] / 2**20)


def test_every_number_can_be_traced_to_a_run_folder(tiny_runs: tuple[Path, dict[str, Any]]) -> None:
    out, printed = tiny_runs
    accuracies = []
    for seed in (0, 1):
        folder = out / "tiny" / "coda-p" / f"trial-{seed}"
        config = json.loads((folder / "config.json").read_text())
        assert config["training"]["seed"] == seed
        assert config["options"]["tasks"] == 3
        environment = json.loads((folder / "environment.json").read_text())
        assert len(environment["backbone"]["sha256"]) == 64
        assert len(environment["data"]["sha256"]) == 64
        assert environment["packages"]["torch"]
        result = json.loads((folder / "result.json").read_text())
        accuracies.append(100 * np.mean(result["matrix"][-1]))
        assert result["seconds"] > 0
        assert result["peak_memory_bytes"] > 1e7
        lines = (folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        assert [event["kind"] for event in events] == ["task", "epoch", "evaluation"] * 3
    row = printed["rows"][0]
    assert row["A_N"]["mean"] == pytest.approx(np.mean(accuracies))
    assert row["A_N"]["std"] == pytest.approx(np.std(accuracies))


def test_trials_have_the_same_class_order_for_every_method(
    tiny_runs: tuple[Path, dict[str, Any]],
) -> None:
    orders = {
        (method, seed): json.loads(
            (tiny_runs[0] / "tiny" / method / f"trial-{seed}" / "result.json").read_text()
        )["class_names"]
        for method in ("coda-p", "ncm", "upper-bound")
        for seed in (0, 1)
    }
    assert orders["coda-p", 0] == list("abcdef")
    assert orders["coda-p", 1] != orders["coda-p", 0]
    for seed in (0, 1):
        assert orders["coda-p", seed] == orders["ncm", seed] == orders["upper-bound", seed]


def test_only_unfinished_runs_are_executed_again(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]]
) -> None:
    out, printed = tiny_runs
    kept = out / "tiny" / "coda-p" / "trial-0" / "result.json"
    lost = out / "tiny" / "coda-p" / "trial-1" / "result.json"
    before, times = lost.read_text(), kept.stat().st_mtime_ns
    lost.unlink()
    again = coda("bench", str(tiny), "--json", "--out", str(out))
    assert kept.stat().st_mtime_ns == times
    assert json.loads(lost.read_text())["matrix"] == json.loads(before)["matrix"]
    rows = zip(json.loads(again.stdout)["rows"], printed["rows"], strict=True)
    assert all(now["A_N"] == then["A_N"] for now, then in rows)


def test_changed_configuration_in_the_same_folder_is_refused_with_a_diff(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]]
) -> None:
    changed = coda("bench", str(tiny), "--out", str(tiny_runs[0]), "--set", "training.epochs=2")
    assert changed.returncode == 2
    assert "training.epochs: 1 -> 2" in changed.stderr
    assert "Traceback" not in changed.stderr


def test_bench_prints_a_table_and_writes_plots(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]]
) -> None:
    shown = coda("bench", str(tiny), "--out", str(tiny_runs[0]), "--methods", "coda-p,ncm")
    assert "coda-p" in shown.stdout
    assert "A_N" in shown.stdout
    for name in ("accuracy.png", "matrices.png"):
        picture = Image.open(tiny_runs[0] / "tiny" / name)
        assert picture.size[0] > 600
        assert name in shown.stderr


def test_dry_run_resolves_runs_without_reading_data() -> None:
    shown = coda("bench", "pocket", "--dry-run", "--set", "source=/nowhere", "--trials", "1")
    runs = json.loads(shown.stdout)["runs"]
    assert [run["method"] for run in runs] == ["coda-p", "dualprompt", "ft++", "ncm"]
    assert runs[0]["options"]["tasks"] == 5
    assert runs[0]["source"] == "/nowhere"


def test_pocket_has_four_presets_with_every_method() -> None:
    names = ["pocket", "pocket-10", "pocket-20", "pocket-dual-shift"]
    assert set(names) <= {*shipped("presets")}
    tasks = {name: load_benchmark(name).stream.tasks for name in names}
    assert tasks == {"pocket": 5, "pocket-10": 10, "pocket-20": 20, "pocket-dual-shift": 5}
    assert load_benchmark("pocket-dual-shift").stream.remove_domains == 5
    for name in names:
        assert set(load_benchmark(name).methods) == {*METHODS, "ranpac-learn"}


@pytest.mark.parametrize("name", ["pocket-demo", "photos-demo"])
def test_demo_compares_the_paper_the_alternatives_and_the_default(name: str) -> None:
    demo = load_benchmark(name)
    assert set(demo.demo) == {"ncm", "ranpac", "coda-p", "coda-p-ranpac", "ft++"}
    assert demo.demo[0] == "ncm", "the first row has to come soon"
    assert demo.trials == 1


def test_command_line_overrides_a_preset() -> None:
    texts = ["training.epochs=3", "methods.coda-p.options.length=6", "trials=1"]
    benchmark = load_benchmark("pocket", texts)
    assert benchmark.method_training("ft", 0).epochs == 3
    assert benchmark.method_config("coda-p").length == 6  # type: ignore[attr-defined]
    runs = runs_of(benchmark, ["coda-p"], Path("out"))
    assert [run.config["training"]["epochs"] for run in runs] == [3]


def test_validation_evaluates_on_training_images(tiny: Path, tmp_path: Path) -> None:
    shown = coda(
        "bench", str(tiny), "--validation", "--methods", "ncm", "--trials", "1",
        "--json", "--out", str(tmp_path),
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    result = json.loads((tmp_path / "tiny" / "ncm" / "trial-0" / "result.json").read_text())
    assert sum(result["test_images"]) == 36 // 5


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["trails=3"], UnknownName, "Did you mean 'trials'"),
        (["stream.task=3"], UnknownName, "Did you mean 'stream.tasks'"),
        (["training.epoch=3"], UnknownName, "Did you mean 'epochs'"),
        (["methods.coda-p.option.length=4"], UnknownName, "Did you mean 'methods.coda-p.options'"),
        (["methods.coda-p.options.lengh=4"], UnknownName, "Did you mean 'length'"),
        (["methods.coda.options.length=4"], UnknownName, "Did you mean 'coda-p'"),
        (["trials=many"], BadOption, "trials"),
        (["training.epochs=0"], BadOption, "epochs"),
        (["trials"], BadOption, "is not field=value"),
        (["name.first=a"], BadOption, "has no fields"),
        (["trials=[1"], BadOption, "is not a value"),
    ],
)
def test_invalid_override_raises_an_error_that_names_it(
    overrides: list[str], kind: type[CodaError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_benchmark("pocket", overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "poket"), "Did you mean 'pocket'"),
        (("bench", "nowhere.yaml"), "there is no such file"),
        (("bench", "pocket", "--methods", "coda"), "Did you mean 'coda-p'"),
        (("bench", "pocket", "--methods", "ncm,ncm"), "would be one row"),
        (("bench", "pocket", "--methods", "ncm", "--set", "source=/nowhere"), "/nowhere"),
        (("bench", "pocket", "--methods", "ncm", "--set", "backbone=poket"), "Did you mean"),
    ],
)
def test_user_errors_print_one_message_and_exit_with_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    finished = coda(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""


def test_report_of_a_folder_without_runs_raises(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="contains no finished run"):
        report.read_runs(tmp_path)


def test_run_config_changed_lists_every_difference() -> None:
    error = RunConfigChanged("runs/a", ["training.epochs: 1 -> 2"])
    assert "training.epochs: 1 -> 2" in str(error)


@pytest.mark.parametrize("saved", ["result.json", "checkpoints"])
def test_a_folder_in_which_nothing_was_saved_takes_another_configuration(
    saved: str, tmp_path: Path
) -> None:
    (run, *_) = runs_of(load_benchmark("pocket-demo"), ["ncm"], tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text('{"method": "one that failed"}')
    assert not run.is_finished()
    (run.folder / saved).mkdir()
    with pytest.raises(RunConfigChanged, match="different configuration"):
        run.is_finished()


def test_parallel_runs_give_the_same_numbers(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Each run has fewer threads, so the last bits may differ, but no prediction changes."""
    out = str(tmp_path)
    finished = coda("bench", str(tiny), "--jobs", "2", "--json", "--out", out)
    assert finished.returncode == 0, finished.stderr
    rows = zip(json.loads(finished.stdout)["rows"], tiny_runs[1]["rows"], strict=True)
    assert all(now["A_N"] == then["A_N"] for now, then in rows)


def test_error_in_a_parallel_run_prints_one_message(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", broken)
    (broken / "train" / "c" / "0.png").write_bytes(b"no image")
    finished = coda(
        "bench", str(tiny), "--jobs", "2", "--methods", "coda-p,ncm", "--out", str(tmp_path / "o"),
        "--set", f"source={broken}",
    )  # fmt: skip
    assert finished.returncode == 2
    assert "0.png" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.posix
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_exit_when_bench_is_killed(tiny: Path, tmp_path: Path) -> None:
    parent = started_coda(
        "bench", str(tiny), "--jobs", "2", "--methods", "coda-p,upper-bound",
        "--set", "training.epochs=5000", "--out", str(tmp_path),
    )  # fmt: skip
    try:
        wait_until(lambda: len(list(tmp_path.rglob("events.jsonl"))) == 2)
        workers = children_of(parent.pid)
        assert len(workers) >= 2
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def children_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in found.split()]


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def test_training_override_applies_to_every_method(tiny: Path) -> None:
    """It overrides values of a method in the file; an override of that method takes precedence."""
    asked = ["training.learning_rate=0.5", "training.epochs=3"]
    benchmark = load_benchmark(str(tiny), asked)
    rates = {name: benchmark.method_training(name, 0).learning_rate for name in benchmark.methods}
    assert rates == {"coda-p": 0.5, "ncm": 0.5, "upper-bound": 0.5}
    one = "methods.upper-bound.training.learning_rate=0.25"
    for settings in ([one, *asked], [*asked, one]):
        training = load_benchmark(str(tiny), settings).method_training("upper-bound", 0)
        assert (training.learning_rate, training.epochs) == (0.25, 3)


def test_empty_list_of_methods_is_refused(tiny: Path, tmp_path: Path) -> None:
    finished = coda("bench", str(tiny), "--methods", "", "--out", str(tmp_path))
    assert finished.returncode == 2
    assert "names no method" in finished.stderr


# -- progress


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

"""`coda report` and `coda sweep`: tables and plots from run folders."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from small import PAPER_METHODS, coda

from coda_prompt.errors import BadOption, CodaError, CorruptFile, RunConfigChanged, UnknownName
from coda_prompt.research.bench import cost, plots, report, tables
from coda_prompt.research.bench.config import load_benchmark, shipped
from coda_prompt.research.bench.runner import parameter_counts
from coda_prompt.research.bench.runs import Run, runs_of
from coda_prompt.research.bench.sweep import load_sweep, sweep_runs
from coda_prompt.research.vit.vit import ViT, ViTConfig

PICTURES = ("accuracy", "matrices", "forgetting", "parameters", "cost")


@pytest.fixture(scope="module")
def written(
    tiny_runs: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("report")
    finished = coda("report", str(tiny_runs[0]), "-o", str(out))
    assert finished.returncode == 0, finished.stderr
    assert "Accuracy and forgetting" in finished.stdout
    assert str(out / "index.html") in finished.stderr.replace("\n", "")
    return out


def test_all_table_formats_contain_the_same_numbers(written: Path) -> None:
    markdown = (written / "report.md").read_text()
    latex = (written / "report.tex").read_text()
    page = (written / "index.html").read_text()
    lines = list(csv.DictReader(io.StringIO((written / "tiny.csv").read_text())))
    assert [line["method"] for line in lines] == ["upper-bound", "coda-p", "ncm"]
    for line in lines:
        shown = f"{float(line['A_N.mean']):.1f} ± {float(line['A_N.std']):.1f}"
        assert f"| {line['method']} | 2 | {shown} |" in markdown.replace("**", "")
        plain = re.sub(r"\\textbf\{([^}]*)\}", r"\1", latex)
        assert f"{line['method']} & 2 & {shown.replace('±', '$' + chr(92) + 'pm$')} &" in plain
        cells = re.sub("</?b>", "", page)
        assert f"<td>{line['method']}</td><td>2</td><td>{shown}</td>" in cells
        for column in ("F_max.mean", "average_incremental.mean", "learning.mean"):
            assert bool(line[column]) == (line["method"] != "upper-bound")
        for column in (
            "training_gmac.mean",
            "inference_gmac.mean",
            "memory_mib.mean",
            "seconds.mean",
        ):
            assert float(line[column]) > 0
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 4
    assert "%" not in re.sub(r"\\%", "", latex.split("\n", 1)[1].split("\\end{tabular}")[0])


def test_plots_are_written_as_png_and_svg_and_embedded_in_the_page(written: Path) -> None:
    folder = written / "pictures" / "tiny"
    for name in PICTURES:
        assert Image.open(folder / f"{name}.png").size[0] > 600
        root = xml.etree.ElementTree.parse(folder / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
    page = (written / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(PICTURES)
    assert "http://" not in page
    assert "https://" not in page, "the page opens from disk, without a network"


def test_interrupted_bench_gives_the_same_report_except_times(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]], written: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(tiny_runs[0] / "tiny", runs / "tiny")
    for method, seed in (("coda-p", 1), ("ncm", 0)):  # as after a kill between two runs
        (runs / "tiny" / method / f"trial-{seed}" / "result.json").unlink()
    assert coda("bench", str(tiny), "--out", str(runs), "--json").returncode == 0
    again = tmp_path / "report"
    assert coda("report", str(runs), "-o", str(again)).returncode == 0
    for name in PICTURES:
        for suffix in (".png", ".svg"):
            file = f"pictures/tiny/{name}{suffix}"
            assert (again / file).read_bytes() == (written / file).read_bytes()
    for name in ("report.md", "report.tex"):
        now, before = ((place / name).read_text().splitlines() for place in (again, written))
        assert _without_times(now) == _without_times(before)


def _without_times(lines: list[str]) -> list[str]:
    """Remove seconds and memory, the last two columns of the cost table."""
    separators = re.compile(r" [|&] ")
    return [
        " ".join(separators.split(line)[:-2]) if separators.findall(line)[8:] == [] else line
        for line in lines
    ]


def test_report_reads_only_run_folders(
    tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """It needs no benchmark file, data or weights, and accepts one table or row."""
    for part in ("tiny", "tiny/coda-p"):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tiny_runs[0] / part, tmp_path / "copy")
        finished = coda("report", "copy", "--json", cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        rows = json.loads(finished.stdout)["parts"]["tiny"]
        assert "coda-p" in [row["method"] for row in rows]


def test_saved_benchmark_can_be_run_again(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    saved = tiny_runs[0] / "tiny" / "benchmark.json"
    original, loaded = load_benchmark(str(tiny)), load_benchmark(str(saved))
    names = list(loaded.methods)  # those of the last command
    assert "ncm" in names
    configs = [
        [run.config for run in runs_of(benchmark, names, tmp_path)]
        for benchmark in (original, loaded)
    ]
    assert configs[0] == configs[1]
    again = coda("bench", str(saved), "--methods", "ncm", "--json", "--out", str(tmp_path))
    (row,) = json.loads(again.stdout)["rows"]
    before = next(row for row in tiny_runs[1]["rows"] if row["method"] == "ncm")
    assert row["A_N"] == before["A_N"]


@pytest.mark.parametrize("name", ["pocket", "imagenet-r-10", "cifar-100-10", "pocket-ablations"])
@pytest.mark.parametrize("protocol", ["null", "paper", "release-2022"])
def test_resolved_benchmark_has_the_same_runs(name: str, protocol: str) -> None:
    benchmark = load_benchmark(name, [f"protocol={protocol}", "training.learning_rate=3e-5"])
    names = list(benchmark.methods)
    resolved = benchmark.resolved(names)
    for run, same in zip(
        runs_of(benchmark, names, Path("a")), runs_of(resolved, names, Path("a")), strict=True
    ):
        assert run.config == same.config


# -- comparison with the paper


@functools.cache
def paper_costs(benchmark_name: str, row: str) -> dict[str, Any]:
    """Count parameters and operations of a method in a preset of the paper."""
    benchmark = load_benchmark(benchmark_name)
    tasks = benchmark.stream.tasks or 1
    sizes = [(benchmark.classes or 0) // tasks] * tasks
    with torch.device("meta"):
        vit = ViT(ViTConfig())
    return {
        "parameters": parameter_counts(cost.method_after(benchmark, row, ViTConfig(), sizes), vit),
        "multiply_adds": cost.multiply_adds(benchmark, row, ViTConfig(), sizes)._asdict(),
    }


def paper_run(benchmark_name: str, row: str, tmp_path: Path, accuracy: float = 0.5) -> Path:
    """Write a run folder of a preset of the paper, counting parameters on the meta device."""
    benchmark = load_benchmark(benchmark_name)
    (run, *_) = runs_of(benchmark, [row], tmp_path)
    tasks = benchmark.stream.tasks or 1
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.config))
    inputs = {name: {"sha256": "0" * 64} for name in ("data", "backbone")}
    (run.folder / "environment.json").write_text(json.dumps(inputs))
    matrix = np.where(np.tri(tasks, dtype=bool), accuracy, np.nan)
    rows = [[None if np.isnan(value) else value for value in line] for line in matrix]
    result = {
        "matrix": rows,
        "own_classes": rows,
        "anytime": [None] * tasks,
        "train_images": [10] * tasks,
        "test_images": [10] * tasks,
        "groups": [{"name": f"task {j + 1}", "first": j, "last": j} for j in range(tasks)],
        "class_names": [str(number) for number in range(benchmark.classes or 0)],
        "untrained": [],
        "notes": [],
        "learned_bytes": 1,
        **paper_costs(benchmark_name, row),
        "seconds": 1.0,
        "peak_memory_bytes": 1,
    }
    (run.folder / "result.json").write_text(json.dumps(result))
    return run.folder


@pytest.mark.parametrize(
    "row", ["ft", "lwf-mc", "l2p++", "deep-l2p++", "dualprompt", "coda-p-s", "coda-p"]
)
def test_parameter_counts_equal_those_of_the_paper(row: str, tmp_path: Path) -> None:
    paper_run("imagenet-r-10", row, tmp_path)
    (line,) = report.rows(report.read_runs(tmp_path))
    shares = [round(line[name]["mean"], 1) for name in ("trained_parameters", "final_parameters")]
    assert shares == line["published"]["params"]


@pytest.mark.parametrize("rows", [[5, 9], [9]])
def test_forgetting_is_unknown_if_rows_were_not_measured(rows: list[int], tmp_path: Path) -> None:
    path = paper_run("imagenet-r-10", "coda-p", tmp_path) / "result.json"
    result = json.loads(path.read_text())
    for name in ("matrix", "own_classes"):
        result[name] = [
            line if row in rows else [None] * 10 for row, line in enumerate(result[name])
        ]
    path.write_text(json.dumps(result))
    (line,) = report.rows(runs := report.read_runs(tmp_path))
    assert line["A_N"]["mean"] == pytest.approx(50)
    assert line["F_paper"]["mean"] is line["F_max"]["mean"] is None
    (curve,) = plots.accuracy_over_tasks(runs).axes[0].get_lines()
    points = list(curve.get_xdata())
    assert points == ([row + 1 for row in rows] if len(rows) > 1 else list(range(1, 11)))
    assert all(path.stat().st_size for path in plots.benchmark_plots(runs, tmp_path))
    assert tables.full([line], runs)


@pytest.mark.parametrize(("tasks", "ticks"), [(1, 1), (10, 10), (20, 10), (500, 10), (1200, 6)])
def test_axis_of_many_tasks_has_at_most_ten_ticks(tasks: int, ticks: int) -> None:
    places, numbers = plots._task_ticks(tasks)
    assert len(places) == ticks
    assert numbers[-1] == str(places[-1] + 1)


def test_report_compares_with_published_numbers(tmp_path: Path) -> None:
    for row, accuracy in (("coda-p", 0.76), ("dualprompt", 0.70)):
        paper_run("imagenet-r-10", row, tmp_path, accuracy)
    runs = report.read_runs(tmp_path)
    found = next(t for t in tables.full(report.rows(runs), runs) if "paper" in t.title)
    lines = {line[0]: line[1:] for line in found.cells}
    assert lines["coda-p"] == ["76.0", "75.45 ± 0.56", "+0.5", "0.0", "1.64 ± 0.10", "-1.6",
                               "4.6 / 104.6", "4.6 / 104.6"]  # fmt: skip
    assert lines["dualprompt"][1:3] == ["71.32 ± 0.62", "-1.3"]


def test_a_published_number_of_another_backbone_names_it(tmp_path: Path) -> None:
    paper_run("cifar-100-10", "inflora", tmp_path, 0.87)
    runs = report.read_runs(tmp_path)
    found = next(t for t in tables.full(report.rows(runs), runs) if "paper" in t.title)
    assert found.cells[0][2] == "86.51 ± 0.73 (vit-b16-in21k)"


def test_every_published_row_has_a_preset_with_that_row() -> None:
    names = yaml.safe_load(Path(report.__file__).with_name("published.yaml").read_text("utf-8"))
    assert {"imagenet-r-10", "cifar-100-10", "cub-200-b0-inc10", "vtab-b0-inc10"} <= names.keys()
    for name in names:
        assert set(report.published(name)) <= set(load_benchmark(name).methods)


def test_ablations_differ_from_coda_p_in_one_option() -> None:
    for name in ("imagenet-r-10-ablations", "pocket-ablations"):
        benchmark = load_benchmark(name)
        runs = {
            run.method: run.config for run in runs_of(benchmark, list(benchmark.methods), Path())
        }
        whole = runs.pop("coda-p")
        changed = {
            row: {
                key for key in whole["options"] if config["options"][key] != whole["options"][key]
            }
            for row, config in runs.items()
        }
        paper_form = {"preset"}, {"preset", "orthogonality_weight"}
        names = ("paper-form", "paper-form-no-penalty")
        beside = dict(zip(names, paper_form, strict=True)) if name == "pocket-ablations" else {}
        assert changed == beside | {
            f"without-{part}": {part} for part in ("attention", "freezing", "orthogonality")
        }
        assert all(config["training"] == whole["training"] for config in runs.values())


# -- operations


def test_operation_counts_of_the_paper_backbone() -> None:
    """Compare with ViT-B/16 at 224 px by hand; the last block computes only the class token."""
    tokens, width = 197, 768
    block = tokens * (4 + 8) * width**2 + 2 * tokens**2 * width
    last = (2 + 8) * width**2 + 2 * tokens * width**2 + 2 * tokens * width
    forward = 196 * 768 * width + 11 * block + last
    benchmark = load_benchmark("imagenet-r-10")
    counted = {
        row: cost.multiply_adds(benchmark, row, ViTConfig(), [20] * 10)
        for row in ("ncm", "ft", "coda-p", "lwf-mc")
    }
    assert counted["ncm"].training == pytest.approx(forward, rel=1e-6)
    assert counted["ft"].inference == pytest.approx(forward, rel=1e-4)
    assert counted["coda-p"].inference == pytest.approx(2 * forward, rel=2e-3)
    assert counted["coda-p"].training == pytest.approx(3 * forward, rel=0.02)
    assert counted["ft"].training == pytest.approx(3 * forward, rel=0.02)
    assert counted["lwf-mc"].training == pytest.approx(4 * forward, rel=0.02)
    cached = load_benchmark("imagenet-r-10", ["training.queries=cached"])
    saved = (
        counted["coda-p"].training
        - cost.multiply_adds(cached, "coda-p", ViTConfig(), [20] * 10).training
    )
    assert saved == pytest.approx(forward * (1 - 1 / 50), rel=1e-3)


# -- sweeps


def test_sweep_runs_plots_and_reports(tiny: Path, tmp_path: Path) -> None:
    finished = coda(
        "sweep", "options.components", str(tiny), "--values", "3,6,60", "--trials", "2",
        "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "A_N % by options.components" in finished.stdout
    home = tmp_path / "runs" / "tiny" / "sweep-options.components"
    assert (home / "sweep.png").exists()
    assert (home / "sweep.svg").exists()
    values = sorted(path.name for path in (home / "coda-p").iterdir())
    assert values == [f"options.components={value}" for value in (3, 6, 60)]
    config = json.loads((home / "coda-p" / values[0] / "trial-1" / "config.json").read_text())
    assert config["options"]["components"] == 3
    assert config["training"]["seed"] == 1
    shown = coda("report", str(tmp_path / "runs"), "-o", str(tmp_path / "report"), "--json")
    (rows,) = json.loads(shown.stdout)["parts"].values()
    assert [row["value"] for row in rows] == [3, 6, 60]
    assert all(row["trials"] == 2 for row in rows)
    again = coda(
        "sweep", "options.components", str(tiny), "--values", "3,6,60", "--trials", "2", "--json",
        "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    assert [row["A_N"] for row in json.loads(again.stdout)["rows"]] == [r["A_N"] for r in rows]


def test_benchmark_field_can_be_swept(tiny: Path, tmp_path: Path) -> None:
    sweep = load_sweep("stream.tasks", str(tiny), ["ncm", "coda-p"], "1,2,3")
    runs = sweep_runs(sweep, [], tmp_path)
    assert len(runs) == 2 * 3 * 2
    assert [run.benchmark.stream.tasks for run in runs if run.seed == 0] == [1, 2, 3] * 2
    assert len({run.folder for run in runs}) == len(runs)


def test_shipped_sweeps_match_the_paper() -> None:
    assert shipped("sweeps") == ["components", "length", "tuning"]
    components = points("components")
    assert components["coda-p", "options.components"] == [5, 10, 20, 50, 100, 200, 500]
    assert components["l2p++", "options.pool"] == [5, 10, 20, 50, 100, 200, 500]
    assert components["dualprompt", "stream.tasks"] == [5]
    lengths = points("length")
    assert {values[0] for values in lengths.values()} == {4}
    assert {values[-1] for values in lengths.values()} == {40}
    tuning = points("tuning")
    rates = [1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2]
    assert [tuning[name, "training.learning_rate"] for name in PAPER_METHODS] == [rates] * 10
    decades = [10.0**power for power in range(-6, 3)]
    assert tuning["coda-p", "options.orthogonality_weight"] == pytest.approx(decades)


def points(name: str) -> dict[tuple[str, str], list[Any]]:
    sweep = load_sweep(name, None, [], "")
    found: dict[tuple[str, str], list[Any]] = {}
    for run in sweep_runs(sweep, [], Path()):
        assert run.benchmark.stream.validation
        assert run.benchmark.name in ("imagenet-r-5", "imagenet-r-10")
        assert isinstance(run, Run)
        assert run.point is not None
        if run.seed == 0:
            found.setdefault((run.method, run.point.field), []).append(run.point.value)
    return found


def test_sweeps_have_fewer_points_on_pocket() -> None:
    runs = sweep_runs(load_sweep("components", "pocket", [], ""), [], Path())
    assert {run.benchmark.name for run in runs} == {"pocket"}
    assert len(runs) == 3 * (4 + 4 + 1)
    some = sweep_runs(load_sweep("length", "pocket", ["coda-p"], ""), ["trials=1"], Path())
    assert [run.benchmark.method_config("coda-p").length for run in some] == [4, 8, 20, 40]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("componets", None, [], ""), UnknownName, "Did you mean 'components'"),
        (("options.length", None, [], ""), BadOption, "give the values of"),
        (("components", None, ["ft"], ""), UnknownName, "no method 'ft' in sweep components"),
        (("components", None, [], "1,2"), BadOption, "several fields"),
        (("options.length", "pocket", ["coda-p"], "[4"), BadOption, "is not a value"),
    ],
)
def test_invalid_sweep_raises_an_error_that_names_it(
    arguments: tuple[str, str | None, list[str], str], kind: type[CodaError], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        load_sweep(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("options.lengh", "pocket", ["coda-p"], "4"), "Did you mean 'length'"),
        (("options.length", "pocket", ["coda"], "4"), "Did you mean 'coda-p'"),
        (("training.epochs", "pocket", ["coda-p"], "0"), "epochs"),
        (("strenght", "pocket", ["coda-p"], "1"), "Did you mean 'strength'"),
        (("options.length", "pocket", ["coda-p"], "4,8,4.0"), "4.0 is given twice"),
    ],
)
def test_invalid_field_or_value_raises_an_error_that_names_it(
    arguments: tuple[str, str, list[str], str], message: str
) -> None:
    with pytest.raises(CodaError, match=message):
        sweep_runs(load_sweep(*arguments), [], Path())


def test_sweep_accepts_all_methods() -> None:
    swept = load_sweep("training.epochs", "pocket", ["all"], "1,2")
    assert swept.lines[0].methods == tuple(load_benchmark("pocket").methods)
    assert load_sweep("components", "pocket", ["all"], "") == load_sweep(
        "components", "pocket", [], ""
    )


# -- corrupt run folders and files


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", "{}"),
        ("config.json", "{}"),
        ("config.json", '{"method": "ncm"}'),
        ("environment.json", '{"data": {}}'),
    ],
)
def test_corrupt_run_folder_raises_an_error_that_names_it(
    file: str, content: str, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "ncm" / "trial-0"
    shutil.copytree(tiny_runs[0] / "tiny" / "ncm" / "trial-0", folder)
    (folder / file).write_text(content)
    with pytest.raises(CorruptFile, match="trial-0"):
        report.read_runs(tmp_path)


def test_runs_with_other_data_or_weights_cannot_share_a_table(
    tiny: Path, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(tiny_runs[0] / "tiny", runs / "tiny")
    path = runs / "tiny" / "coda-p" / "trial-0" / "environment.json"
    changed = json.loads(path.read_text())
    changed["data"]["sha256"] = "0" * 64
    path.write_text(json.dumps(changed))
    (runs / "tiny" / "ncm" / "trial-0" / "result.json").unlink()
    finished = coda("bench", str(tiny), "--out", str(runs))
    assert finished.returncode == 2
    assert "data sha256" in finished.stderr.replace("\n", " ")
    assert "Traceback" not in finished.stderr
    with pytest.raises(RunConfigChanged, match="data"):
        report.rows(report.read_runs(runs))


def test_duplicate_method_names_are_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text("extends: pocket\nname: twice\nmethods:\n  coda-p: {}\n  coda-p: {}\n")
    finished = coda("bench", str(twice), "--dry-run")
    assert finished.returncode == 2
    assert "'coda-p' appears twice" in finished.stderr
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "from coda_prompt.research.methods import Method\nclass Mine(Method):\n    pass\n"
        )
    both = f"{tmp_path}/a.py:Mine,{tmp_path}/b.py:Mine"
    finished = coda("bench", "pocket", "--methods", both, "--dry-run")
    assert finished.returncode == 2
    assert "would be one row" in finished.stderr


def test_tensorboard_option_writes_tensorboard_files(tiny: Path, tmp_path: Path) -> None:
    finished = coda(
        "bench", str(tiny), "--methods", "coda-p", "--trials", "1", "--tensorboard", "--json",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    folder = tmp_path / "tiny" / "coda-p" / "trial-0" / "tensorboard"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert {"loss", "accuracy/mean", "accuracy/task 1"} <= set(events.Tags()["scalars"])
    result = json.loads((folder.parent / "result.json").read_text())
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [value for task in result["losses"] for value in task], rel=1e-5
    )


def test_rows_follow_from_the_accuracy_matrices(tiny_runs: tuple[Path, dict[str, Any]]) -> None:
    """Compute the numbers again without functions of the package."""
    out, printed = tiny_runs
    found: dict[str, dict[str, list[float]]] = {}
    for path in sorted(out.rglob("result.json")):
        result = json.loads(path.read_text())
        matrix, own = result["matrix"], result["own_classes"]
        last = len(matrix) - 1
        values = found.setdefault(path.parent.parent.name, {"A_N": [], "own": [], "F_max": []})
        values["A_N"].append(100 * sum(matrix[last]) / len(matrix))
        values["own"].append(100 * sum(own[last]) / len(own))
        if matrix[0][0] is not None:
            lost = [
                max(matrix[t][j] for t in range(j, last)) - matrix[last][j] for j in range(last)
            ]
            values["F_max"].append(100 * sum(lost) / last)
    for row in printed["rows"]:
        values = found[row["method"]]
        assert row["A_N"]["mean"] == pytest.approx(sum(values["A_N"]) / 2)
        assert row["own_classes"]["mean"] == pytest.approx(sum(values["own"]) / 2)
        if values["F_max"]:
            assert row["F_max"]["mean"] == pytest.approx(sum(values["F_max"]) / 2)
        if row["method"] != "coda-p":
            pairs = zip(values["A_N"], found["coda-p"]["A_N"], strict=True)
            assert row["difference"]["mean"] == pytest.approx(sum(a - b for a, b in pairs) / 2)
    differences = [row["difference"]["mean"] for row in printed["rows"] if row["difference"]]
    assert any(differences), "the sign matters"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda result: result["matrix"].pop(), "is not a run folder"),
        (lambda result: result["matrix"][2].__setitem__(0, 7.5), "is not a run folder"),
    ],
)
def test_inconsistent_result_is_refused(
    change: Any, words: str, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(tiny_runs[0], tmp_path / "runs")
    path = tmp_path / "runs" / "tiny" / "coda-p" / "trial-1" / "result.json"
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    with pytest.raises(CodaError, match=words):
        report.read_runs(tmp_path / "runs")


def test_duplicate_trial_is_refused(tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(tiny_runs[0], tmp_path / "runs")
    trial = tmp_path / "runs" / "tiny" / "coda-p" / "trial-1"
    shutil.copytree(trial, trial.with_name("trial-1 (copy)"))
    with pytest.raises(RunConfigChanged, match="twice"):
        report.rows(report.read_runs(tmp_path / "runs"))


def test_published_numbers_are_shown_only_for_the_benchmark_of_the_paper() -> None:
    def config(**changes: Any) -> dict[str, Any]:
        settings = [f"{path}={json.dumps(value)}" for path, value in changes.items()]
        benchmark = load_benchmark("imagenet-r-10", settings)
        (run,) = runs_of(benchmark.model_copy(update={"trials": 1}), ["coda-p"], Path("x"))
        resolved: dict[str, Any] = json.loads(json.dumps(run.config))
        return resolved

    assert report.published_row(config())["A"] == [75.45, 0.56]
    for change in (
        {"stream.tasks": 5},
        {"stream.validation": True},
        {"backbone": "pocket"},
        {"training.epochs": 1},
    ):
        assert report.published_row(config(**change)) is None


def test_report_contains_remarks_on_the_data(
    tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(tiny_runs[0], tmp_path / "runs")
    for path in (tmp_path / "runs").rglob("result.json"):
        result = json.loads(path.read_text())
        result |= {"notes": ["the split is seeded"], "untrained": ["cat"]}
        path.write_text(json.dumps(result))
    finished = coda("report", str(tmp_path / "runs"), "-o", str(tmp_path / "report"))
    assert finished.returncode == 0, finished.stderr
    for name in ("report.md", "index.html"):
        text = (tmp_path / "report" / name).read_text("utf-8")
        assert "the split is seeded" in text
        assert "no training images: cat" in text


def test_seed_of_a_trial_and_path_as_a_name_are_refused(tiny: Path) -> None:
    with pytest.raises(BadOption, match="first_seed"):
        load_benchmark(str(tiny), ["training.seed=5"])
    with pytest.raises(BadOption):
        load_benchmark(str(tiny), ["name=../evil"])


def test_csv_has_one_number_per_cell() -> None:
    row = {
        "method": "coda-p",
        "A_N": {"mean": 70.0, "std": 1.0},
        "F_paper": {"mean": None, "std": None},
        "difference": None,
        "published": {"A": [75.5, 0.5], "F": [1.5, 0.1], "params": [4.6, 104.6]},
    }
    other = {**row, "method": "ft", "difference": {"mean": -1.0, "interval": (-2.0, 0.5)}}
    first, second = csv.DictReader(io.StringIO(tables.csv_text([row, other])))
    assert first["published.A.mean"] == "75.5"
    assert first["A_N.minus_published"] == "-5.5"
    assert "difference" not in first
    assert (second["difference.interval.low"], second["difference.interval.high"]) == (
        "-2.0",
        "0.5",
    )
    assert first["published.params.final"] == "104.6"


def row_of(method: str, accuracy: float | None, forgetting: float) -> dict[str, Any]:
    """A row of a table with the given final accuracy and forgetting."""
    names = (*tables.ACCURACY, *tables.STREAM, *tables.COST)
    measure = {name: {"mean": 1.0, "std": 0.0} for name in names}
    measure["A_N"] = {"mean": accuracy, "std": 0.5, "interval": (accuracy or 0.0, 90.0)}
    measure["F_paper"] = {"mean": forgetting, "std": 0.0}
    return {"method": method, "trials": 3, **measure, "difference": None, "published": None}


def test_tables_are_sorted_by_accuracy_and_the_best_is_bold() -> None:
    rows = [row_of("ft", 12.0, 9.0), row_of("upper-bound", 80.0, 0.0), row_of("coda-p", 61.0, 3.0)]
    table = tables.full([*rows, row_of("ncm", None, 4.0)], [])[0]
    assert [line[0] for line in table.cells] == ["upper-bound", "coda-p", "ft", "ncm"]
    accuracy, forgetting = table.heads.index("A_N %"), table.heads.index("F %")
    assert {cell for cell in table.best if cell[1] in (accuracy, forgetting)} == {
        (1, accuracy),
        (1, forgetting),
    }
    assert "**61.0 ± 0.5**" in table.markdown()
    assert r"\textbf{61.0 $\pm$ 0.5}" in table.latex()
    assert "<b>61.0 ± 0.5</b>" in table.html()
    assert "61.0 to 90.0" in table.markdown()


def test_best_value_is_bold_in_tables_of_transfer_and_domains() -> None:
    rows = [row_of("ft", 12.0, 9.0), row_of("upper-bound", 80.0, 0.0), row_of("coda-p", 61.0, 3.0)]
    for row, transfer in zip(rows, (-40.0, 0.0, -5.0), strict=True):
        row["BWT"] = {"mean": transfer, "std": 0.0}
    results = {"ft": {"photo": 0.5, "sketch": 0.1}, "coda-p": {"photo": 0.4, "sketch": 0.2}}
    runs = [
        report.FinishedRun(name, 0, {}, {"domains": domains}, {}, Path(name))
        for name, domains in results.items()
    ]
    shown = tables._measures("T", rows, ["method", *tables.STREAM])
    transfer = shown.heads.index("BWT %")
    assert {cell for cell in shown.best if cell[1] == transfer} == {(2, transfer)}
    assert tables._accuracy_by_domain(runs).best == {(0, 1), (1, 2)}


def test_columns_without_a_value_are_left_out() -> None:
    table = tables.Table("T", ["method", "a", "b"], [["x", "-", "1"], ["y", "-", "2"]],
                         frozenset({(1, 2)}))  # fmt: skip
    shown = table.without_empty_columns()
    assert (shown.heads, shown.cells, shown.best) == (
        ["method", "b"], [["x", "1"], ["y", "2"]], {(1, 1)},
    )  # fmt: skip
    assert not tables.Table("T", ["method", "a"], [["x", "-"]]).without_empty_columns().cells


def test_every_measure_is_explained_in_the_page() -> None:
    assert {*tables.HEADS.values()} - {"method"} <= tables.MEANINGS.keys()
    text = tables.full([row_of("ft", 12.0, 9.0)], [])[0].html()
    assert 'title="Forgetting as the CODA-Prompt paper computes it; lower is better."' in text

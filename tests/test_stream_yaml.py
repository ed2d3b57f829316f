"""Streams of YAML files, from the command line."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import PATIENCE
from small import coda, comparable, started_coda

from coda_prompt.bench.config import load_benchmark, preset_rows


def written(tiny: Path, path: Path, stream: dict[str, Any], **fields: Any) -> Path:
    """Write a benchmark like `tiny` with another stream."""
    benchmark = yaml.safe_load(tiny.read_text())
    benchmark |= {"name": "mine", "trials": 1, "stream": stream, **fields}
    path.write_text(yaml.safe_dump(benchmark))
    return path


def test_a_stream_of_a_users_file(tiny: Path, tmp_path: Path) -> None:
    stream = {
        "class_lists": [["a", "b", "c"], ["d", "e", "f"]],
        "chunk": 9,
        "budget": 2,
    }
    path = written(tiny, tmp_path / "mine.yaml", stream)
    out = str(tmp_path / "runs")
    found = coda("bench", str(path), "--methods", "ncm,coda-p", "--out", out, "--json")
    assert found.returncode == 0, found.stderr
    for row in json.loads(found.stdout)["rows"]:
        assert 0 <= row["A_AUC"]["mean"] <= 100
        assert row["total_gmac"]["mean"] > 0
        assert row["BWT"]["mean"] is not None
    result = json.loads(next((tmp_path / "runs").rglob("ncm/*/result.json")).read_text())
    assert result["train_images"] == [9, 9, 9, 9]
    assert [group["last"] for group in result["groups"]] == [1, 3]
    report = coda("report", out, "-o", str(tmp_path / "report"))
    assert report.returncode == 0, report.stderr
    pictures = {path.stem for path in (tmp_path / "report").rglob("*.png")}
    assert {"anytime", "cost"} <= pictures


def test_a_wrong_field_of_a_file_is_named(tiny: Path, tmp_path: Path) -> None:
    path = written(tiny, tmp_path / "mine.yaml", {"tasks": 2, "chunks": 4})
    found = coda("bench", str(path))
    assert found.returncode == 2
    assert "Did you mean 'stream.chunk'?" in found.stderr
    path = written(tiny, tmp_path / "mine.yaml", {"chunk": 4})
    found = coda("bench", str(path))
    assert found.returncode == 2
    assert "give exactly one of tasks, classes_per_task and class_lists" in found.stderr


@pytest.mark.slow
@pytest.mark.posix
def test_a_killed_online_and_budgeted_run_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path
) -> None:
    stream = {"tasks": 2, "chunk": 9, "budget": 20}
    path = written(tiny, tmp_path / "mine.yaml", stream, training={"epochs": 30, "batch_size": 3})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = ("bench", str(path), "--methods", "coda-p", "--out")
    assert coda(*command, str(whole)).returncode == 0
    kills = 0
    for limit in range(1, 12):
        process = started_coda(*command, str(killed))
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(killed.rglob("checkpoint-*.json"))) and limit < 4:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait()
        if list(killed.rglob("result.json")):
            break
    assert kills
    assert comparable(killed) == comparable(whole)


def test_every_preset_is_listed_with_what_it_measures() -> None:
    rows = {row["preset"]: row for row in preset_rows()}
    assert all(row["description"] for row in rows.values())
    kinds = ("b50", "domains", "classes-and-domains", "few-shot", "online", "blurry", "repeated",
             "long-tailed", "long", "budget")  # fmt: skip
    for kind in kinds:
        assert rows[f"pocket-{kind}"]["minutes"] is not None
        assert load_benchmark(f"pocket-{kind}").trials == 3
    assert rows["imagenet-r-10"]["minutes"] is None

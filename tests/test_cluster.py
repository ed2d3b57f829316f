"""Runs on a Ray cluster give the same numbers."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from processes import ENVIRONMENT, run, started, wait_for_checkpoint
from small import CODA, coda, comparable, micro
from typer.testing import CliRunner

from coda_prompt.cli import app
from coda_prompt.errors import BadOption

MORE = ("--methods", "coda-p,upper-bound", "--trials", "2")


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two trials."""
    out = tmp_path_factory.mktemp("plain")
    finished = run("bench", *micro(tiny, out), *MORE)
    assert finished.returncode == 0, finished.stderr
    return out


@pytest.mark.posix
def test_ray_cluster_gives_the_same_report_after_a_worker_is_killed(
    tiny: Path, plain: Path, tmp_path: Path
) -> None:
    command = ["bench", *micro(tiny, tmp_path), *MORE, "--executor", "ray"]
    with started(*command) as process:
        wait_for_checkpoint(tmp_path, process)
        owner = next(tmp_path.rglob(".lock.owner"))
        worker = int(owner.read_text())
        assert worker != process.pid
        os.kill(worker, signal.SIGKILL)
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    assert comparable(tmp_path) == comparable(plain)
    assert report(tmp_path) == report(plain)


CLUSTER = """
import signal, ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
print(ray.get_runtime_context().gcs_address, flush=True)
signal.pause()
"""


@pytest.mark.posix
@pytest.mark.slow
def test_runs_on_a_running_cluster_are_interrupted_and_resumed(
    tiny: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs on one CPU, all polling for a shutdown, never run at the same time."""
    monkeypatch.setitem(ENVIRONMENT, "RAY_AUTH_MODE", "token")
    monkeypatch.setitem(ENVIRONMENT, "RAY_AUTH_TOKEN", secrets.token_hex(32))
    with started(program=CLUSTER) as cluster:
        while not (address := cluster.output()[0].strip()):
            assert cluster.poll() is None, cluster.output()
            time.sleep(0.05)
        options = (*MORE, "--executor", "ray", "--address", address)
        command = ["bench", *micro(tiny, tmp_path), *options]
        with started(*command) as process:
            wait_for_checkpoint(tmp_path, process)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate()
            assert process.returncode == 130, stderr
        done = set(tmp_path.rglob("result.json"))
        assert list(tmp_path.rglob("checkpoint-*"))
        finished = run(*command)
        assert finished.returncode == 0, finished.stderr
        assert cluster.poll() is None, "the command must not stop a cluster it did not start"
    assert comparable(tmp_path) == comparable(plain)
    ends = [
        (result.with_name("environment.json").stat().st_mtime, result.stat().st_mtime)
        for result in set(tmp_path.rglob("result.json")) - done
    ]
    assert len(ends) > 2
    for (_, end), (start, _) in itertools.pairwise(sorted(ends)):
        assert start >= end


def report(runs: Path) -> dict[str, Any]:
    finished = coda("report", str(runs), "-o", str(runs / "report"), "--json")
    assert finished.returncode == 0, finished.stderr
    parts: dict[str, Any] = json.loads(finished.stdout)["parts"]
    for rows in parts.values():
        for row in rows:
            for name in ("seconds", "memory_mib"):
                row.pop(name, None)
    return parts


def test_missing_ray_names_the_extra_to_install(tiny: Path, tmp_path: Path) -> None:
    program = f"import sys; sys.modules['ray'] = None; {CODA}"
    finished = Forked(program, "bench", *micro(tiny, tmp_path), "--executor", "ray").completed()
    assert finished.returncode == 2
    assert "coda-prompt[ray]" in finished.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--executor", "ray", "--address", "127.0.0.1:1"), "nothing answers"),
        (("--executor", "ray", "--address", "127.0.0.1:99999999"), "nothing answers"),
        (("--executor", "ray"), "nothing answers at 127.0.0.1:2"),
        (("--executor", "ray", "--jobs", "2"), "as many runs at a time as fit"),
        (("--address", "127.0.0.1:1"), "add --executor ray"),
        (("--gpus", "1"), "add --executor ray"),
        (("--cpus", "1"), "add --executor ray"),
        (("--out", "s3://bucket/runs"), "is remote; name a local folder"),
    ],
)
def test_invalid_combinations_of_options_are_refused(
    more: tuple[str, ...], words: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    ended = CliRunner().invoke(app, ["bench", *micro(tiny, tmp_path), *more])
    assert isinstance(ended.exception, BadOption)
    assert words in str(ended.exception)

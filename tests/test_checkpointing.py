"""Nothing lost: a training that was stopped, however, ends with the bits of one that was not."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small import AUGMENTED_VIEWS, coda, patterns, started_coda, tiny_vit

from coda_prompt import methods
from coda_prompt.bench.runs import CHECKPOINTS, RESULT
from coda_prompt.data.stream import Stream, make_stream
from coda_prompt.errors import CorruptFile, Interrupted
from coda_prompt.methods import METHODS, Method
from coda_prompt.training.checkpointing import Checkpointer
from coda_prompt.training.engine import Engine
from coda_prompt.training.settings import Result, Training

OPTIONS: dict[str, dict[str, Any]] = {"er-5000": {"buffer": 8}, "ranpac": {"width": 40}}
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3}


def stream() -> Stream:
    return make_stream(patterns(6, 7, test=4), tasks=3)


def made(name: str) -> Method:
    return methods.make(name, tiny_vit(), **OPTIONS.get(name, {}))


def kept_run(
    folder: Path, name: str, stop: Callable[[], bool] = lambda: False, **training: Any
) -> tuple[Method, Result]:
    """One go at the run in this folder, kept at every step."""
    method, result = made(name), Result.empty([8] * 3)

    def notes() -> dict[str, Any]:
        matrices = {"matrix": result.matrix.tolist(), "own": result.own_classes.tolist()}
        return {"result": json.loads(json.dumps({**matrices, "losses": result.losses}))}

    checkpointer = Checkpointer(folder, {"name": name}, interval=0, stop=stop, notes=notes)
    if checkpointer.latest is not None:
        held = checkpointer.latest.notes["result"]
        result.matrix[:], result.own_classes[:] = held["matrix"], held["own"]
        result.losses[:] = held["losses"]
    engine = Engine(AUGMENTED_VIEWS, Training(**TRAINING | training))
    return method, engine.run(method, stream(), checkpointer=checkpointer, result=result)


def whole_run(name: str, **training: Any) -> tuple[Method, Result]:
    method = made(name)
    return method, Engine(AUGMENTED_VIEWS, Training(**TRAINING | training)).run(method, stream())


def assert_same(found: tuple[Method, Result], expected: tuple[Method, Result]) -> None:
    mine, other = found[0].learned_state(), expected[0].learned_state()
    assert mine.keys() == other.keys()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    for field in ("matrix", "own_classes"):
        matrices = [getattr(result, field) for _, result in (found, expected)]
        assert np.array_equal(*matrices, equal_nan=True)
    assert found[1].losses == expected[1].losses


@pytest.mark.parametrize("queries", ["exact", "cached"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("coda-p-s",)])
def test_a_training_stopped_again_and_again_ends_with_the_same_bits(
    name: str, queries: str, tmp_path: Path
) -> None:
    if queries == "cached" and not methods.find(name).type.needs_queries:
        pytest.skip("needs no queries")
    expected = whole_run(name, queries=queries)
    for attempt in range(30):
        calls = 0

        def tired() -> bool:
            nonlocal calls
            calls += 1
            return calls == 2 + attempt % 3  # noqa: B023

        try:
            found = kept_run(tmp_path, name, tired, queries=queries)
            break
        except Interrupted:
            continue
    assert_same(found, expected)
    trains = not methods.find(name).type.closed_form
    assert attempt > 0 or not trains, "it was stopped"


def stopped(folder: Path, name: str, steps: int) -> None:
    left = steps

    def tired() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    with pytest.raises(Interrupted):
        kept_run(folder, name, tired)


def newest(folder: Path, kind: str) -> Path:
    return sorted(folder.glob(f"{kind}-*"))[-1]


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "emptied"])
@pytest.mark.parametrize("kind", ["checkpoint", "training", "learned"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    kind: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path, "coda-p", 7)  # in the second task
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2, "the last two are kept"
    path = newest(tmp_path, kind)
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"flipped": content, "cut": content[:-9], "emptied": b""}[how])
    with caplog.at_level(logging.WARNING):
        found = kept_run(tmp_path, "coda-p")
    if not (kind == "checkpoint" and how == "removed"):
        assert "trying an earlier checkpoint" in caplog.text
    assert_same(found, whole_run("coda-p"))


def test_a_checkpoint_of_another_training_is_not_taken(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 3)
    assert Checkpointer(tmp_path, {"name": "coda-p"}).latest is not None
    assert Checkpointer(tmp_path, {"name": "ft"}).latest is None


def test_tasks_write_only_what_they_add(tmp_path: Path) -> None:
    """The learned state of old tasks is not written again; that of a network is, and replaced."""
    sizes = {}
    for name in ("coda-p", "ft"):
        kept_run(tmp_path / name, name)
        files = sorted((tmp_path / name).glob("learned-*"))
        sizes[name] = [file.stat().st_size for file in files]
    assert len(sizes["coda-p"]) == 3
    assert sizes["coda-p"][2] < 1.1 * sizes["coda-p"][0]
    assert len(sizes["ft"]) <= 2, "of the last two checkpoints"


@pytest.mark.parametrize(
    "forged",
    [{"task": 99}, {"epoch": 99}, {"step": 99}, {"step": 10**30}, {"losses": [0.1] * 9}],
    ids=str,
)
def test_a_forged_place_is_refused(forged: dict[str, Any], tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    for path in tmp_path.glob("checkpoint-*"):
        held = json.loads(json.loads(path.read_text())["content"]) | forged
        text = json.dumps(held)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"sha256": digest, "content": text}))
    with pytest.raises(CorruptFile):
        kept_run(tmp_path, "coda-p")


@pytest.mark.parametrize("name", ["checkpoint-old.json", "checkpoint-²²²²²².json"])
def test_a_stray_file_is_none_of_ours(name: str, tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    (tmp_path / name).write_text("{}")
    assert_same(kept_run(tmp_path, "coda-p"), whole_run("coda-p"))
    assert len(list(tmp_path.glob("checkpoint-0*"))) == 2


def test_a_log_that_is_a_link_is_not_written_through(tiny: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    place = tmp_path / "tiny" / "coda-p" / "trial-0"
    place.mkdir(parents=True)
    (place / "events.jsonl").symlink_to(victim)
    refused = coda("bench", *micro(tiny, tmp_path))
    assert refused.returncode == 2
    assert "symbolic link" in refused.stderr.replace("\n", " ")
    assert victim.read_text() == "mine"


def test_paths_in_a_checkpoint_cannot_leave_the_folder(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    for path in tmp_path.glob("checkpoint-*"):
        text = path.read_text().replace("training-", "../training-")
        path.write_text(text)
    assert Checkpointer(tmp_path, {"name": "coda-p"}).latest is None


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    others = [tmp_path / name for name in (".DS_Store", "training-of-mine.safetensors", ".a.tmp")]
    for path in others:
        path.touch()
    checkpointer = Checkpointer(tmp_path, {"name": "coda-p"})
    checkpointer.remove()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "mine", "coda-p", 7)
    held = sorted((tmp_path / "mine").iterdir())
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    with pytest.raises(CorruptFile, match="symbolic link"):
        kept_run(tmp_path / "linked", "coda-p")
    assert sorted((tmp_path / "mine").iterdir()) == held


@pytest.mark.parametrize("how", ["gone", "cut", "whole", "nan"])
def test_an_optimizer_that_cannot_be_is_refused(how: str, tmp_path: Path) -> None:
    """With all hashes right, as a stranger would make it."""
    stopped(tmp_path, "coda-p", 7)
    path = newest(tmp_path, "training")
    tensors = load_file(path)
    average = next(name for name in sorted(tensors) if name.endswith(".exp_avg"))
    if how == "gone":
        del tensors[average]
    elif how == "cut":
        tensors[average] = tensors[average][:1].clone()
    elif how == "whole":
        tensors[average] = tensors[average].long()
    else:
        tensors[f"{average}_sq"].fill_(torch.nan)
    save_file(tensors, path)
    checkpoint = newest(tmp_path, "checkpoint")
    content = json.loads(json.loads(checkpoint.read_text())["content"])
    content["training"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    content["training"]["size"] = path.stat().st_size
    text = json.dumps(content)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
    checkpoint.write_text(json.dumps(whole))
    with pytest.raises(CorruptFile, match="optimizer state does not fit"):
        kept_run(tmp_path, "coda-p")


# -- runs of a benchmark


def comparable(out: Path) -> dict[str, Any]:
    """All results and logs below a folder but for times and memory."""
    found = {}
    for path in sorted(out.rglob(RESULT)):
        result = json.loads(path.read_text())
        for name in ("seconds", "peak_memory_bytes"):
            del result[name]
        log = (path.parent / "events.jsonl").read_text()
        found[str(path.parent.relative_to(out))] = (result, log)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole")
    finished = coda("bench", *micro(tiny, out))
    assert finished.returncode == 0, finished.stderr
    assert not list(out.rglob("checkpoint-*")), "nothing is left over"
    return comparable(out)


def micro(tiny: Path, out: Path) -> list[str]:
    """A benchmark of about ten seconds."""
    settings = ("training.epochs=6", "training.batch_size=3", "trials=1")
    return [str(tiny), "--out", str(out), *(part for each in settings for part in ("--set", each))]


def killed_once(arguments: list[str], out: Path, moment: float) -> bool:
    """Kill the command so many seconds after its first sign of life; whether that was in time."""
    process = started_coda("bench", *arguments)
    deadline = time.monotonic() + 120
    while not list(out.rglob("events.jsonl")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def survives_kills(
    tiny: Path, out: Path, expected: dict[str, Any], moments: list[float], *more: str
) -> None:
    arguments = [*micro(tiny, out), *more]
    killed = [killed_once(arguments, out, moment) for moment in moments]
    assert any(killed)
    finished = coda("bench", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert comparable(out) == expected


def test_a_benchmark_that_is_killed_ends_as_if_it_had_not_been(
    tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    survives_kills(tiny, tmp_path, uninterrupted, [0.3, 1.0, 2.0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_benchmark_that_is_killed_at_any_moment(
    seed: int, tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    moments = [random.Random(seed * 10 + each).uniform(0, 3) for each in range(3)]
    jobs = ("--jobs", "2") if seed % 2 else ()
    survives_kills(tiny, tmp_path, uninterrupted, moments, *jobs)


@pytest.mark.parametrize(
    ("kind", "jobs"),
    [(signal.SIGINT, "1"), (signal.SIGTERM, "2")],
)
def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(
    kind: signal.Signals, jobs: str, tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    arguments = [*micro(tiny, tmp_path), "--jobs", jobs]
    process = started_coda("bench", *arguments, start_new_session=True)
    while not list(tmp_path.rglob("checkpoint-*")) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, kind)  # as a terminal and `timeout` do
    try:
        _, told = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 130, told
    assert "run the same command again to resume" in told
    assert "Traceback" not in told
    assert list(tmp_path.rglob(f"{CHECKPOINTS}/checkpoint-*"))
    finished = coda("bench", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert comparable(tmp_path) == uninterrupted


def test_two_processes_on_one_folder(tiny: Path, tmp_path: Path) -> None:
    longer = ("--set", "training.epochs=200")
    first = started_coda("bench", *micro(tiny, tmp_path), *longer)
    while not list(tmp_path.rglob("checkpoint-*")) and first.poll() is None:
        time.sleep(0.01)
    second = coda("bench", *micro(tiny, tmp_path), *longer)
    first.kill()
    first.communicate()
    assert second.returncode == 2, second.stderr
    assert f"pid {first.pid}" in second.stderr


def test_a_full_disk_keeps_the_last_good_state(
    tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    """A limit on the size of files stands for the disk; without it the run goes on."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    program = limited + "from coda_prompt.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", *micro(tiny, tmp_path)]
    full = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    finished = coda("bench", *micro(tiny, tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert comparable(tmp_path) == uninterrupted

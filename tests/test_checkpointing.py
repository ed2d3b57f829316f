"""Checkpoints: interrupted training resumes and ends bit-identical."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import PATIENCE, Forked
from safetensors.torch import load_file, save_file
from small import (
    AUGMENTED_VIEWS,
    CODA,
    brief,
    coda,
    comparable,
    interrupted_repeatedly,
    micro,
    patterns,
    quick_options,
    started_coda,
    tiny_vit,
)

from coda_prompt.errors import CorruptFile, Interrupted
from coda_prompt.research import methods
from coda_prompt.research.bench.runs import CHECKPOINTS
from coda_prompt.research.methods import METHODS, Method
from coda_prompt.research.streams.stream import Stream, make_stream
from coda_prompt.research.training.checkpointing import Checkpointer, TrainingPosition
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.settings import Event, Result, Training

OPTIONS: dict[str, dict[str, Any]] = {"er-5000": {"buffer": 8}, "ranpac": {"width": 40}}
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3}


def stream() -> Stream:
    return make_stream(patterns(6, 7, test=4), tasks=3)


def made(name: str) -> Method:
    return methods.make(name, tiny_vit(), **OPTIONS.get(name, quick_options(name)))


def kept_run(
    folder: Path, name: str, stop: Callable[[], bool] = lambda: False, **training: Any
) -> tuple[Method, Result]:
    """Run or resume in this folder, with a checkpoint after every step."""
    method, result = made(name), Result.empty([8] * 3)

    def notes() -> dict[str, Any]:
        matrices = {"matrix": result.matrix.tolist(), "own": result.own_classes.tolist()}
        return {"result": json.loads(json.dumps({**matrices, "losses": result.losses}))}

    checkpointer = Checkpointer(folder, {"name": name}, interval=0, notes=notes)
    if checkpointer.latest is not None:
        saved = checkpointer.latest.notes["result"]
        result.matrix[:], result.own_classes[:] = saved["matrix"], saved["own"]
        result.losses[:] = saved["losses"]
    stopping = False

    def ask_after_a_step(event: Event) -> None:
        nonlocal stopping
        stopping = stopping or (event.kind == "step" and stop())

    engine = Engine(
        AUGMENTED_VIEWS,
        Training(**TRAINING | training),
        on_event=ask_after_a_step,
        should_stop=lambda: stopping,
    )
    return method, engine.run(method, stream(), checkpointer=checkpointer, result=result)


@functools.cache
def whole_run(name: str, **training: Any) -> tuple[Method, Result]:
    """The same without checkpoints; tests must not change it."""
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
def test_a_training_interrupted_repeatedly_ends_bit_identical(
    name: str, queries: str, tmp_path: Path
) -> None:
    if queries == "cached" and not methods.find(name).type.needs_queries:
        pytest.skip("needs no queries")
    expected = whole_run(name, queries=queries)
    found, interruptions = interrupted_repeatedly(
        lambda stop: kept_run(tmp_path, name, stop, queries=queries), first=2, attempts=30
    )
    assert_same(found, expected)
    trains = not methods.find(name).type.closed_form
    assert interruptions > 0 or not trains, "it was stopped"


@functools.cache
def files_of_stopped_run(name: str, steps: int) -> dict[str, bytes]:
    left = steps

    def request_stop() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(Interrupted):
            kept_run(Path(folder), name, request_stop)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def stopped(folder: Path, name: str, steps: int) -> None:
    """Make a folder of checkpoints as a run leaves it that was stopped after `steps` steps."""
    folder.mkdir(exist_ok=True)
    for file, content in files_of_stopped_run(name, steps).items():
        (folder / file).write_bytes(content)


def newest(folder: Path, kind: str) -> Path:
    return sorted(folder.glob(f"{kind}-*"))[-1]


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "emptied"])
@pytest.mark.parametrize("kind", ["checkpoint", "training", "learned"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
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


def test_a_checkpoint_of_another_training_is_not_used(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 3)
    assert Checkpointer(tmp_path, {"name": "coda-p"}).latest is not None
    assert Checkpointer(tmp_path, {"name": "ft"}).latest is None


@pytest.mark.parametrize(
    "forged",
    [{"task": 99}, {"epoch": 99}, {"step": 99}, {"step": 10**30}, {"losses": [0.1] * 9}],
    ids=str,
)
def test_a_forged_position_is_refused(forged: dict[str, Any], tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    for path in tmp_path.glob("checkpoint-*"):
        content = json.loads(json.loads(path.read_text())["content"]) | forged
        text = json.dumps(content)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"sha256": digest, "content": text}))
    with pytest.raises(CorruptFile):
        kept_run(tmp_path, "coda-p")


@pytest.mark.parametrize("name", ["checkpoint-old.json", "checkpoint-²²²²²².json"])
def test_files_with_similar_names_are_ignored(name: str, tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    (tmp_path / name).write_text("{}")
    assert_same(kept_run(tmp_path, "coda-p"), whole_run("coda-p"))
    assert len(list(tmp_path.glob("checkpoint-0*"))) == 2


@pytest.mark.posix
def test_a_log_that_is_a_link_is_not_written_through(tiny: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    place = tmp_path / "tiny" / "coda-p" / "trial-0"
    place.mkdir(parents=True)
    (place / "events.jsonl").symlink_to(victim)
    refused = coda("bench", *micro(tiny, tmp_path), "--methods", "coda-p")
    assert refused.returncode == 2
    assert "symbolic link" in refused.stderr.replace("\n", " ")
    assert victim.read_text() == "mine"


def test_paths_in_a_checkpoint_cannot_leave_the_folder(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    for path in tmp_path.glob("checkpoint-*"):
        text = path.read_text().replace("training-", "../training-")
        path.write_text(text)
    assert Checkpointer(tmp_path, {"name": "coda-p"}).latest is None


def test_remove_leaves_foreign_files_alone(tmp_path: Path) -> None:
    stopped(tmp_path, "coda-p", 7)
    others = [tmp_path / name for name in (".DS_Store", "training-of-mine.safetensors", ".a.tmp")]
    for path in others:
        path.touch()
    checkpointer = Checkpointer(tmp_path, {"name": "coda-p"})
    checkpointer.remove()
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.posix
def test_a_symbolic_link_as_folder_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "mine", "coda-p", 7)
    files = sorted((tmp_path / "mine").iterdir())
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    with pytest.raises(CorruptFile, match="symbolic link"):
        kept_run(tmp_path / "linked", "coda-p")
    assert sorted((tmp_path / "mine").iterdir()) == files


@pytest.mark.parametrize("how", ["gone", "cut", "whole", "nan"])
def test_a_forged_optimizer_state_is_refused(how: str, tmp_path: Path) -> None:
    """All hashes are right, as in a file made by an attacker."""
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_with_parameter_groups_resumes_in_any_stage(
    name: str, stage: int, tmp_path: Path
) -> None:
    def begin() -> tuple[Method, torch.optim.Optimizer]:
        method = made("coda-p")
        method.begin_task(brief(method, new=2))
        first, *others = method.trainable_parameters()
        groups = [{"params": others}, {"params": [first], "lr": 0.01}]
        return method, OPTIMIZERS[name](groups)

    def step(method: Method, optimizer: torch.optim.Optimizer) -> None:
        for parameter in method.trainable_parameters():
            parameter.grad = torch.cos(parameter.detach())
        optimizer.step()

    method, optimizer = begin()
    step(method, optimizer)
    method.task_sizes.append([5])  # as a stage that changes a buffer
    position = TrainingPosition(stage=stage, epoch=1, losses=[0.5])
    Checkpointer(tmp_path, {}).save_after_step(method, optimizer, position)
    step(method, optimizer)
    resumed, new_optimizer = begin()
    assert Checkpointer(tmp_path, {}).restore_training(resumed, new_optimizer) == position
    step(resumed, new_optimizer)
    for mine, other in zip(
        resumed.trainable_parameters(), method.trainable_parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    assert len(resumed.task_sizes.rows) == (2 if stage else 1)


# -- runs of a benchmark


def killed_once(arguments: list[str], out: Path, moment: float) -> bool:
    """Kill the command `moment` seconds after its first output; whether that was in time."""
    process = started_coda("bench", *arguments)
    deadline = time.monotonic() + PATIENCE
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


def test_a_killed_benchmark_resumes_and_ends_with_the_same_results(
    tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    survives_kills(tiny, tmp_path, uninterrupted, [0.3, 0.6, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_benchmark_killed_at_any_moment_ends_with_the_same_results(
    seed: int, tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    moments = [random.Random(seed * 10 + each).uniform(0, 2) for each in range(3)]
    jobs = ("--jobs", "2") if seed % 2 else ()
    survives_kills(tiny, tmp_path, uninterrupted, moments, *jobs)


@pytest.mark.posix
@pytest.mark.parametrize(
    ("kind", "jobs"),
    [(signal.SIGINT, "1"), (signal.SIGTERM, "2")],
)
def test_ctrl_c_checkpoints_the_step_and_says_how_to_resume(
    kind: signal.Signals, jobs: str, tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    arguments = micro(tiny, tmp_path)
    process = started_coda("bench", *arguments, "--jobs", jobs, new_session=True)
    while not list(tmp_path.rglob("checkpoint-*")) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, kind)  # as a terminal and `timeout` do
    try:
        _, printed = process.communicate()
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 130, printed
    assert "Resume with: coda bench" in printed
    assert "Traceback" not in printed
    assert list(tmp_path.rglob(f"{CHECKPOINTS}/checkpoint-*"))
    finished = coda("bench", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert comparable(tmp_path) == uninterrupted


def test_a_second_process_on_the_same_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    longer = ("--set", "training.epochs=200")
    first = started_coda("bench", *micro(tiny, tmp_path), *longer)
    while not list(tmp_path.rglob("checkpoint-*")) and first.poll() is None:
        time.sleep(0.01)
    second = coda("bench", *micro(tiny, tmp_path), *longer)
    first.kill()
    first.communicate()
    assert second.returncode == 2, second.stderr
    assert f"pid {first.pid}" in second.stderr


@pytest.mark.posix
def test_a_run_resumes_after_a_full_disk(
    tiny: Path, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    """A limit on file sizes simulates the disk; without it the run resumes."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    full = Forked(limited + CODA, "bench", *micro(tiny, tmp_path)).completed()
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    finished = coda("bench", *micro(tiny, tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert comparable(tmp_path) == uninterrupted

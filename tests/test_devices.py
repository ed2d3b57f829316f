"""Training on several ranks gives the numbers of one."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import (
    ENVIRONMENT,
    TORCHRUN,
    run,
    run_command,
    run_ranks,
    started_ranks,
    wait_for_checkpoint,
)
from safetensors.torch import load_file
from small import CODA, comparable
from torch.testing import assert_close

from coda_prompt.errors import BadOption
from coda_prompt.research.bench.launcher import RunOptions
from coda_prompt.research.training.devices import Devices

# -- one training on two processes


def bench(tiny: Path, out: Path, *more: str) -> list[str]:
    """Processes have unequally many images, parts of a batch, and queries they know already.

    Five images a step are shares of three and two, in parts of two; 9 test images of 5 and 4.
    """
    settings = ("stream.tasks=2", "training.batch_size=5", "training.micro_batch=2",
                "training.epochs=2", "training.views=1")  # fmt: skip
    given = [part for setting in settings for part in ("--set", setting)]
    given += ["--trials", "1", "--precision", "64-true", "--keep", "--json"]
    return ["bench", str(tiny), "--out", str(out), *given, *more]


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    finished = run(*bench(tiny, out))
    assert finished.returncode == 0, finished.stderr
    return out


def assert_same_training(found: Path, expected: Path, rows: int, *, worst: float = 1e-9) -> None:
    """The same matrix; losses and parameters, in float64, to `worst`."""
    results = sorted(found.rglob("result.json"))
    assert len(results) == rows
    for result in results:
        twin = expected / result.relative_to(found)
        mine, other = (json.loads(path.read_text()) for path in (result, twin))
        assert mine["matrix"] == other["matrix"]
        assert mine["own_classes"] == other["own_classes"]
        np.testing.assert_allclose(mine["losses"], other["losses"], rtol=worst)
        learned, known = (
            load_file(path.with_name("learned.safetensors")) for path in (result, twin)
        )
        assert learned.keys() == known.keys()
        for name, tensor in known.items():
            assert_close(learned[name], tensor, rtol=worst, atol=worst, msg=name)
            off = (learned[name] - tensor).double().abs()
            assert not off.numel() or float(off.median()) < 1e-10


@pytest.mark.parametrize(
    ("start", "more", "ranks"),
    [
        (partial(run_command, *TORCHRUN), (), 2),
        (partial(run_ranks, 3, CODA), ("--methods", "coda-p,ncm"), 3),
    ],
    ids=["torchrun", "three"],
)
def test_several_ranks_learn_what_one_learns(
    start: Callable[..., Any], more: tuple[str, ...], ranks: int, tiny: Path, alone: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    finished, rows = start(*bench(tiny, tmp_path, *more)), 2 if more else 3
    assert finished.returncode == 0, finished.stderr
    assert len(json.loads(finished.stdout)["rows"]) == rows, "one process speaks"
    assert "Warning" not in finished.stderr
    assert_same_training(tmp_path, alone, rows)
    report = json.loads(next(tmp_path.rglob("environment.json")).read_text())
    assert report["processes"] == ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "worst"),
    [
        (345, 1e-9),  # 5 steps a task: shares of 173 and 172, of 110 and 110
        (16, 1e-4),  # 100 steps: where a gradient is nothing but rounding, Adam makes a step of it
    ],
)
def test_pocket_on_two_ranks_equals_one(batch: int, worst: float, tmp_path: Path) -> None:
    settings = ("--set", "training.epochs=1", "--set", f"training.batch_size={batch}")
    rows = ("--methods", "coda-p,ncm", "--trials", "1")
    given = ("bench", "pocket", *settings, *rows, "--precision", "64-true", "--keep", "--json")
    plain = (sys.executable, "-m", "coda_prompt")
    for start, out in ((plain, "one"), (TORCHRUN, "two")):
        command = [*start, *given, "--out", str(tmp_path / out)]
        subprocess.run(command, check=True, timeout=1800, capture_output=True, env=ENVIRONMENT)
    assert_same_training(tmp_path / "two", tmp_path / "one", 2, worst=worst)


def on_two_ranks(*lines: str) -> str:
    """Run lines on both ranks, with a `fabric` and a `method`; return what rank 0 printed."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from small import AUGMENTED_VIEWS, brief, patterns, tiny_vit\n"
        "from torch import distributed\n"
        "from coda_prompt.research import methods\n"
        "from coda_prompt.research.streams.stream import make_stream\n"
        "from coda_prompt.research.training.devices import Devices\n"
        "from coda_prompt.research.training.engine import Engine\n"
        "with Devices('cpu').connected() as fabric:\n"
        "    method = methods.make('coda-p', tiny_vit())\n"
        "    engine = Engine(AUGMENTED_VIEWS, fabric=fabric)\n"
        + "".join(f"    {line}\n" for line in lines)
    )
    return run_ranks(2, program, str(Path(__file__).parent)).stdout


def test_an_evaluation_counts_every_image_once() -> None:
    """Fewer images than processes, as many, and a number that cannot be shared out evenly."""
    printed = on_two_ranks(
        "method.begin_task(brief(method, new=2))",
        "original, seen = engine.queries.images_and_queries, []",
        "engine.queries.images_and_queries = "
        "lambda *given: (seen.extend(given[1].positions), original(*given))[1]",
        "for images in (1, 2, 7):",
        "    test = make_stream(patterns(classes=2, train=2, test=7), tasks=1).tasks[0].test",
        "    engine.evaluate(method, test.subset(range(images)), (0, 1))",
        "    shares = [None, None]",
        "    distributed.all_gather_object(shares, [int(position) for position in seen])",
        "    print(*sum(shares, []))",
        "    seen.clear()",
    )  # fmt: skip
    counted = [sorted(map(int, line.split())) for line in printed.splitlines()]
    assert counted == [[0], [0, 1], list(range(7))]


LONGER = ("--set", "training.epochs=8", "--methods", "coda-p")


@pytest.fixture(scope="module")
def longer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("longer")
    finished = run_ranks(2, CODA, *bench(tiny, out, *LONGER))
    assert finished.returncode == 0, finished.stderr
    return out


@pytest.mark.posix
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_training_on_two_ranks_resumes(
    kind: signal.Signals, tiny: Path, longer: Path, tmp_path: Path
) -> None:
    """All are asked to stop; or the second one is killed, which the first one has to notice."""
    with started_ranks(2, CODA, *bench(tiny, tmp_path, *LONGER)) as (first, second):
        wait_for_checkpoint(tmp_path, first)
        for process in (first, second) if kind == signal.SIGINT else (second,):
            os.kill(process.pid, kind)
        _, printed = first.communicate()
        assert "Traceback" not in printed
        if kind == signal.SIGINT:
            assert first.returncode == 130, printed
            assert (printed + second.communicate()[1]).count("Resume with: coda") == 1
        else:
            assert first.returncode == 2, printed
            assert "run the same command again" in printed
    finished = run_ranks(2, CODA, *bench(tiny, tmp_path, *LONGER))
    assert finished.returncode == 0, finished.stderr
    assert comparable(tmp_path) == comparable(longer)


def test_an_error_on_any_rank_is_reported_once(tiny: Path, tmp_path: Path) -> None:
    fields = tiny.read_text()
    data = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", data)
    for number in range(6):  # some of both processes' shares
        (data / "train" / "a" / f"{number}.png").write_bytes(b"no image")
    broken = tmp_path / "tiny.yaml"
    broken.write_text(fields.replace(str(tiny.parent / "data"), str(data)))
    with started_ranks(2, CODA, *bench(broken, tmp_path / "out")) as ranks:
        first, second = (rank.completed() for rank in ranks)
    assert first.returncode == 2, first.stderr
    assert (first.stderr + second.stderr).count("none of the formats") == 1
    assert "Traceback" not in first.stderr + second.stderr


def test_several_ranks_and_parallel_runs_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Devices().distributed
    for key, value in (("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4"), ("RANK", "0")):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert Devices().distributed
    with pytest.raises(BadOption, match="one device each"):
        RunOptions("runs", jobs=2)


@pytest.mark.parametrize(("by_srun", "several"), [(True, True), (False, False)])
def test_slurm_is_recognised(by_srun: bool, several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's script itself is one process, whatever the job has; `srun` starts them all."""
    job = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "table", "SLURM_PROCID": "0"}
    job |= {"SLURM_NTASKS_PER_NODE": "4"}
    step = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for key, value in (job | (step if by_srun else {})).items():
        monkeypatch.setenv(key, value)
    assert Devices().distributed is several
    if by_srun:
        fabric = Devices("cpu").fabric()
        assert type(fabric.strategy.cluster_environment).__name__ == "SLURMEnvironment"
        assert fabric.strategy.num_processes * fabric.strategy.num_nodes == 8


@pytest.mark.parametrize("name", ["cuda", "there-is-none"])
def test_a_device_that_is_not_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadOption) as refused:
        Devices(name).fabric()
    expected = f"Option 'device': '{name}' cannot be used on this machine; use auto, cpu."
    assert str(refused.value) == expected


def test_a_fabric_prints_nothing_about_its_precision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Devices("cpu", precision="bf16-mixed").fabric()
    assert not caplog.records

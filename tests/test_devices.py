"""Training on several ranks gives the numbers of one."""

from __future__ import annotations

import json
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
from processes import (
    ENVIRONMENT,
    TORCHRUN,
    run,
    run_command,
    run_ranks,
    started,
    wait_for_checkpoint,
)
from safetensors.torch import load_file
from small import CODA, comparable
from torch.testing import assert_close

from coda_prompt.errors import BadOption
from coda_prompt.training.devices import Devices

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
    ("start", "more", "rows"),
    [
        (run, ("--devices", "2"), 3),
        (partial(run_command, *TORCHRUN), (), 3),
        (partial(run_ranks, 3, CODA), ("--strategy", "fsdp", "--methods", "coda-p,ncm"), 2),
    ],
    ids=["devices", "torchrun", "fsdp"],
)
def test_several_ranks_learn_what_one_learns(
    start: Callable[..., Any], more: tuple[str, ...], rows: int, tiny: Path, alone: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    finished = start(*bench(tiny, tmp_path, *more))
    assert finished.returncode == 0, finished.stderr
    assert len(json.loads(finished.stdout)["rows"]) == rows, "one process speaks"
    assert "Warning" not in finished.stderr
    assert_same_training(tmp_path, alone, rows)
    report = json.loads(next(tmp_path.rglob("environment.json")).read_text())
    assert report["processes"] == (3 if "fsdp" in more else 2)


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
    for start, more, out in (
        (plain, (), "one"),
        (plain, ("--devices", "2"), "two"),
        (TORCHRUN, (), "three"),
    ):
        command = [*start, *given, *more, "--out", str(tmp_path / out)]
        subprocess.run(command, check=True, timeout=1800, capture_output=True, env=ENVIRONMENT)
    assert_same_training(tmp_path / "two", tmp_path / "one", 2, worst=worst)
    assert_same_training(tmp_path / "three", tmp_path / "one", 2, worst=worst)


def test_a_model_learned_on_two_ranks_equals_one_learned_on_one(
    drawing_folders: Path, tmp_path: Path
) -> None:
    """Also continued, and measured on held-out images, the same by one process and by two."""
    for name, task, start, more in (
        ("one", "task-1", run, ()),
        ("one", "task-2", run, ()),
        ("two", "task-1", run, ("--devices", "2")),
        ("two", "task-2", partial(run_ranks, 2, CODA), ()),
    ):
        finished = start(
            "learn", str(tmp_path / name), str(drawing_folders / task),
            *("--method", "coda-p", "--epochs", "1", "--val", "0.15"),
            *("--precision", "64-true", "--json", *more),
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        report = json.loads(finished.stdout)
        assert report["held_out"] == 12
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        assert_close(two[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
    tasks = [
        json.loads((tmp_path / name / "config.json").read_text())["tasks"]
        for name in ("one", "two")
    ]
    for mine, other in zip(*tasks, strict=True):
        for field in ("accuracy", "accuracy_own", "held_out", "images"):
            assert mine[field] == other[field]


def on_two_ranks(strategy: str, *lines: str) -> str:
    """Run lines on both ranks, with a `fabric` and a `method`; return what rank 0 printed."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from small import AUGMENTED_VIEWS, brief, patterns, tiny_vit\n"
        "from torch import distributed\n"
        "from coda_prompt import methods\n"
        "from coda_prompt.data.stream import make_stream\n"
        "from coda_prompt.training.devices import Devices\n"
        "from coda_prompt.training.engine import Engine\n"
        f"with Devices('cpu', 2, strategy='{strategy}').launch_processes() as fabric:\n"
        "    method = methods.make('coda-p', tiny_vit())\n"
        "    engine = Engine(AUGMENTED_VIEWS, fabric=fabric)\n"
        + "".join(f"    {line}\n" for line in lines)
    )
    return run_ranks(2, program, str(Path(__file__).parent)).stdout


def test_fsdp_shards_the_frozen_backbone() -> None:
    printed = on_two_ranks(
        "fsdp",
        "whole = sum(p.numel() for p in method.backbone.blocks.parameters())",
        "engine._move_to_device(method)",
        "here = sum(p.to_local().numel() for p in method.backbone.blocks.parameters())",
        "print(here / whole)",
    )  # fmt: skip
    assert 0.4 < float(printed) < 0.6


def test_an_evaluation_counts_every_image_once() -> None:
    """Fewer images than processes, as many, and a number that cannot be shared out evenly."""
    printed = on_two_ranks(
        "ddp",
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
    with started(*bench(tiny, tmp_path, *LONGER, "--devices", "2")) as process:
        wait_for_checkpoint(tmp_path, process)
        if kind == signal.SIGINT:
            os.killpg(process.pid, kind)
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), kind)
        _, printed = process.communicate()
        assert "Traceback" not in printed
        if kind == signal.SIGINT:
            assert process.returncode == 130, printed
            assert printed.count("Resume with: coda") == 1
        else:
            assert process.returncode == 2, printed
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
    finished = run(*bench(broken, tmp_path / "out", "--devices", "2"))
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("none of the formats") == 1
    assert "Traceback" not in finished.stderr


def test_rank_0_reports_the_error_of_another_rank_while_busy(tmp_path: Path) -> None:
    """It computes for long before it would meet the others again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from coda_prompt.errors import BadOption\n"
        "from coda_prompt.training import devices\n"
        "devices.GRACE_SECONDS = 1\n"
        "with devices.Devices('cpu', 2).launch_processes() as fabric:\n"
        "    if fabric.global_rank:\n"
        "        raise BadOption('the test', 'image', 'this one is bad')\n"
        "    time.sleep(60)\n"
    )
    finished = run_command(sys.executable, str(script))
    assert finished.returncode == 2
    assert finished.stderr.strip() == "coda: Option 'image' of the test: this one is bad."


def test_impossible_device_options_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = run(*bench(tiny, tmp_path, "--devices", "2", "--jobs", "2"))
    assert finished.returncode == 2
    assert "one device each" in finished.stderr
    with pytest.raises(BadOption, match="more than one device"):
        Devices(strategy="fsdp")
    finished = run(*bench(tiny, tmp_path / "spread", "--devices", "2", "--strategy", "fsdp"))
    assert finished.returncode == 2
    assert "upper-bound trains the backbone" in finished.stderr
    assert not list(tmp_path.rglob("events.jsonl")), "nothing has begun"
    for key, value in (("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4"), ("RANK", "0")):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert Devices().distributed
    with pytest.raises(BadOption, match="3 requested, but 2 were started"):
        Devices(devices=3).fabric()


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

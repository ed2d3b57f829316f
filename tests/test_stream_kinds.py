"""Every kind of stream: which image is learned in which task, what is tested, and YAML files."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forked import PATIENCE
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from small import array_source, coda, comparable, patterns, started_coda

from coda_prompt.errors import BadOption, EmptyTask, UnknownName
from coda_prompt.images.sources import Source
from coda_prompt.research.bench.config import load_benchmark, preset_rows
from coda_prompt.research.streams.assignment import UNUSED, chunked, random_ranks
from coda_prompt.research.streams.opening import open_source
from coda_prompt.research.streams.stream import Stream, make_stream
from coda_prompt.research.streams.stream_options import StreamOptions


def source(classes: int = 6, train: int = 12, domains: int = 3) -> Source:
    return patterns(classes, train, test=6, domains=domains)


def class_ids(stream: Stream, task: int) -> list[int]:
    """The source's classes of a task's training images."""
    return sorted({stream.class_order[row] for row in stream.tasks[task].train.labels.tolist()})


def used(stream: Stream) -> list[int]:
    return [index for task in stream.tasks for index in task.train.indices.tolist()]


def test_a_base_is_followed_by_increments() -> None:
    stream = make_stream(source(10), base_classes=5, classes_per_task=2)
    assert [len(task.classes) for task in stream.tasks] == [5, 2, 2, 1]
    stream = make_stream(source(10), base_classes=5, tasks=3)
    assert [len(task.classes) for task in stream.tasks] == [5, 3, 2]


def test_tasks_of_domains_have_all_classes_and_are_tested_on_their_domain() -> None:
    stream = make_stream(source(), domains_per_task=1, seed=2)
    assert len(stream.tasks) == len(stream.groups) == 3
    assert sorted(group.name for group in stream.groups) == ["0", "1", "2"]
    for task, group in zip(stream.tasks, stream.groups, strict=True):
        assert task.classes == group.classes == tuple(range(6))
        for samples in (task.train, group.samples):
            assert samples.domains is not None
            assert {stream.domain_names[d] for d in samples.domains.tolist()} == {group.name}
    assert sorted(used(stream)) == list(range(72))


def test_domain_lists_group_domains_by_name() -> None:
    stream = make_stream(source(), domain_lists=[["2"], ["0", "1"]])
    assert [group.name for group in stream.groups] == ["2", "0 + 1"]
    assert [len(task.train) for task in stream.tasks] == [24, 48]


def test_tasks_of_classes_and_domains_cover_every_pair_once() -> None:
    stream = make_stream(source(), classes_per_task=3, domains_per_task=1, seed=1)
    assert len(stream.tasks) == 6
    pairs = [
        (tuple(class_ids(stream, task.index)), tuple(np.unique(np.asarray(task.train.domains))))
        for task in stream.tasks
    ]
    assert len(set(pairs)) == 6
    assert sorted(used(stream)) == list(range(72))
    assert sorted(np.concatenate([g.samples.indices for g in stream.groups])) == list(range(36))


def test_pairs_of_classes_and_domains_without_images_are_left_out() -> None:
    images = np.zeros((4, 1, 1), np.uint8)
    labels, domains = [0, 0, 1, 1], [0, 1, 0, 0]
    data = array_source(
        "toy", images, labels, images, labels, train_domains=domains, test_domains=domains
    )
    stream = make_stream(data, classes_per_task=1, domains_per_task=1)
    assert len(stream.tasks) == 3
    assert "1 tasks without training images left out" in stream.notes


def test_later_tasks_have_few_shots() -> None:
    stream = make_stream(source(), base_classes=2, classes_per_task=2, shots=3)
    counts = [Counter(task.train.labels.tolist()) for task in stream.tasks]
    assert [set(count.values()) for count in counts] == [{12}, {3}, {3}]


def test_imbalance_falls_exponentially_to_the_smallest_class() -> None:
    stream = make_stream(source(5, 64), tasks=5, imbalance=16, seed=1)
    assert sorted(len(task.train) for task in stream.tasks) == [4, 8, 16, 32, 64]
    other = make_stream(source(5, 64), tasks=5, imbalance=16, seed=2)
    order = [[len(task.train) for task in each.tasks] for each in (stream, other)]
    assert order[0] != order[1]
    assert stream.test_images == [6] * 5


def test_images_of_blurry_classes_are_spread_over_all_tasks() -> None:
    stream = make_stream(source(8, 40), tasks=4, disjoint=0.5, blur=0.5, seed=3)
    assert sorted(used(stream)) == list(range(320))
    tasks_of_class = Counter(c for t in range(4) for c in class_ids(stream, t))
    assert sorted(tasks_of_class.values()) == [1] * 4 + [4] * 4, "half of the classes are disjoint"
    own = {row: group.first for group in stream.groups for row in group.classes}
    moved = [
        sum(own[row] != task.index for row in task.train.labels.tolist()) for task in stream.tasks
    ]
    assert 40 <= sum(moved) <= 80, "of 160 images half are spread, some of them to their own task"
    assert min(moved) >= 5


def test_random_sizes_are_at_least_one() -> None:
    sizes = {
        tuple(len(group.classes) for group in make_stream(source(), tasks=3, random_sizes=True,
                                                          seed=seed).groups)
        for seed in range(12)
    }  # fmt: skip
    assert len(sizes) > 3
    assert all(sum(each) == 6 and min(each) >= 1 for each in sizes)


def test_repeated_classes_return_with_other_images() -> None:
    stream = make_stream(source(6, 20), tasks=3, repeat=1.0)
    assert [len(class_ids(stream, task)) for task in range(3)] == [2, 4, 6]
    assert sorted(used(stream)) == list(range(120)), "no image is learned twice"
    counts = Counter(stream.tasks[0].train.labels.tolist())
    assert set(counts.values()) == {7}  # a third of 20
    assert [len(group.classes) for group in stream.groups] == [2, 2, 2]


def test_chunks_are_small_tasks_of_one_group() -> None:
    stream = make_stream(source(), tasks=3, chunk=7, seed=1)
    assert [len(task.train) for task in stream.tasks] == [6] * 12  # 24 images in four chunks
    assert [(group.first, group.last) for group in stream.groups] == [(0, 3), (4, 7), (8, 11)]
    assert stream.ends_of_chunks == {3, 7, 11}
    assert sorted(used(stream)) == list(range(72))
    for task in stream.tasks:
        assert set(task.train.labels.tolist()) == set(task.classes)


@given(
    seed=st.integers(0, 30),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "blur": st.floats(0, 1),
            "repeat": st.floats(0, 1),
            "imbalance": st.floats(1, 20),
            "chunk": st.integers(1, 30),
            "domains_per_task": st.integers(1, 3),
            "shots": st.integers(1, 5),
        },
    ),
)
def test_rows_follow_the_order_of_appearance(seed: int, fields: dict[str, float]) -> None:
    try:
        stream = make_stream(source(), tasks=3, seed=seed, **fields)
    except EmptyTask:  # few images, of which all moved away
        assume(False)
    seen = 0
    for task in stream.tasks:
        new = [row for row in task.classes if row >= seen]
        assert new == list(range(seen, seen + len(new)))
        seen += len(new)
        assert len(task.train)
    assert seen == len(stream.class_names) == 6
    assert len(used(stream)) == len(set(used(stream)))
    assert all(0 <= group.first <= group.last < len(stream.tasks) for group in stream.groups)


def test_ranks_number_the_images_of_each_group() -> None:
    ranks = random_ranks(np.array([3, 5, 3, 3, 5]), np.random.default_rng(0))
    assert sorted(ranks[[0, 2, 3]].tolist()) == [0, 1, 2]
    assert sorted(ranks[[1, 4]].tolist()) == [0, 1]


def test_unused_images_are_in_no_chunk() -> None:
    chunks, owners = chunked(np.array([0, UNUSED, 1, 1, 1]), 2, seed=0)
    assert chunks[1] == UNUSED
    assert owners.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tasks": 2, "domains_per_task": 1, "remove_domains": 1}, "cannot be combined"),
        ({"domains_per_task": 1, "domain_lists": [["0"]]}, "only one of domains_per_task"),
        ({"tasks": 2, "blur": 1.5}, "'blur'.*less than or equal to 1"),
        ({"tasks": 2, "budget": 0}, "'budget' of the stream: 0 is less than 1"),
        ({"classes_per_task": 2, "random_sizes": True}, "needs the number of tasks"),
        ({"class_lists": [["0"]], "base_classes": 1}, "class_lists cannot be combined"),
        ({"tasks": 1, "base_classes": 2}, "need a task"),
    ],
)
def test_fields_that_do_not_fit_together(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(BadOption, match=problem):
        make_stream(source(), **fields)


def test_unknown_fields_and_missing_domains() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'chunk'"):
        make_stream(source(), tasks=2, chunks=3)
    with pytest.raises(BadOption, match="have no domain labels"):
        make_stream(source(domains=0), domains_per_task=1)
    with pytest.raises(EmptyTask, match="Task 2 has no class: the first has 6 of 6"):
        make_stream(source(), base_classes=6, classes_per_task=1)


def test_only_fields_that_are_set_are_written() -> None:
    plain = StreamOptions(tasks=3).model_dump(mode="json")
    assert plain == {"tasks": 3}
    online = StreamOptions(tasks=3, chunk=5, budget=2).model_dump(mode="json")
    assert online == {**plain, "chunk": 5, "budget": 2}


def write_domains(root: Path, parts: tuple[str, ...] = ("",)) -> None:
    for part in parts:
        for domain, classes in (("photo", "ab"), ("sketch", "bc")):
            for name in classes:
                folder = root / part / domain / name
                folder.mkdir(parents=True)
                for number in range(5):
                    Image.new("L", (4, 4), number).save(folder / f"{number}.png")


def test_folders_of_domains_are_a_source_with_domains(tmp_path: Path) -> None:
    write_domains(tmp_path)
    data = open_source(f"domains:{tmp_path}")
    assert data.class_names == ("a", "b", "c")
    assert data.domain_names == ("photo", "sketch")
    assert (len(data.train), len(data.test)) == (16, 4)
    stream = make_stream(data, domain_lists=[["sketch"], ["photo"]])
    assert [[stream.class_names[row] for row in task.classes] for task in stream.tasks] == [
        ["b", "c"],
        ["b", "a"],
    ]


def test_folders_of_domains_below_train_and_test(tmp_path: Path) -> None:
    write_domains(tmp_path, ("train", "test"))
    data = open_source(f"domains:{tmp_path}")
    assert (len(data.train), len(data.test)) == (20, 20)
    assert data.notes == ()


# -- YAML files


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

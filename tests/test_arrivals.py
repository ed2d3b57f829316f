"""Learning from a folder that grows: chunks, each image once, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import NAMES, SOURCE
from small import coda

from coda_prompt.errors import CodaWarning, CorruptFile, Interrupted
from coda_prompt.learner import store
from coda_prompt.learner.arrivals import Arrivals, Ledger
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.results import Learned
from coda_prompt.training.settings import Event


def add(folder: Path, row: int, numbers: range) -> None:
    """Write training drawings of a class; later numbers arrived later."""
    target = folder / NAMES[row]
    target.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        index = int(np.flatnonzero(SOURCE.train.labels == row)[number])
        path = target / f"{number:02}.png"
        SOURCE.train.image(index).save(path)
        time = 1_000_000_000 * (1000 + number)
        os.utime(path, ns=(time, time))


def opened(model: Path, method: str) -> ContinualClassifier:
    if (model / store.MODEL).exists():
        return ContinualClassifier.load(model, verbose=False)
    model.mkdir(exist_ok=True)
    return ContinualClassifier("pocket", method, verbose=False, epochs=1)


def learn(
    model: Path, folder: Path, stop: Callable[[], bool] = lambda: False, **options: Any
) -> list[Learned]:
    method = options.pop("method", "ncm")
    fields = {"chunk": 6, "validation": 0.0, "stop": stop} | options
    arrivals = Arrivals(opened(model, method), model, folder, **fields)
    return list(arrivals.lessons(poll=0.01))


def test_images_are_learned_in_chunks_by_arrival_and_only_once(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    for row in (0, 1):
        add(folder, row, range(5))
    first = learn(model, folder)
    assert [sum(lesson.images.values()) for lesson in first] == [6, 4]
    assert first[0].images == {NAMES[0]: 3, NAMES[1]: 3}, "in the order of arrival"
    assert learn(model, folder) == []
    add(folder, 2, range(2))
    add(folder, 0, range(5, 6))
    (later,) = learn(model, folder)
    assert later.images == {NAMES[2]: 2, NAMES[0]: 1}
    assert later.new == (NAMES[2],)
    assert ContinualClassifier.load(model, verbose=False).classes_ == list(NAMES[:3])


def test_images_of_an_undone_lesson_are_learned_again(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    add(folder, 0, range(3))
    add(folder, 1, range(3))
    learn(model, folder)
    add(folder, 2, range(4))
    learn(model, folder)
    classifier = ContinualClassifier.load(model, verbose=False)
    classifier.undo()
    classifier.save(model)
    (again,) = learn(model, folder)
    assert again.images == {NAMES[2]: 4}
    assert learn(model, folder) == []


def test_a_changed_file_is_a_new_image(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    add(folder, 0, range(2))
    learn(model, folder)
    os.utime(folder / NAMES[0] / "00.png", ns=(0, 0))
    (again,) = learn(model, folder)
    assert again.images == {NAMES[0]: 1}


def test_an_interrupted_chunk_resumes_to_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "inbox"
    for row in (0, 1):
        add(folder, row, range(6))
    learn(tmp_path / "whole", folder, method="coda-p")
    model, steps = tmp_path / "model", 0

    def on_event(event: Event) -> None:
        nonlocal steps
        steps += event.kind == "step"

    with pytest.raises(Interrupted):  # in the second lesson
        learn(model, folder, lambda: steps > 1, method="coda-p", on_event=on_event)
    pending = Ledger.read(model).pending
    assert pending is not None
    assert len(pending.files) == 6
    add(folder, 2, range(1))  # the chunk does not change by what arrives meanwhile
    (folder / NAMES[2] / "00.png").unlink()
    learn(model, folder, method="coda-p")
    states = [
        ContinualClassifier.load(each, verbose=False).network.tensors()
        for each in (model, tmp_path / "whole")
    ]
    assert states[0].keys() == states[1].keys()
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []


def test_a_chunk_that_was_saved_before_a_kill_is_not_learned_twice(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    add(folder, 0, range(3))
    learn(model, folder)
    ledger = Ledger.read(model)
    killed = {"files": ledger.chunks[0].files, "lessons": 0}
    (model / store.ARRIVALS).write_text(json.dumps({"learned": {}, "pending": killed}))
    assert learn(model, folder) == []


def test_unreadable_images_are_left_out_once(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    (folder / "broken").mkdir(parents=True)
    (folder / "broken" / "a.png").write_bytes(b"no image")
    with pytest.warns(CodaWarning, match=r"a\.png"):
        assert learn(model, folder) == []
    add(folder, 0, range(2))
    assert [lesson.images for lesson in learn(model, folder)] == [{NAMES[0]: 2}]


def test_a_damaged_ledger_is_reported(tmp_path: Path) -> None:
    (tmp_path / store.ARRIVALS).write_text("{")
    with pytest.raises(CorruptFile, match="Remove it; all images of the folder"):
        Ledger.read(tmp_path)


def test_watching_learns_what_arrives_until_it_is_stopped(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "inbox"
    add(folder, 0, range(2))
    enough = False
    arrivals = Arrivals(opened(model, "ncm"), model, folder, 2, validation=0.0, stop=lambda: enough)
    lessons = arrivals.lessons(watch=True, idle=0.0, poll=0.01)
    assert next(lessons).images == {NAMES[0]: 2}
    add(folder, 1, range(1))
    assert next(lessons).images == {NAMES[1]: 1}
    enough = True
    assert list(lessons) == []


def test_the_command_prints_a_line_for_each_lesson(tmp_path: Path) -> None:
    for row in (0, 1):
        add(tmp_path / "inbox", row, range(3))
    found = coda(
        "stream", str(tmp_path / "model"), str(tmp_path / "inbox"),
        "--chunk", "4", "--method", "ncm", "--backbone", "pocket", "--json",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [sum(line["images"].values()) for line in lines] == [4, 2]
    again = coda("stream", str(tmp_path / "model"), str(tmp_path / "inbox"))
    assert (again.returncode, again.stdout) == (0, "")
    assert "no new image" in again.stderr
    assert "were learned" in again.stderr
    assert "one folder" not in again.stderr
    (tmp_path / "empty").mkdir()
    empty = coda("stream", str(tmp_path / "other"), str(tmp_path / "empty"))
    assert "empty: no image in it" in empty.stderr
    assert not (tmp_path / "other").exists()
    missing = coda("stream", str(tmp_path / "model"), str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "there is no such folder" in missing.stderr

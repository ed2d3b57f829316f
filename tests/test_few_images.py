"""Shares of fewer than ten images are counts, on every surface."""

from __future__ import annotations

import re
from pathlib import Path

from drawings import SOURCE
from small import coda

from coda_prompt.learner.card import share_of


def fill(root: Path, rows: range, images: range) -> None:
    for row in rows:
        (root / SOURCE.class_names[row]).mkdir(parents=True, exist_ok=True)
        for number in images:
            image = SOURCE.train.image(640 * row + number)
            image.save(root / SOURCE.class_names[row] / f"{number}.png")


def test_shares() -> None:
    assert [share_of(1.0, 1), share_of(2 / 3, 9), share_of(0.5, 10)] == [
        "1 of 1",
        "6 of 9",
        "50.0 %",
    ]
    assert [share_of(None, 3), share_of(0.25, 0)] == ["-", "25.0 %"]


def test_commands_count_few_images(tmp_path: Path) -> None:
    fill(tmp_path / "first", range(2), range(5))
    fill(tmp_path / "second", range(2, 3), range(5))
    fill(tmp_path / "test", range(2), range(10, 12))
    fill(tmp_path / "other", range(4, 5), range(3))

    def shown(*arguments: str) -> str:
        done = coda(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.replace("│", " ").split())

    learned = shown("learn", "m", "first", "--method", "ncm")
    assert re.search(r"on 2 held-out images: \d of 2 right among all 2 classes, \d of 2", learned)
    again = shown("learn", "m", "second", "--check", "test")
    assert re.search(r"on 1 held-out image: \d of 1 right among all 3 classes, 1 of 1", again)
    assert re.search(r"checked classes: \d of 4 -> \d of 4", again)
    history = shown("history", "m")
    assert re.search(r"5 \d of 1 1 of 1 \d of 4 -> \d of 4", history)
    evaluated = shown("evaluate", "m", "test", "--unknown-folder", "other", "--unknown-rate", "0.4")
    assert re.search(r"4 images: \d of 4 correct", evaluated)
    assert re.search(r"of the known images, \d of 4 and, of the unknown ones, \d of 3", evaluated)
    card = (tmp_path / "m" / "README.md").read_text()
    assert re.search(r"\| 5 \| \d of 1 \| 1 of 1 \|", card)
    percentages = re.findall(r"[\d.]+ %", learned + again + history + evaluated + card)
    assert set(percentages) <= {"95 %", "40.0 %"}, "the rates of the rule for unknown images"

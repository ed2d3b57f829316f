"""Batches that are read ahead in a thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small import PLAIN_VIEWS, patterns

from coda_prompt.errors import BadImage
from coda_prompt.research.streams.stream import Samples, make_stream
from coda_prompt.research.training.loading import batches

ORDER = [[0, 1], [2], [3, 4]]


def train_samples() -> Samples:
    return make_stream(patterns(2, train=4), tasks=1).tasks[0].train


def test_reading_ahead_changes_nothing() -> None:
    samples = train_samples()
    plain = list(batches(samples, PLAIN_VIEWS, ORDER))
    ahead = list(batches(samples, PLAIN_VIEWS, ORDER, read_ahead=True))
    assert [batch.positions for batch in ahead] == ORDER
    for one, other in zip(plain, ahead, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_the_next_batch_is_decoded_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, third = train_samples(), threading.Event()
    image = Samples.image

    def watched(self: Samples, position: int, min_side: int | None = None) -> Any:
        if position == 2:
            third.set()
        return image(self, position, min_side)

    monkeypatch.setattr(Samples, "image", watched)
    reading = batches(samples, PLAIN_VIEWS, ORDER, read_ahead=True)
    next(reading)
    assert third.wait(timeout=60), "the second batch is read although nobody has asked for it"
    assert len(list(reading)) == 2


def test_an_unreadable_image_raises_where_its_batch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = Samples.image

    def broken(self: Samples, position: int, min_side: int | None = None) -> Any:
        if position == 2:
            raise BadImage("image 2", "it is broken")
        return image(self, position, min_side)

    monkeypatch.setattr(Samples, "image", broken)
    reading = batches(train_samples(), PLAIN_VIEWS, ORDER, read_ahead=True)
    assert next(reading).positions == [0, 1]
    with pytest.raises(BadImage, match="it is broken"):
        next(reading)

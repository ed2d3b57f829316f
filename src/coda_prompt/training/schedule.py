"""Learning rates per epoch."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "lagging-cosine"]


def learning_rate(schedule: Schedule, start: float, epoch: int, epochs: int) -> float:
    """The rate of `epoch` (from 0) out of `epochs`.

    `cosine` is the paper's formula, start * cos(99 pi e / (200 (E - 1))). `lagging-cosine` is what
    the released scheduler does with it: epochs 0 and 1 at the start, later ones one epoch late.
    """
    if epochs == 1:
        return start
    if schedule == "lagging-cosine":
        epoch = max(0, epoch - 1)
    return start * math.cos(99 * math.pi * epoch / (200 * (epochs - 1)))

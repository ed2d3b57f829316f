"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "lagging-cosine"]


def learning_rate(
    schedule: str,
    start: float,
    epoch: float,
    epochs: int,
    final_factor: float = 0.0,
    drop_at: float = 1.0,
) -> float:
    """Compute the learning rate of an epoch.

    - `cosine`: the formula of the CODA-Prompt paper, start * cos(99 pi e / (200 (E - 1)));
    - `lagging-cosine`: as in the released code, one epoch later: epochs 0 and 1 use `start`;
    - `annealing`: half a cosine wave from `start` to `start * final_factor` over E epochs;
    - `drop`: `start`, and `start * final_factor` after the share `drop_at` of the epochs;
    - `constant`.

    Args:
        schedule: One of the above.
        start: Initial learning rate.
        epoch: Epoch e, from 0; fractional for schedules per iteration.
        epochs: Number of epochs E.
        final_factor: Final learning rate of `annealing` and `drop`, as a fraction of `start`.
        drop_at: When `drop` changes the learning rate, as a fraction of E.
    """
    if schedule == "annealing":
        share = (1 + math.cos(math.pi * epoch / epochs)) / 2
        return start * (final_factor + (1 - final_factor) * share)
    if schedule == "drop":
        return start if epoch < drop_at * epochs else start * final_factor
    if schedule == "constant" or epochs == 1:
        return start
    if schedule == "lagging-cosine":
        epoch = max(0, epoch - 1)
    return start * max(0.0, math.cos(99 * math.pi * epoch / (200 * (epochs - 1))))

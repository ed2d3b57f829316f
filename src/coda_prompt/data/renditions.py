"""Drawings in other styles: the distance between a benchmark and what its backbone has seen.

A set of drawings always comes out the same: which style a drawing has is a hash of its name, and
the random parts of a style come from one generator in the order of the drawings that have it. One
number, the strength, scales them all: 0 leaves every drawing as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Style = Callable[[Floats, np.random.Generator, float], Floats]


def _plain(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    return ink


def _pale(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Lower contrast."""
    return ink * (1 - 0.7 * strength)


def _noisy(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    return ink + random.normal(0, 0.35 * strength, ink.shape).astype(np.float32)


def _thick(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Strokes one pixel wider all round, mixed in."""
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    height, width = ink.shape[1:]
    shifted = [padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return _mixed(ink, np.max(shifted, axis=0), strength)


def _hatched(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """On diagonal lines of a random phase and direction."""
    rows, columns = np.indices(ink.shape[1:])
    phase = random.integers(0, 5, (len(ink), 1, 1))
    direction = random.choice([-1, 1], (len(ink), 1, 1))
    lines = (rows + direction * columns + phase) % 5 == 0
    return np.maximum(ink, 0.6 * strength * lines).astype(np.float32)


def _blurred(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """A 5 x 5 binomial filter, mixed in."""
    kernel = np.array([1, 4, 6, 4, 1], np.float32) / 16
    size = ink.shape[1]
    padded = np.pad(ink, ((0, 0), (2, 2), (0, 0)))
    soft = sum(weight * padded[:, at : at + size] for at, weight in enumerate(kernel))
    padded = np.pad(soft, ((0, 0), (0, 0), (2, 2)))
    soft = sum(weight * padded[:, :, at : at + size] for at, weight in enumerate(kernel))
    return _mixed(ink, np.asarray(soft, np.float32), strength)


def _broken(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Gaps in the strokes: 4 x 4 cells taken out at random."""
    cells = random.random((len(ink), 7, 7)) < 0.45 * strength
    kept = ~cells.repeat(4, axis=1).repeat(4, axis=2)
    return (ink * kept).astype(np.float32)


def _turned(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Tilted to either side."""
    tilt = random.uniform(0.5, 1.0, len(ink)) * random.choice([-1, 1], len(ink))
    angle = (np.deg2rad(60) * strength * tilt)[:, None, None]
    rows, columns = _centred(ink)
    return _sampled(
        ink,
        np.cos(angle) * rows - np.sin(angle) * columns,
        np.sin(angle) * rows + np.cos(angle) * columns,
    )


def _wavy(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Displaced along two sine waves."""
    rows, columns = _centred(ink)
    first, second = random.uniform(0, 2 * np.pi, (2, len(ink), 1, 1))
    reach = 3.0 * strength
    return _sampled(
        ink,
        rows + reach * np.sin(columns / 3.0 + first),
        columns + reach * np.sin(rows / 3.0 + second),
    )


def _shaded(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """On a ground that brightens towards one side."""
    angle = random.uniform(0, 2 * np.pi, (len(ink), 1, 1))
    rows, columns = _centred(ink)
    slope = (np.sin(angle) * rows + np.cos(angle) * columns) / ink.shape[1]
    ground = strength * (0.4 + 0.6 * slope)
    return np.maximum(ink, ground.astype(np.float32))


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "plain": _plain,
        "pale": _pale,
        "noisy": _noisy,
        "thick": _thick,
        "hatched": _hatched,
        "blurred": _blurred,
        "broken": _broken,
        "turned": _turned,
        "wavy": _wavy,
        "shaded": _shaded,
    }
)


def style_index(key: str) -> int:
    """Which style a drawing has, by a fixed hash of its name."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(STYLES)


def render(
    drawings: NDArray[np.uint8], styles: NDArray[np.int64], strength: float
) -> NDArray[np.uint8]:
    """Each drawing (N x height x width) in its style."""
    rendered = drawings.copy()
    for number, (name, style) in enumerate(STYLES.items()):
        chosen = np.flatnonzero(styles == number)
        if not len(chosen):
            continue
        # One generator a style, in the order of the drawings: the same set comes out the same.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        random = np.random.Generator(np.random.Philox(seed))
        ink = drawings[chosen].astype(np.float32) / np.float32(255)
        values = style(ink, random, strength)
        rendered[chosen] = np.round(np.clip(values, 0, 1) * 255).astype(np.uint8)
    return rendered


def _mixed(ink: Floats, other: Floats, strength: float) -> Floats:
    return ink + strength * (other - ink)


def _centred(ink: Floats) -> tuple[Floats, Floats]:
    """Row and column of each pixel, from the middle."""
    rows, columns = np.indices(ink.shape[1:], dtype=np.float32)
    return rows - (ink.shape[1] - 1) / 2, columns - (ink.shape[2] - 1) / 2


def _sampled(ink: Floats, rows: NDArray[np.floating], columns: NDArray[np.floating]) -> Floats:
    """The drawing's values at these places, counted from the middle; empty outside; bilinear."""
    height, width = ink.shape[1:]
    rows = np.broadcast_to(rows + (height - 1) / 2, ink.shape)
    columns = np.broadcast_to(columns + (width - 1) / 2, ink.shape)
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    below, right = rows - top, columns - left
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    images = np.arange(len(ink))[:, None, None]

    def value(row: NDArray[np.int_], column: NDArray[np.int_]) -> Floats:
        return padded[images, np.clip(row, -1, height) + 1, np.clip(column, -1, width) + 1]

    upper = value(top, left) * (1 - right) + value(top, left + 1) * right
    lower = value(top + 1, left) * (1 - right) + value(top + 1, left + 1) * right
    return (upper * (1 - below) + lower * below).astype(np.float32)

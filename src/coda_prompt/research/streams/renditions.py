"""Styles for drawings, which create a domain gap between the benchmark and its backbone.

Rendering is deterministic: a drawing's style is a hash of its name, and each style has one random
generator that is used in the order of the drawings. `strength` scales all styles; at 0 drawings
are unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

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
    """Strokes one pixel wider on each side, blended with the original."""
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    height, width = ink.shape[1:]
    shifted = [padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return _blend(ink, np.max(shifted, axis=0), strength)


def _hatched(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Diagonal background lines of random phase and direction."""
    rows, columns = np.indices(ink.shape[1:])
    phase = random.integers(0, 5, (len(ink), 1, 1))
    direction = random.choice([-1, 1], (len(ink), 1, 1))
    lines = (rows + direction * columns + phase) % 5 == 0
    return np.maximum(ink, 0.6 * strength * lines).astype(np.float32)


def _blurred(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """A 5 x 5 binomial filter, blended with the original."""
    kernel = np.array([1, 4, 6, 4, 1], np.float32) / 16
    size = ink.shape[1]
    padded = np.pad(ink, ((0, 0), (2, 2), (0, 0)))
    soft = sum(weight * padded[:, at : at + size] for at, weight in enumerate(kernel))
    padded = np.pad(soft, ((0, 0), (0, 0), (2, 2)))
    soft = sum(weight * padded[:, :, at : at + size] for at, weight in enumerate(kernel))
    return _blend(ink, np.asarray(soft, np.float32), strength)


def _broken(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Gaps in the strokes: random 4 x 4 cells removed."""
    cells = random.random((len(ink), 7, 7)) < 0.45 * strength
    mask = ~cells.repeat(4, axis=1).repeat(4, axis=2)
    return (ink * mask).astype(np.float32)


def _turned(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Rotated to either side."""
    tilt = random.uniform(0.5, 1.0, len(ink)) * random.choice([-1, 1], len(ink))
    angle = (np.deg2rad(60) * strength * tilt)[:, None, None]
    rows, columns = _centered_coordinates(ink)
    cos, sin = np.cos(angle), np.sin(angle)
    return _sample(ink, cos * rows - sin * columns, sin * rows + cos * columns)


def _wavy(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """Displaced along two sine waves."""
    rows, columns = _centered_coordinates(ink)
    first, second = random.uniform(0, 2 * np.pi, (2, len(ink), 1, 1))
    amplitude = 3.0 * strength
    return _sample(
        ink,
        rows + amplitude * np.sin(columns / 3.0 + first),
        columns + amplitude * np.sin(rows / 3.0 + second),
    )


def _shaded(ink: Floats, random: np.random.Generator, strength: float) -> Floats:
    """A background gradient in a random direction."""
    angle = random.uniform(0, 2 * np.pi, (len(ink), 1, 1))
    rows, columns = _centered_coordinates(ink)
    slope = (np.sin(angle) * rows + np.cos(angle) * columns) / ink.shape[1]
    background = strength * (0.4 + 0.6 * slope)
    return np.maximum(ink, background.astype(np.float32))


_ALL = (_plain, _pale, _noisy, _thick, _hatched, _blurred, _broken, _turned, _wavy, _shaded)
STYLES: dict[str, Style] = {style.__name__.removeprefix("_"): style for style in _ALL}
"""By name; a drawing's style is a position in this order."""


def style_index(key: str) -> int:
    """Return the style of a drawing, a fixed hash of its name."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(STYLES)


def render(
    drawings: NDArray[np.uint8], styles: NDArray[np.int64], strength: float
) -> NDArray[np.uint8]:
    """Render each drawing (N x height x width) in its style."""
    rendered = drawings.copy()
    for number, (name, style) in enumerate(STYLES.items()):
        selected = np.flatnonzero(styles == number)
        if not len(selected):
            continue
        # One generator per style, used in the order of the drawings: deterministic for a dataset.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        random = np.random.Generator(np.random.Philox(seed))
        ink = drawings[selected].astype(np.float32) / np.float32(255)
        values = style(ink, random, strength)
        rendered[selected] = np.round(np.clip(values, 0, 1) * 255).astype(np.uint8)
    return rendered


def _blend(ink: Floats, other: Floats, strength: float) -> Floats:
    return ink + strength * (other - ink)


def _centered_coordinates(ink: Floats) -> tuple[Floats, Floats]:
    """Return row and column of each pixel relative to the centre."""
    rows, columns = np.indices(ink.shape[1:], dtype=np.float32)
    return rows - (ink.shape[1] - 1) / 2, columns - (ink.shape[2] - 1) / 2


def _sample(ink: Floats, rows: NDArray[np.floating], columns: NDArray[np.floating]) -> Floats:
    """Interpolate bilinearly at coordinates relative to the centre; 0 outside the drawing."""
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

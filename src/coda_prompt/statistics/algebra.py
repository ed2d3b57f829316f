"""Linear algebra of statistics, and checks of arrays from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]

MIN_LENGTH = 1e-12
"""Shorter vectors are not scaled to unit length."""
SMALL = 64
"""Triangles of this size are inverted whole."""


def unit(features: Array) -> Array:
    """Scale rows to unit length."""
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    result: Array = features / np.maximum(lengths, features.dtype.type(MIN_LENGTH))
    return result


def inverse_factor(matrix: Array) -> Array:
    """Return L^-1 with matrix^-1 = L^-T L^-1: it whitens columns with this covariance.

    Raises:
        LinAlgError: The matrix is not positive definite.
    """
    return inverse_triangle(np.linalg.cholesky(matrix))


def inverse_triangle(lower: Array) -> Array:
    """Invert a lower triangle by its halves: NumPy has no solver for triangles."""
    width = len(lower)
    if width <= SMALL:
        return np.tril(np.linalg.inv(lower))
    half = width // 2
    inverse = np.zeros_like(lower)
    first = inverse[:half, :half] = inverse_triangle(lower[:half, :half])
    second = inverse[half:, half:] = inverse_triangle(lower[half:, half:])
    inverse[half:, :half] = -second @ (lower[half:, :half] @ first)
    return inverse


def packed(matrix: Array) -> Array:
    """Return the upper triangle of a symmetric matrix, row by row."""
    return np.concatenate([row[number:] for number, row in enumerate(matrix)] or [matrix[:0, 0]])


def unpacked(triangle: Array, width: int) -> Array:
    """Return the symmetric matrix whose upper triangle was packed."""
    matrix, start = np.empty((width, width), triangle.dtype), 0
    for row in range(width):
        count = width - row
        matrix[row, row:] = matrix[row:, row] = triangle[start : start + count]
        start += count
    return matrix


def other_rows(count: int, rows: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers below `count` that are not in `rows`."""
    return np.setdiff1d(np.arange(count), np.asarray(rows, np.int64))


def grown_rows(array: Array, count: int) -> Array:
    """Append rows of zeros up to `count` rows."""
    missing = max(0, count - len(array))
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def checked(arrays: Arrays, name: str, shape: tuple[int | None, ...], *types: DTypeLike) -> Array:
    """Return an array from a file, whose shape, type and values are checked.

    Args:
        arrays: All arrays of the file.
        name: Of the array.
        shape: It must have; None stands for any length.
        types: One of which it must have. Integers must not be negative, numbers must be finite.

    Raises:
        ValueError: It does not fit.
    """
    if name not in arrays:
        raise ValueError(f"'{name}' is missing")
    array = arrays[name]
    fits = len(array.shape) == len(shape) and all(
        expected in (None, actual) for expected, actual in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype not in [np.dtype(each) for each in types]:
        raise ValueError(f"'{name}' has shape {array.shape} and type {array.dtype}")
    if not (np.isfinite(array).all() if array.dtype.kind == "f" else (array >= 0).all()):
        raise ValueError(f"'{name}' has values that are not finite, or negative")
    return array


def check_names(arrays: Arrays, names: Sequence[str]) -> None:
    """Check that a file has exactly these arrays.

    Raises:
        ValueError: It has others.
    """
    if set(arrays) != set(names):
        raise ValueError(f"expected {sorted(names)}, found {sorted(arrays)}")

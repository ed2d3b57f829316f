"""Read CIFAR's pickle files with an unpickler that makes uint8 arrays only.

As Python's documentation advises, `find_class` decides which names a file may refer to: NumPy's
constructors of an array, and the encoding that Python 3 writes bytes with in protocol 2. It returns
stand-ins for them, because NumPy's own also make arrays of objects, of any size.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from pickle import Unpickler, UnpicklingError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import CorruptFile

MAX_OPCODES = 2_000_000
"""CIFAR-100's largest file has a few hundred thousand; each creates at most one small value."""
MAX_TUPLES = 1000
"""CIFAR-100's files have seven. Hashing a deeply nested tuple overflows the stack."""
_PROBLEMS = (UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError)


def read_cifar_pickle(content: bytes, path: object) -> dict[str, Any]:
    """Return the dict in a file of CIFAR.

    Args:
        content: the file's bytes.
        path: what error messages call the file.

    Raises:
        CorruptFile: the content is damaged or is more than plain values.
    """
    try:
        _check_opcodes(content)
        values = _CifarUnpickler(content).load()
        if not isinstance(values, dict):
            raise TypeError("it is not a dict")
        return {_to_str(key): _to_array(value) for key, value in values.items()}
    except _PROBLEMS as error:
        raise CorruptFile(path, f"it differs from the published file ({error})") from error


def _check_opcodes(content: bytes) -> None:
    """Refuse later protocols, and files that would become much larger in memory."""
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.proto > 2:
            raise ValueError(f"its opcode {opcode.name} is not allowed")
        tuples += opcode.name.startswith("TUPLE")
        memo_index = (
            int(argument or 0) if opcode.name.endswith("PUT") else 0
        )  # the memo has no gaps
        if max(count, memo_index) >= MAX_OPCODES or tuples > MAX_TUPLES:
            raise ValueError(f"more than {MAX_OPCODES:,} values or {MAX_TUPLES:,} tuples")


class _CifarUnpickler(Unpickler):
    """An unpickler that refers to the stand-ins below only."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin-1")
        self._bytes_left = len(content)

    def find_class(self, module: str, name: str) -> type | Callable[..., bytes]:
        match module, name:
            case "numpy", "ndarray":
                return _Array
            case "numpy", "dtype":
                return _UInt8
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return _Array
            case "_codecs", "encode":
                return self._encode
        raise ValueError(f"it refers to '{module} {name}', which is not allowed")

    def _encode(self, text: str, encoding: str) -> bytes:
        """Stand in for `_codecs.encode`; a file could refer to one long string many times."""
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise ValueError("it expands to more bytes than it has")
        if encoding != "latin1":
            raise ValueError("it contains an object other than a uint8 array")
        return text.encode("latin-1")


class _UInt8:
    """Stands in for `numpy.dtype`."""

    def __init__(self, *arguments: object) -> None:
        if arguments[:1] != ("u1",):
            raise ValueError("it contains an object other than a uint8 array")

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order, which a single byte does not have."""


class _Array:
    """Stands in for `numpy.ndarray`, and for `_reconstruct`, which makes one without data."""

    values: NDArray[np.uint8] | None = None

    def __init__(self, *arguments: object) -> None:
        if arguments[:2] != (_Array, (0,)):
            raise ValueError("it contains an object other than a uint8 array")

    def __setstate__(self, state: object) -> None:
        match state:
            case (1, tuple() as shape, _UInt8(), False, str() as text):
                self.values = _make_array(shape, text.encode("latin-1"))
            case (1, tuple() as shape, _UInt8(), False, bytes() as content):
                self.values = _make_array(shape, content)
            case _:
                raise ValueError("its array is not a row-major uint8 array")


def _make_array(shape: tuple[Any, ...], content: bytes) -> NDArray[np.uint8]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"invalid array shape {shape}")
    if len(shape) > 4 or math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content)} values")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _to_array(value: object) -> Any:
    return value.values if isinstance(value, _Array) else value


def _to_str(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if not isinstance(key, str):
        raise TypeError("a dict key is not a string")
    return key

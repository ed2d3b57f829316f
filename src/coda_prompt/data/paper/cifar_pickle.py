"""Read CIFAR's pickle files without unpickling them.

The published files are pickles of protocol 2. This reader interprets their opcodes and builds
dicts, lists, tuples, strings, numbers and uint8 arrays only. Global names are compared with the few
that such an array needs; nothing is imported or called, and any other content is an error.
"""

from __future__ import annotations

import math
import pickletools
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import CorruptFile

MAX_OPCODES = 2_000_000
"""CIFAR-100's largest file has a few hundred thousand; each creates at most one small value."""


class _Token(Enum):
    """Placeholder on the stack for something that is not a plain value."""

    MARK = "a mark"
    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "numpy's _reconstruct"
    ENCODE = "_codecs.encode"
    UINT8 = "dtype uint8"
    UNFILLED = "array without data"


_GLOBALS = {
    "numpy ndarray": _Token.NDARRAY,
    "numpy dtype": _Token.DTYPE,
    "numpy.core.multiarray _reconstruct": _Token.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Token.RECONSTRUCT,  # since numpy 2
    "_codecs encode": _Token.ENCODE,  # how Python 3 writes bytes in protocol 2
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONSTANTS["MARK"] = _Token.MARK
_LITERALS = ("BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_cifar_pickle(content: bytes, path: object) -> dict[str, Any]:
    """Return the dict in a file of CIFAR.

    Args:
        content: the file's bytes.
        path: what error messages call the file.

    Raises:
        CorruptFile: the content is damaged or is more than plain values.
    """
    try:
        values = _Reader(len(content)).read(content)
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptFile(path, f"it differs from the published file ({error})") from error
    if not isinstance(values, dict):
        raise CorruptFile(path, "it differs from the published file (it is not a dict)")
    return values


class _Reader:
    """A pickle machine: a stack and a memo."""

    def __init__(self, max_copied_bytes: int) -> None:
        self.bytes_left = max_copied_bytes
        """A file could refer to one long string many times."""
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MAX_OPCODES:
                raise ValueError(f"more than {MAX_OPCODES:,} values")
            if opcode.name == "STOP":
                return self._pop()
            self._step(opcode.name, argument)
        raise ValueError("the end is missing")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in _TUPLES:
            items = [self._pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("APPEND", "APPENDS"):
            items = [self._pop()] if name == "APPEND" else self._pop_to_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._pop_to_mark()
            keys = [_key_to_str(key) for key in items[::2]]
            self._top(dict).update(zip(keys, items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise ValueError(f"it refers to {argument!r}, which is not allowed")
            stack.append(_GLOBALS[argument])
        elif name == "REDUCE":
            arguments = self._pop()
            stack.append(self._call(self._pop(), arguments))
        elif name == "BUILD":
            state = self._pop()
            stack.append(self._set_state(self._pop(), state))
        elif name != "PROTO":
            raise ValueError(f"its opcode {name} is not allowed")

    def _call(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case _Token.RECONSTRUCT, (_Token.NDARRAY, (0,), _):
                return _Token.UNFILLED
            case _Token.DTYPE, ("u1", *_):
                return _Token.UINT8
            case _Token.ENCODE, (str() as text, "latin1"):
                return self._to_bytes(text)
        raise ValueError("it contains an object other than a uint8 array")

    def _set_state(self, target: Any, state: Any) -> Any:
        match target, state:
            case _Token.UINT8, tuple():
                return _Token.UINT8
            case _Token.UNFILLED, (1, tuple() as shape, _Token.UINT8, False, str() as text):
                return _make_array(shape, self._to_bytes(text))
            case _Token.UNFILLED, (1, tuple() as shape, _Token.UINT8, False, bytes() as content):
                return _make_array(shape, content)
        raise ValueError("its array is not a row-major uint8 array")

    def _to_bytes(self, text: str) -> bytes:
        self.bytes_left -= len(text)
        if self.bytes_left < 0:
            raise ValueError("it expands to more bytes than it has")
        return text.encode("latin-1")

    def _pop(self) -> Any:
        item = self.stack.pop()
        if item is _Token.MARK:
            raise ValueError("a mark where a value should be")
        return item

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"no {kind.__name__} where one should be")
        return self.stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _Token.MARK:
            items.append(item)
        return items[::-1]


def _make_array(shape: tuple[Any, ...], content: bytes) -> NDArray[np.uint8]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"invalid array shape {shape}")
    if len(shape) > 4 or math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content)} values")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _key_to_str(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if not isinstance(key, str):
        raise ValueError("a dict key is not a string")
    return key

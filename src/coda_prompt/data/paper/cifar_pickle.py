"""Plain values out of a pickle that is never unpickled.

CIFAR's published files are pickles of protocol 2. This reads the opcodes they are made of and
builds dicts, lists, tuples, text, numbers and uint8 arrays. Names in a file are compared with the
few that stand for such an array; nothing is imported or called, and anything else is refused.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import CorruptFile

MOST_OPCODES = 2_000_000
"""CIFAR-100's largest file needs a few hundred thousand; each makes at most one small value."""


class _Token(Enum):
    """What stands on the stack for something that is not a plain value."""

    MARK = "a mark"
    NDARRAY = "the type of arrays"
    DTYPE = "the type of dtypes"
    RECONSTRUCT = "the maker of arrays"
    ENCODE = "the maker of bytes"
    UINT8 = "the dtype uint8"
    UNFILLED = "an array without its values"


_NAMES: Mapping[str, _Token] = MappingProxyType(
    {
        "numpy ndarray": _Token.NDARRAY,
        "numpy dtype": _Token.DTYPE,
        "numpy.core.multiarray _reconstruct": _Token.RECONSTRUCT,
        "numpy._core.multiarray _reconstruct": _Token.RECONSTRUCT,  # since numpy 2
        "_codecs encode": _Token.ENCODE,  # how Python 3 writes bytes in protocol 2
    }
)
_CONSTANTS: Mapping[str, Any] = MappingProxyType(
    {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _Token.MARK}
)
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE")
)
_TUPLES: Mapping[str, int] = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})


def read_cifar_pickle(content: bytes, path: object) -> dict[str, Any]:
    """The dict a file of plain values holds; `path` is only for the error message."""
    try:
        values = _Reader(len(content)).read(content)
    except (ValueError, LookupError, TypeError) as problem:
        raise CorruptFile(path, f"it is not as it was published ({problem})") from problem
    if not isinstance(values, dict):
        raise CorruptFile(path, "it is not as it was published (it holds no dict)")
    return values


class _Reader:
    """A stack and a memo, as the format has them."""

    def __init__(self, room: int) -> None:
        self.room = room
        """Bytes that may still be copied: a file could name one long text many times."""
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MOST_OPCODES:
                raise ValueError(f"more than {MOST_OPCODES:,} values")
            if opcode.name == "STOP":
                return self._pop()
            self._step(opcode.name, argument)
        raise ValueError("it has no end")

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
            stack.append(tuple(self._since_mark()))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("APPEND", "APPENDS"):
            items = [self._pop()] if name == "APPEND" else self._since_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._since_mark()
            keys = [_text(key) for key in items[::2]]
            self._top(dict).update(zip(keys, items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise ValueError(f"it names {argument!r}, which is not allowed")
            stack.append(_NAMES[argument])
        elif name == "REDUCE":
            arguments = self._pop()
            stack.append(self._made(self._pop(), arguments))
        elif name == "BUILD":
            state = self._pop()
            stack.append(self._filled(self._pop(), state))
        elif name != "PROTO":
            raise ValueError(f"its opcode {name} is not allowed")

    def _made(self, maker: Any, arguments: Any) -> Any:
        match maker, arguments:
            case _Token.RECONSTRUCT, (_Token.NDARRAY, (0,), _):
                return _Token.UNFILLED
            case _Token.DTYPE, ("u1", *_):
                return _Token.UINT8
            case _Token.ENCODE, (str() as text, "latin1"):
                return self._bytes(text)
        raise ValueError("it calls for something other than an array of uint8")

    def _filled(self, target: Any, state: Any) -> Any:
        match target, state:
            case _Token.UINT8, tuple():
                return _Token.UINT8
            case _Token.UNFILLED, (1, tuple() as shape, _Token.UINT8, False, str() as text):
                return _array(shape, self._bytes(text))
            case _Token.UNFILLED, (1, tuple() as shape, _Token.UINT8, False, bytes() as content):
                return _array(shape, content)
        raise ValueError("its array is not one of uint8 in rows")

    def _bytes(self, text: str) -> bytes:
        self.room -= len(text)
        if self.room < 0:
            raise ValueError("it holds more values than bytes")
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

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _Token.MARK:
            items.append(item)
        return items[::-1]


def _array(shape: tuple[Any, ...], content: bytes) -> NDArray[np.uint8]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no array has the shape {shape}")
    if len(shape) > 4 or math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content)} values")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _text(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if not isinstance(key, str):
        raise ValueError("a dict with a key that is no text")
    return key

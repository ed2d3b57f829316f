"""Check the shapes that a method of the user's own returns, so that a mistake is named at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coda_prompt.errors import BadMethod
from coda_prompt.research.methods.base import Loss, Method, TrainedMethod
from coda_prompt.research.methods.ranpac import RanPAC
from coda_prompt.research.methods.stages import TrainingBatch

Problem = str | None


def check_returned_shapes(method: type[Method], module: str, file: str) -> None:
    """Wrap the members of a class that return tensors; others than those in its file are trusted.

    Args:
        method: The class.
        module: Name of the module that its file was loaded as.
        file: The file, for messages.
    """
    for owner in (each for each in method.__mro__ if each.__module__ == module):
        for name, problem_of in PROBLEMS.items():
            if name in vars(owner):
                spec = f"{file}:{owner.__name__}"
                setattr(owner, name, _checked(vars(owner)[name], problem_of, spec, name))


def _checked(
    function: Callable[..., Any], problem_of: Callable[..., Problem], spec: str, name: str
) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(self: Method, *arguments: Any, **named: Any) -> Any:
        value = function(self, *arguments, **named)
        inputs = (*arguments, *named.values())
        tracing = torch._C._get_tracing_state() is not None  # then sizes are no integers
        if not tracing and (problem := problem_of(self, value, inputs[0])):
            raise BadMethod(spec, f"{name} returns {problem}")
        return value

    return checked


def _mismatch(value: object, *expected: int | str) -> Problem:
    """Describe a value that is no tensor of this shape; a name stands for any size."""
    wanted = f"expected a tensor of shape ({', '.join(map(str, expected))})"
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}, {wanted}"
    fits = value.dim() == len(expected) and all(
        isinstance(size, str) or size == own
        for size, own in zip(expected, value.shape, strict=True)
    )
    return None if fits else f"a tensor of shape {tuple(value.shape)}, {wanted}"


def _of_features(method: Method, value: object, images: Any) -> Problem:
    width: int | str = "features"
    if isinstance(method, RanPAC):
        width = method.feature_width()
    elif isinstance(method, TrainedMethod):
        width = method.head.width
    return _mismatch(value, _count(images), width)


def _of_logits(method: Method, value: object, images: Any) -> Problem:
    return _mismatch(value, _count(images), method.classes_seen)


def _of_queries(method: Method, value: object, images: Any) -> Problem:
    return _mismatch(value, _count(images), method.vit_config.width)


def _of_loss(_: Method, value: object, batch: TrainingBatch) -> Problem:
    if not isinstance(value, Loss):
        return f"{type(value).__name__}, not Loss; use Loss.of(per_image)"
    parts = {"mean": value.mean, "total": value.total}
    wrong = {name: _mismatch(part, len(batch.labels)) for name, part in parts.items()}
    wrong["penalty"] = _mismatch(value.penalty)
    return next((f"{name} as {problem}" for name, problem in wrong.items() if problem), None)


def _of_prefixes(method: Method, value: object, queries: Tensor) -> Problem:
    if not isinstance(value, dict):
        return f"{type(value).__name__}, expected a dict from blocks to (keys, values)"
    vit = method.vit_config
    for block, pair in value.items():
        if block not in range(vit.depth):
            return f"a prefix for block {block!r}, but blocks are 0 to {vit.depth - 1}"
        if not isinstance(pair, tuple) or len(pair) != 2:
            return f"{type(pair).__name__} for block {block}, expected (keys, values)"
        for part in pair:
            if problem := _mismatch(part, "images", "length", vit.width):
                return f"for block {block} {problem}"
        keys, values = pair
        if keys.shape != values.shape or len(keys) not in (1, len(queries)):
            shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
            wanted = f"the same shape for both, and 1 or {len(queries)} images"
            return f"for block {block} {shapes}, expected {wanted}"
    return None


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "features": _of_features,
    "logits": _of_logits,
    "scores": _of_logits,
    "queries": _of_queries,
    "loss": _of_loss,
    "prefixes": _of_prefixes,
}
"""Member -> what is wrong with the value it returned for its first argument."""


def _count(images: Any) -> int:
    """Return the number of images of a batch of pixels or features, or of a started pass."""
    return len(images if isinstance(images, Tensor) else images.tokens)

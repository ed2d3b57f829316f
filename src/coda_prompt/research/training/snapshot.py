"""Undo a failed task: a snapshot of a method in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from coda_prompt.research.methods import Method

_TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def restored_on_error(method: Method) -> Iterator[None]:
    """If the block raises, reset the method to its state before: attributes, tensor values and
    `requires_grad` flags, except those of a frozen backbone.

    Unlike the learned state, this works at any time, also within a task.
    """
    backbone = set(method.backbone.modules()) if method.frozen_backbone else set()
    states = [
        (module, {**module.__dict__, **{name: dict(getattr(module, name)) for name in _TABLES}})
        for module in method.modules()
        if module not in backbone
    ]
    values = [
        (tensor, tensor.detach().clone(), tensor.requires_grad)
        for _, state in states
        for tensor in (*state["_parameters"].values(), *state["_buffers"].values())
        if tensor is not None
    ]
    try:
        yield
    except BaseException:
        for module, state in states:
            module.__dict__.clear()
            module.__dict__.update(state)
        with torch.no_grad():
            for tensor, value, requires_grad in values:
                tensor.copy_(value)
                tensor.grad = None
                tensor.requires_grad_(requires_grad)
        raise

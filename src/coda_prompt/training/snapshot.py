"""Snapshots of a method in memory, to undo a failed task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda_prompt.methods import Method

_TABLES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """Attributes, tensor values and `requires_grad` flags of a method, except a frozen backbone.

    Unlike the learned state, a snapshot can be taken and restored at any time, also within a task,
    so a task that fails leaves the method unchanged.
    """

    def __init__(self, method: Method) -> None:
        backbone = set(method.backbone.modules()) if method.frozen_backbone else set()
        self._attributes = [
            (module, _copy(module.__dict__))
            for module in method.modules()
            if module not in backbone
        ]
        self._values: list[tuple[Tensor, Tensor, bool]] = []
        for _, attributes in self._attributes:
            for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
                if tensor is not None:
                    value = tensor.detach().clone()
                    self._values.append((tensor, value, tensor.requires_grad))

    @torch.no_grad()
    def restore(self) -> None:
        """Reset the method to its state when the snapshot was taken."""
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(_copy(attributes))
        for tensor, value, requires_grad in self._values:
            tensor.copy_(value)
            tensor.grad = None
            tensor.requires_grad_(requires_grad)


def _copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy the attributes and the tables of parameters, buffers and modules, not the tensors."""
    return {name: dict(value) if name in _TABLES else value for name, value in attributes.items()}

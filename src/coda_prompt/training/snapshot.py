"""A method as it stands, to be put back whatever happens to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda_prompt.methods import Method

_TABLES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """All a method holds but its frozen backbone: attributes, tensors and what trains.

    Unlike the learned state it can be taken and restored in the middle of anything, so that a task
    which fails half-way, wherever that is, leaves no trace.
    """

    def __init__(self, method: Method) -> None:
        backbone = set(method.backbone.modules()) if method.frozen_backbone else set()
        self._attributes = [
            (module, _copied(module.__dict__))
            for module in method.modules()
            if module not in backbone
        ]
        self._values: list[tuple[Tensor, Tensor, bool]] = []
        for _, attributes in self._attributes:
            for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
                if tensor is not None:
                    kept = (tensor, tensor.detach().clone(), tensor.requires_grad)
                    self._values.append(kept)

    @torch.no_grad()
    def restore(self) -> None:
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(_copied(attributes))
        for tensor, value, trains in self._values:
            tensor.copy_(value)
            tensor.grad = None
            tensor.requires_grad_(trains)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy that later additions and removals do not reach."""
    return {name: dict(value) if name in _TABLES else value for name, value in attributes.items()}

"""Measure what each part of the tuning for CPUs gains alone: a training step without it.

    python benchmarks/parts.py [--rounds 7] [--batch 16] [--backbone NAME] [--out FILE]

On idle cores. Steps are measured alternately; medians, and the ratio of time and memory to the step
as it is. A part whose ratios are both below 1.05 is not worth its lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from speed import (
    EngineStep,
    Step,
    batch_for,
    in_task,
    interleaved,
    machine,
    peak_above,
    peak_of_tensors,
    product_step,
    show,
)
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.console import stdout_console
from coda_prompt.research.vit import fast_cpu, half_blocks, linear, vit
from coda_prompt.storage.files import write_atomically

BACKBONES = ("ViT-S/14, 112 px", "ViT-B/16")
AS_IT_IS = "as it is"
IN_BFLOAT16 = ("attention in bfloat16", "weights cast in every call")


def _blas(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    outputs = F.linear(inputs, weight, bias)
    return F.gelu(outputs) if gelu else outputs


def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    outputs, logsumexp = fast_cpu._ATTENTION(query, key, value)
    return outputs, logsumexp


def _attention_backward(gradient: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = fast_cpu._ATTENTION_BACKWARD(gradient, *saved, 0.0, False)
    return gradients


def _cast(layer: linear.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return layer.weight.to(dtype), layer.bias.to(dtype)


PATCHES: dict[str, list[tuple[Any, str, Any]]] = {
    "half blocks by autograd": [(vit, "frozen_layers", lambda *_: None)],
    "products without oneDNN": [
        (module, "product", _blas) for module in (fast_cpu, half_blocks, linear)
    ],
    "attention in bfloat16": [
        (module, name, part)
        for module in (fast_cpu, half_blocks)
        for name, part in (("attention", _attention), ("attention_backward", _attention_backward))
    ],
    "weights cast in every call": [(linear.Linear, "_cast_once", _cast)],
}
"""What replaces a part."""


@contextlib.contextmanager
def without(variant: str) -> Iterator[None]:
    """Switch one part off."""
    with contextlib.ExitStack() as stack:
        for where, name, replacement in PATCHES.get(variant, []):
            stack.enter_context(mock.patch.object(where, name, replacement))
        yield


class Without(EngineStep):
    """A step of the engine without one part."""

    variant = AS_IT_IS

    def __call__(self) -> None:
        with without(self.variant):
            super().__call__()


def steps_of(backbone: str, size: int, bfloat16: bool) -> dict[str, Step]:
    """Return a training step with exact queries for each variant."""
    method = in_task(backbone, 5, 50, 10)
    given = (method, *batch_for(backbone, size, method))
    steps: dict[str, Any] = {AS_IT_IS: Without(*given, bfloat16=bfloat16)}
    for variant in PATCHES:
        if bfloat16 or variant not in IN_BFLOAT16:
            steps[variant] = Without(*given, bfloat16=bfloat16)
            steps[variant].variant = variant
    steps["whole batch on all cores"] = product_step(*given, cached=False, bfloat16=bfloat16)
    steps["parts in turn on all cores"] = EngineStep(*given, bfloat16=bfloat16, workers=1)
    return steps


def resident(backbone: str, size: int, bfloat16: bool, variant: str) -> float:
    """Return the MiB of memory of a step in a new process."""
    arguments = [backbone, str(size), str(int(bfloat16)), variant]
    command = [sys.executable, __file__, "--memory", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(backbone: str, size: int, bfloat16: bool, rounds: int) -> list[dict[str, Any]]:
    steps = steps_of(backbone, size, bfloat16)
    seconds = interleaved(steps, rounds)
    rows: list[dict[str, Any]] = []
    for variant, step in steps.items():
        row: dict[str, Any] = {
            "backbone": backbone,
            "precision": "bfloat16" if bfloat16 else "float32",
            "step": variant,
            "seconds": seconds[variant],
            "MiB": resident(backbone, size, bfloat16, variant),
            "MiB of tensors": peak_of_tensors(step),
        }
        base = rows[0] if rows else row
        ratios = {f"{key}, ratio": row[key] / base[key] for key in list(row)[3:]}
        rows.append({**row, **ratios})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--backbone", choices=BACKBONES, action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/parts.json"))
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        backbone, size, bfloat16, variant = options.memory
        build = lambda: steps_of(backbone, int(size), bfloat16 == "1")[variant]  # noqa: E731
        stdout_console().print(peak_above(build))
        return
    rows = []
    for backbone in options.backbone or BACKBONES:
        for in_bfloat16 in (False, True):
            part = measure(backbone, options.batch, in_bfloat16, options.rounds)
            show(part, f"{backbone}, batch {options.batch}")
            rows += part
    content = {"machine": machine(), "batch": options.batch, "rows": rows}
    write_atomically(options.out, json.dumps(content, indent=1).encode())


if __name__ == "__main__":
    main()

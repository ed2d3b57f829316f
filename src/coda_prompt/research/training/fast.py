"""The recipe of `--fast`: fewer queries to compute, and bfloat16 where it is faster.

docs/lab/performance.md has operations and times. Not part of it, because they gain nothing on top:
token merging in the query pass (that pass is a fifth of what is left), larger batches for queries
(5 % of that pass, but every view would be decoded once more), and leaving out blocks without
prompts (gradients of prompts in the first blocks pass through all later ones).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from coda_prompt.research.training.bfloat16 import bfloat16_products

EPOCHS_PER_VIEW = 2
"""With three, CODA-P loses 1.3 points on pocket; with two, nothing (docs/lab/performance.md)."""


def fast_views(epochs: int) -> int:
    """Return the number of augmented views per image; the query of each is computed once."""
    return math.ceil(epochs / EPOCHS_PER_VIEW)


def fast_precision(device: str = "auto") -> Literal["32-true", "bf16-mixed"]:
    """Return the fastest precision that does not change weights on this device."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu" or (device == "auto" and not torch.backends.mps.is_available()):
        supported = bfloat16_products() == "faster"
    else:
        supported = False
    return "bf16-mixed" if supported else "32-true"


def describe_fast(views: str, precision: str) -> str:
    """Say what `--fast` does here."""
    arithmetic = (
        "bfloat16" if precision == "bf16-mixed" else "float32 (bfloat16 is not faster here)"
    )
    return f"--fast: {views} per image, each with one query; products in {arithmetic}"

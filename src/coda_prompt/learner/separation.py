"""How well scores tell images of known classes from others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Separation:
    """How well a model recognises images of classes it does not know."""

    images: int
    """Images of unknown classes."""
    auroc: float
    """Probability that an image of a known class is more typical than one of an unknown class."""
    false_positive_rate: float
    """Share of unknown images that are accepted if 95 % of the known ones are."""
    rate: float
    """The share of known images that was to be rejected."""
    rejected_known: float
    """The share of known images that is rejected at this rate."""
    rejected_unknown: float
    """The share of unknown images that is rejected at this rate."""


def separation(known: Tensor, unknown: Tensor, rate: float) -> Separation:
    """Measure how well typicality tells images apart.

    Args:
        known: Typicality of images of known classes.
        unknown: Typicality of images of unknown classes.
        rate: The share of known images to reject.
    """
    return Separation(
        images=len(unknown),
        auroc=auroc(known, unknown),
        false_positive_rate=false_positive_rate(known, unknown),
        rate=rate,
        rejected_known=float((known < rate).double().mean()),
        rejected_unknown=float((unknown < rate).double().mean()),
    )


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Return the probability that a known score is above an unknown one; ties count half."""
    order, size, known = unknown.sort().values, len(unknown), known.contiguous()
    below = torch.searchsorted(order, known, right=False)
    not_above = torch.searchsorted(order, known, right=True)
    return float((below + not_above).double().mean() / (2 * size))


def false_positive_rate(known: Tensor, unknown: Tensor, accepted: float = 0.95) -> float:
    """Return the share of unknown scores at or above what a share of the known ones reaches."""
    threshold = known.sort(descending=True).values[max(0, round(accepted * len(known)) - 1)]
    return float((unknown >= threshold).double().mean())

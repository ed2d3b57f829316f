"""Whether images resemble those a model was taught: their kind, and how typical they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from coda_prompt.learner.unknown import DEFAULT_RATE

if TYPE_CHECKING:
    from coda_prompt.learner.store import TaskRecord

KIND_DIFFERENCE = 0.5
"""Difference of the shares of drawings from which images are of another kind."""
MOST_ATYPICAL, MIN_ATYPICAL = 0.3, 5
"""More atypical images than this share, and at least so many, are of another kind. Of new
photographs of learned classes 4 to 7 % are, of their cartoons and sketches 59 to 100 %."""


def kind_finding(tasks: Sequence[TaskRecord], drawings: Iterable[bool]) -> list[str]:
    """Say whether images are drawings and those taught were photographs, or the other way round.

    Args:
        tasks: The lessons of the model.
        drawings: Of each sampled image, whether it is a drawing.
    """
    sampled = list(drawings)
    taught = [(sum(task.images.values()), task.drawings) for task in tasks]
    known = [(images, share) for images, share in taught if images and share is not None]
    if not sampled or not known:
        return []
    share = sum(images * share for images, share in known) / sum(images for images, _ in known)
    count = sum(sampled)
    if abs(count / len(sampled) - share) <= KIND_DIFFERENCE:
        return []
    kinds = ["drawings", "photographs"]
    if count / len(sampled) < share:
        kinds, count = kinds[::-1], len(sampled) - count
    return [
        f"{count} of {len(sampled)} sampled images look like {kinds[0]}, and the images taught "
        f"before are mostly {kinds[1]}: expect mistakes, with probabilities that are too high"
    ]


def typicality_finding(typicality: Tensor, what: str) -> list[str]:
    """Say whether many images of learned classes are not typical of what was taught.

    Args:
        typicality: Of each image.
        what: The images, in words.
    """
    total, atypical = len(typicality), int((typicality < DEFAULT_RATE).sum())
    if atypical < MIN_ATYPICAL or atypical <= MOST_ATYPICAL * total:
        return []
    return [
        f"{atypical} of {total} {what} are not typical of the images taught before (about "
        f"{round(DEFAULT_RATE * total)} would be expected): they look different, for example "
        "sketches instead of photographs, and probabilities are too high for them"
    ]

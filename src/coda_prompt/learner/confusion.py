"""Which classes are taken for which: the confusion matrix, its largest entries and a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coda_prompt.errors import BadOption
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PAIRS = 20
"""Pairs of confused classes in an evaluation or a summary."""
MAX_NUMBERS = 25
"""With more classes, the cells of the picture have no numbers."""


@dataclass(frozen=True)
class Confusion:
    """How often images of one class were predicted to be of another."""

    true: str
    """The class the images belong to."""
    predicted: str
    """The class that was predicted."""
    images: int
    """Images that were confused."""
    share: float
    """Of the images of the true class."""


@dataclass(frozen=True)
class ConfusionMatrix:
    """Images by true and by predicted class."""

    classes: tuple[str, ...]
    """Classes that have images or were predicted, in the order in which they were learned."""
    counts: tuple[tuple[int, ...], ...]
    """One row for each true class, one column for each predicted class."""

    @classmethod
    def count(cls, truth: Tensor, predicted: Tensor, names: Sequence[str]) -> ConfusionMatrix:
        """Count predictions.

        Args:
            truth: Row of the correct class of each image.
            predicted: Row of the predicted class of each image.
            names: Class names by row.
        """
        total = len(names)
        flat = torch.bincount(truth * total + predicted, minlength=total**2)
        table = flat.view(total, total)
        present = (table.sum(dim=0) + table.sum(dim=1)).nonzero()[:, 0]
        rows = table[present][:, present].tolist()
        classes = tuple(names[row] for row in present.tolist())
        return cls(classes, tuple(tuple(row) for row in rows))

    def confused(self) -> tuple[Confusion, ...]:
        """Return the most frequent confusions, those of most images first."""
        rows = (dict(zip(self.classes, row, strict=True)) for row in self.counts)
        return most_confused(dict(zip(self.classes, rows, strict=True)))


def most_confused(counts: Mapping[str, Mapping[str, int]]) -> tuple[Confusion, ...]:
    """Return the most frequent confusions, those of most images first.

    Args:
        counts: Number of images by correct class and by predicted class.
    """
    found = [
        Confusion(true, predicted, images, images / sum(row.values()))
        for true, row in counts.items()
        for predicted, images in row.items()
        if images and predicted != true
    ]
    found.sort(key=lambda each: (-each.images, -each.share))
    return tuple(found[:MAX_PAIRS])


def draw_confusion(matrix: ConfusionMatrix, path: Path) -> None:
    """Write a confusion matrix as a picture.

    Raises:
        BadOption: The name of the file does not end in .png, or its folder does not exist.
    """
    check_picture(path)
    content = io.BytesIO()
    _figure(matrix).savefig(content, dpi=150, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that comes first.

    Raises:
        BadOption: The name of the file does not end in .png, or its folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise BadOption("coda evaluate", "picture", f"{path} does not end in .png")
    if not path.absolute().parent.is_dir():
        raise BadOption("coda evaluate", "picture", f"there is no folder {path.parent}")


def _figure(matrix: ConfusionMatrix) -> Figure:
    from matplotlib.figure import Figure

    count = len(matrix.classes)
    side = min(max(4.0, 0.35 * count + 2), 20.0)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    shares = [[value / max(1, sum(row)) for value in row] for row in matrix.counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 9 if count <= MAX_NUMBERS else max(2.0, 240 / count)
    axes.set_xticks(range(count), matrix.classes, rotation=90, fontsize=size)
    axes.set_yticks(range(count), matrix.classes, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= MAX_NUMBERS:
        for row, values in enumerate(matrix.counts):
            for column, value in enumerate(values):
                if value:
                    color = "white" if shares[row][column] > 0.6 else "black"
                    axes.text(
                        column, row, str(value), ha="center", va="center", color=color, fontsize=7
                    )
    return figure

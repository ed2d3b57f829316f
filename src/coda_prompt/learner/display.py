"""`Predictions`: results for several images that print, plot and convert to dicts."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from coda_prompt.images.inputs import as_image
from coda_prompt.learner.predict import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PLOTTED = 64


class Predictions(Sequence[Prediction]):
    """A sequence of `Prediction`, one for each image.

    Args:
        images: The images, as `image_items` returns them.
        predictions: One for each image.
    """

    def __init__(self, images: list[Any] | NDArray[Any], predictions: list[Prediction]) -> None:
        self.images, self._predictions = images, predictions

    @property
    def names(self) -> list[str]:
        """The path of each image; its number if it is not a file."""
        return [
            os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"
            for number, image in enumerate(self.images)
        ]

    def __len__(self) -> int:
        return len(self._predictions)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prediction]: ...
    def __getitem__(self, index: int | slice) -> Prediction | list[Prediction]:
        return self._predictions[index]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return each prediction as plain JSON types, with the `path` of the image."""
        return [
            {"path": name, **prediction.as_dict()}
            for name, prediction in zip(self.names, self, strict=True)
        ]

    def __repr__(self) -> str:
        lines = []
        for name, prediction in zip(self.names, self, strict=True):
            others = [f"{each.label} {each.probability:.0%}" for each in prediction.top[1:]]
            more = f" ({', '.join(others)})" if others else ""
            lines.append(f"{name}: {_title(prediction)}{more}")
        return "\n".join(lines) or "no image"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = [line.split(": ", 1) for line in repr(self).splitlines()]
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the images with their classes; of more than 64, the first 64.

        Args:
            path: Also write the figure to this file; its extension decides the format.
        """
        from matplotlib.figure import Figure

        count = min(len(self), MAX_PLOTTED)
        columns = max(1, math.ceil(math.sqrt(count)))
        rows = max(1, math.ceil(count / columns))
        figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for each in axes:
            each.set_axis_off()
        for each, image, prediction in zip(axes, self.images, self, strict=False):
            picture = as_image(image)
            each.imshow(picture, cmap="gray" if picture.mode == "L" else None)
            each.set_title(_title(prediction), fontsize=9)
        if path is not None:
            figure.savefig(path)
        return figure


def _title(prediction: Prediction) -> str:
    """Return the class and its probability."""
    best = f"{prediction.best} {prediction.probability:.1%}"
    return f"unknown, best guess {best}" if prediction.unknown else best

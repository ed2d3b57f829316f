"""Draw docs/lab/renditions.png: the same drawings in each of pocket's styles, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coda_prompt.research.streams.pocket import STRENGTH, pocket_source
from coda_prompt.research.streams.renditions import STYLES, render

CLASSES = ("cat", "bicycle", "house", "guitar", "fish", "tree", "cup", "face")
ROWS = 5


def main() -> None:
    plain = pocket_source(strength=0)
    wanted = [name for name in CLASSES if name in plain.class_names]
    names = [*wanted, *(name for name in plain.class_names if name not in wanted)][:ROWS]
    figure = Figure(figsize=(11, 1.12 * ROWS + 0.5), layout="constrained")
    axes = figure.subplots(ROWS, len(STYLES))
    for row, name in enumerate(names):
        first = int(np.flatnonzero(plain.train.labels == plain.class_names.index(name))[0])
        drawing = np.asarray(plain.train.image(first))[None]
        for column, style in enumerate(STYLES):
            image = render(drawing, np.array([column]), STRENGTH)[0]
            cell = axes[row, column]
            cell.imshow(image, cmap="gray", vmin=0, vmax=255)
            cell.set_xticks([])
            cell.set_yticks([])
            if row == 0:
                cell.set_title(style)
            if column == 0:
                cell.set_ylabel(name)
    path = Path(__file__).parents[1] / "docs" / "lab" / "renditions.png"
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()

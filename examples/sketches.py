"""Folders of sketches for the examples; use folders of your own images instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coda_prompt.research.streams.pocket import pocket_source

NAMES = pocket_source(0).class_names


def write_sketches(folder: str | Path, classes: list[str], *, images: int = 20) -> Path:
    """Write train/CLASS/*.png and test/CLASS/*.png of classes of the embedded drawings."""
    source = pocket_source(0)
    for part, split in (("train", source.train), ("test", source.test)):
        for name in classes:
            target = Path(folder) / part / name
            target.mkdir(parents=True, exist_ok=True)
            rows = np.flatnonzero(split.labels == source.class_names.index(name))[:images]
            for number, row in enumerate(rows):
                split.image(int(row)).save(target / f"{number:02}.png")
    return Path(folder)

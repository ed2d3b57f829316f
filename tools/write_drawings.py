"""Write pocket's drawings as PNG folders, to try `coda learn`.

    python tools/write_drawings.py FOLDER --tasks 3 --classes 10

It creates FOLDER/task-1, task-2, ... with one folder per class, and FOLDER/test with all classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from coda_prompt.images.sources import Split
from coda_prompt.research.streams.pocket import pocket_source


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--classes", type=int, default=10, help="classes per task")
    parser.add_argument("--train", type=int, default=80, help="training drawings per class")
    parser.add_argument("--strength", type=float, default=None, help="style strength; 0: plain")
    options = parser.parse_args()
    source = pocket_source() if options.strength is None else pocket_source(options.strength)
    for row in range(options.tasks * options.classes):
        name, task = source.class_names[row], row // options.classes + 1
        write(source.train, row, options.folder / f"task-{task}" / name, options.train)
        write(source.test, row, options.folder / "test" / name, len(source.test))


def write(split: Split, row: int, folder: Path, most: int) -> None:
    """Write at most `most` drawings of a class."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, index in enumerate(np.flatnonzero(split.labels == row)[:most]):
        split.image(int(index)).save(folder / f"{number:02}.png")


if __name__ == "__main__":
    main()

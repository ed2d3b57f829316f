"""Build the demo model of `coda serve`: 40 classes of drawings.

    python tools/make_demo_model.py [--method slda] [--try]

It learns two tasks of twenty classes of pocket, replaces src/coda_prompt/assets/demo-model and
prints its accuracy on the 800 test drawings. `--try` writes nothing;
it prints the accuracy of two further classes that are learned from few plain drawings, and of the
other 40 afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.pocket import pocket_source

FOLDER = Path(coda_prompt.__file__).parent / "assets" / "demo-model"
TASKS = (range(20), range(20, 40))
FURTHER = range(50, 52)
"""Classes that `--try` adds."""


def drawings(source: Source, rows: range, count: int, *, test: bool = False) -> Any:
    """Return the first `count` drawings of each class, and their labels."""
    split: Any = source.test if test else source.train
    indices = [index for row in rows for index in np.flatnonzero(split.labels == row)[:count]]
    return split.images[indices], [source.class_names[split.labels[index]] for index in indices]


def train(method: str) -> ContinualClassifier:
    """Learn both tasks."""
    source = pocket_source()
    classifier = ContinualClassifier("pocket", method, verbose=False)
    for rows in TASKS:
        classifier.learn(*drawings(source, rows, 80), validation=0.1)
    return classifier


def try_further_classes(classifier: ContinualClassifier, folder: str) -> None:
    """Print accuracies before and after learning two further classes."""
    plain = pocket_source(strength=0.0)
    classifier.save(folder)
    known = drawings(plain, range(40), 20, test=True)
    print(f"40 classes: {100 * classifier.score(*known):.1f} %")
    for count in (5, 10):
        again = ContinualClassifier.load(folder)
        again.learn(*drawings(plain, FURTHER, count))
        new = again.score(*drawings(plain, FURTHER, 20, test=True))
        print(f"2 more of {count}: {100 * new:.1f} %, the 40: {100 * again.score(*known):.1f} %")


def describe(folder: Path) -> str:
    """Return the accuracy on plain and on augmented test drawings, and the size of a model."""
    classifier = ContinualClassifier.load(folder)
    sources = (pocket_source(strength=0.0), pocket_source())
    plain, varied = (
        100 * classifier.score(*drawings(source, range(40), 20, test=True)) for source in sources
    )
    size = (folder / "model.safetensors").stat().st_size / 1e6
    return f"{plain:.1f} % of plain and {varied:.1f} % of varied drawings, {size:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", default="slda")
    parser.add_argument("--try", action="store_true", dest="trial")
    options = parser.parse_args()
    classifier = train(options.method)
    with tempfile.TemporaryDirectory() as folder:
        if options.trial:
            try_further_classes(classifier, folder)
            return
        classifier.save(folder)
        shutil.rmtree(FOLDER)
        FOLDER.mkdir()
        for name in ("model.safetensors", "config.json", "README.md"):
            shutil.copy(Path(folder) / name, FOLDER / name)
        print(describe(FOLDER))


if __name__ == "__main__":
    main()

"""Make the model that `coda serve` starts from: CODA-P's prompts, RanPAC's classifier, 40 classes.

    python tools/make_demo_model.py [--method coda-p-ranpac] [--try]

Two tasks of twenty classes of pocket. `--try` writes nothing and tells instead what two further
classes, taught with few drawings in plain ink, get among all 42, and what the 40 keep.
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
from coda_prompt.data.pocket import pocket_source
from coda_prompt.data.sources import Source

FOLDER = Path(coda_prompt.__file__).parent / "assets" / "demo-model"
TASKS = (range(20), range(20, 40))
FURTHER = range(50, 52)
WIDTH = 1024


def drawings(source: Source, rows: range, count: int, *, test: bool = False) -> Any:
    split: Any = source.test if test else source.train
    places = [place for row in rows for place in np.flatnonzero(split.labels == row)[:count]]
    return split.images[places], [source.class_names[split.labels[place]] for place in places]


def learned(method: str) -> ContinualClassifier:
    source = pocket_source()
    options: dict[str, Any] = {"width": WIDTH} if method.endswith("ranpac") else {}
    classifier = ContinualClassifier(method=method, **options)
    for rows in TASKS:
        classifier.learn(*drawings(source, rows, 80), validation=0.1)
    return classifier


def tried(classifier: ContinualClassifier, folder: str) -> None:
    plain = pocket_source(strength=0.0)
    classifier.save(folder)
    known = drawings(plain, range(40), 20, test=True)
    print(f"40 classes: {100 * classifier.score(*known):.1f} %")
    for count in (5, 10):
        again = ContinualClassifier.load(folder)
        again.learn(*drawings(plain, FURTHER, count))
        new = again.score(*drawings(plain, FURTHER, 20, test=True))
        print(f"2 more of {count}: {100 * new:.1f} %, the 40: {100 * again.score(*known):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", default="coda-p-ranpac")
    parser.add_argument("--try", action="store_true", dest="tried")
    options = parser.parse_args()
    classifier = learned(options.method)
    with tempfile.TemporaryDirectory() as place:
        if options.tried:
            tried(classifier, place)
            return
        classifier.save(place)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "README.md"):
            shutil.copy(Path(place) / name, FOLDER / name)


if __name__ == "__main__":
    main()

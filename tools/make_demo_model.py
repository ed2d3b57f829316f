"""Make the model that `coda serve` starts from: CODA-P's prompts, RanPAC's classifier, 40 classes.

    python tools/make_demo_model.py

Two tasks of twenty classes of pocket. CODA-P's own head was tried first: of two classes taught
with ten drawings each it named none among all 42 (docs/serving.md).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.data.pocket import pocket_source

FOLDER = Path(coda_prompt.__file__).parent / "assets" / "demo-model"
TASKS = (range(20), range(20, 40))
WIDTH = 1024


def main() -> None:
    source = pocket_source()
    train: Any = source.train
    classifier = ContinualClassifier(method="coda-p-ranpac", width=WIDTH)
    for rows in TASKS:
        places = np.flatnonzero(np.isin(train.labels, rows))
        names = [source.class_names[label] for label in train.labels[places]]
        print(classifier.learn(train.images[places], names, validation=0.1))
    with tempfile.TemporaryDirectory() as place:
        classifier.save(place)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "README.md"):
            shutil.copy(Path(place) / name, FOLDER / name)


if __name__ == "__main__":
    main()

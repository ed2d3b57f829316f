"""Measure how often `is_drawing` is wrong, and what `auto` would choose for folders of 40 images.

    PYTHONPATH=src python tools/measure_kinds.py --data DIR

DIR has the arrays of `photo_data.py` (photographs of Tiny-ImageNet and CIFAR-100). Drawings are
those of the package: as they are, in black on white, enlarged, and in the styles of `pocket`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coda_prompt.images.kinds import is_drawing
from coda_prompt.research.streams.pocket import pocket_source

FOLDERS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5_000, help="of each set, at most")
    options = parser.parse_args()
    plain: Any = pocket_source(0.0).train
    styled: Any = pocket_source().train
    drawings = plain.images
    sets: dict[str, tuple[bool, Any, Any]] = {
        "drawings, white on black, 28 px": (True, drawings, Image.fromarray),
        "black on white": (True, 255 - drawings, Image.fromarray),
        "enlarged to 224 px": (True, drawings, lambda a: Image.fromarray(a).resize((224, 224))),
        "in the styles of pocket (noise, hatching, blur, ...)": (
            True,
            styled.images,
            Image.fromarray,
        ),
    }
    for name in ("tiny-val", "cifar-test"):
        photographs = np.load(options.data / f"{name}.npy", mmap_mode="r")
        sets[name] = (False, photographs, Image.fromarray)
        sets[f"{name}, grey"] = (False, photographs, lambda a: Image.fromarray(a).convert("L"))
    random = np.random.default_rng(0)
    print("| images | number | wrong | folders of 40 with the wrong majority |\n|---|---|---|---|")
    for name, (truth, arrays, as_image) in sets.items():
        count = min(len(arrays), options.images)
        chosen = np.sort(random.choice(len(arrays), count, replace=False))
        wrong = np.array([is_drawing(as_image(arrays[each])) != truth for each in chosen])
        folders = wrong[random.integers(0, count, (FOLDERS, 40))].sum(axis=1)
        shares = f"{100 * wrong.mean():.1f} % | {(folders > 20).sum()} of {FOLDERS}"
        print(f"| {name} | {count} | {shares} |", flush=True)


if __name__ == "__main__":
    main()

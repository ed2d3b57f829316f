"""ImageNet-R: 200 folders of renditions, split by the field's pair of lists where they are there.

The lists come with the released code. Their class ids are not the sorted folder names, so that
the task order of every seed depends on them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coda_prompt.data.folders import folder_source
from coda_prompt.data.paper.lists import ListEntry, check_path, source_from_lists
from coda_prompt.data.sources import FileSplit, Source, Split
from coda_prompt.errors import CorruptFile, MissingData

PLACES = ("imagenet-r",)
LISTS = ("imagenet-r_train.yaml", "imagenet-r_test.yaml")


def imagenet_r_source(place: Path, lists: Path | None = None) -> Source:
    """The source in `place`, split by the list pair in the folder `lists`.

    Without `lists` the pair is looked for beside the folder and in it; where there is none,
    `train/` and `test/` are taken as they are, or a fifth of each class is set apart.
    """
    pair = _list_pair([lists] if lists else [place.parent, place])
    if pair is not None:
        train, test = (_listed(path) for path in pair)
        return source_from_lists("imagenet-r", place, train, test, image_type)
    if lists is not None:
        raise MissingData(lists, f"there is no {LISTS[0]} and {LISTS[1]} in it", "Get both lists.")
    what = "class order is not" if (place / "train").is_dir() else "split and class order are not"
    note = f"{what} the paper's, as its lists {' and '.join(LISTS)} are not there"
    return _with_types(folder_source(place), note)


def image_type(path: str) -> str:
    """The domain of an image: art of .../art_12.jpg."""
    name, underscore, _ = os.path.basename(path).rpartition("_")
    if not (name and underscore):
        raise MissingData(
            path,
            "its name does not say which type of image it is",
            "Images of ImageNet-R are called like art_12.jpg; remove or rename this one.",
        )
    return name


def _list_pair(folders: list[Path]) -> tuple[Path, Path] | None:
    for folder in folders:
        train, test = (folder / name for name in LISTS)
        if train.is_file() and test.is_file():
            return train, test
        if train.is_file() or test.is_file():
            there, lacking = (train, test) if train.is_file() else (test, train)
            raise MissingData(lacking, f"it is not there, but {there.name} is", "Get both lists.")
    return None


def _listed(path: Path) -> list[ListEntry]:
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the lists have 30,000 lines
    try:
        fields = yaml.load(path.read_text("utf-8"), loader)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise CorruptFile(path, f"it is not YAML ({problem})") from problem
    files, labels = (
        fields.get(key) if isinstance(fields, dict) else None for key in ("data", "targets")
    )
    if not (isinstance(files, list) and isinstance(labels, list) and len(files) == len(labels)):
        raise CorruptFile(path, "it has no lists 'data' and 'targets' of the same length")
    listed = []
    for file, label in zip(files, labels, strict=True):
        if not isinstance(file, str) or type(label) is not int:
            raise CorruptFile(path, f"{file!r} with label {label!r} is not a path and a number")
        below = "/".join(file.split("/")[-2:])  # data/imagenet-r/<class>/<file>
        listed.append(ListEntry(check_path(below, path, depth=1), label, path))
    return listed


def _with_types(source: Source, note: str) -> Source:
    """The same images with their types as domains."""
    parts = [_files(source.train), _files(source.test)]
    names = tuple(sorted({image_type(path) for part in parts for path in part.paths}))
    number = {name: index for index, name in enumerate(names)}
    train, test = (
        FileSplit(
            part.paths,
            part.labels,
            np.array([number[image_type(path)] for path in part.paths], int),
        )
        for part in parts
    )
    return Source("imagenet-r", source.class_names, train, test, names, (*source.notes, note))


def _files(split: Split) -> FileSplit:
    assert isinstance(split, FileSplit)
    return split

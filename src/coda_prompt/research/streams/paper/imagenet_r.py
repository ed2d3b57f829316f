"""ImageNet-R: 200 classes of renditions, split by the lists of the released code if present.

The class ids of the lists are not the order of the folder names, so the class order of every seed
depends on the lists.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from coda_prompt.errors import CorruptFile, MissingData
from coda_prompt.images.folders import folder_source
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.paper.lists import (
    ListEntry,
    check_path,
    source_from_lists,
    with_domains,
)

LOCATIONS = ("imagenet-r",)
LISTS = ("imagenet-r_train.yaml", "imagenet-r_test.yaml")


def imagenet_r_source(path: Path, lists: Path | None = None) -> Source:
    """Open ImageNet-R.

    Args:
        path: folder of class folders, or of `train/` and `test/`.
        lists: folder of the pair of lists; by default they are searched for next to `path` and in
            it. Without them, `train/` and `test/` are used, or a random 80/20 split.
    """
    pair = _find_lists([lists] if lists else [path.parent, path])
    if pair is not None:
        train, test = (_read_list(file) for file in pair)
        return source_from_lists("imagenet-r", path, train, test, image_type)
    if lists is not None:
        problem = f"there is no {LISTS[0]} and {LISTS[1]} in it"
        raise MissingData(lists, problem, "Download both lists.")
    what = "class order is not" if (path / "train").is_dir() else "split and class order are not"
    note = f"{what} the paper's: its lists {' and '.join(LISTS)} are missing"
    source = folder_source(path)
    source = replace(source, name="imagenet-r", notes=(*source.notes, note))
    return with_domains(source, image_type)


def image_type(path: str) -> str:
    """Return the domain of an image: art for .../art_12.jpg."""
    name, underscore, _ = os.path.basename(path).rpartition("_")
    if not (name and underscore):
        problem = "its name does not start with a type of image"
        remedy = "Images of ImageNet-R have names like art_12.jpg; remove or rename this one."
        raise MissingData(path, problem, remedy)
    return name


def _find_lists(folders: list[Path]) -> list[Path] | None:
    for folder in folders:
        present = [folder / name for name in LISTS if (folder / name).is_file()]
        missing = [folder / name for name in LISTS if folder / name not in present]
        if present and missing:
            problem = f"there is no such file, but there is {present[0].name}"
            raise MissingData(missing[0], problem, "Download both lists.")
        if present:
            return present
    return None


def _read_list(path: Path) -> list[ListEntry]:
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the lists have 30,000 lines
    try:
        fields = yaml.load(path.read_text("utf-8"), loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptFile(path, f"it is not YAML ({error})") from error
    files, labels = (
        fields.get(key) if isinstance(fields, dict) else None for key in ("data", "targets")
    )
    if not (isinstance(files, list) and isinstance(labels, list) and len(files) == len(labels)):
        raise CorruptFile(path, "it has no lists 'data' and 'targets' of the same length")
    entries = []
    for file, label in zip(files, labels, strict=True):
        if not isinstance(file, str) or type(label) is not int:
            raise CorruptFile(path, f"{file!r} with label {label!r} is not a path and a number")
        below = "/".join(file.split("/")[-2:])  # data/imagenet-r/<class>/<file>
        entries.append(ListEntry(check_path(below, path, depth=1), label, path))
    return entries

"""The datasets of the paper by name: where in a data folder they lie, and where to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from coda_prompt.data.paper import cifar, domainnet, imagenet_r
from coda_prompt.data.sources import Source
from coda_prompt.errors import BadOption, MissingData


@dataclass(frozen=True)
class PaperDataset:
    """A dataset that the user has to get."""

    places: tuple[str, ...]
    """Its file or folder in the data folder; the first that is there is read."""
    remedy: str
    """What to get, from where, how large it is, and where to put it."""
    read: Callable[[Path, Path | None], Source]


def _cifar(place: Path, lists: Path | None) -> Source:
    if lists is not None:
        raise BadOption("cifar-100", "lists", "its split is part of the data; leave lists out")
    return cifar.cifar_source(place)


PAPER_DATASETS: Mapping[str, PaperDataset] = MappingProxyType(
    {
        "cifar-100": PaperDataset(
            cifar.PLACES,
            "Get the python version of CIFAR-100 (cifar-100-python.tar.gz, 161 MB) from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and put it, packed or extracted, in a "
            "folder",
            _cifar,
        ),
        "imagenet-r": PaperDataset(
            imagenet_r.PLACES,
            "Get imagenet-r.tar (about 2 GB) from https://github.com/hendrycks/imagenet-r, "
            "extract it to imagenet-r/ in a folder, and put beside it the lists "
            f"{' and '.join(imagenet_r.LISTS)} of the released code "
            "(https://github.com/GT-RIPL/CODA-Prompt), which make the paper's split",
            imagenet_r.imagenet_r_source,
        ),
        "domainnet": PaperDataset(
            domainnet.PLACES,
            "Get the cleaned version of DomainNet (six archives of 17.5 GB in all, and twelve "
            "lists) from the page of 'Moment Matching for Multi-Source Domain Adaptation' "
            "(https://ai.bu.edu/M3SDA) and extract it to domainnet/ in a folder",
            domainnet.domainnet_source,
        ),
    }
)


def paper_source(name: str, root: Path | None, lists: Path | None = None) -> Source:
    """A dataset of the paper from the data folder `root`, or from its own folder."""
    published = PAPER_DATASETS[name]
    remedy = f"{published.remedy}, and point --data (or CODA_DATA) at that folder."
    if root is None:
        raise MissingData(name, "no data folder is given", remedy)
    root = Path(os.path.expanduser(root))
    if not root.is_dir():
        raise MissingData(root, "there is no such folder", remedy)
    if lists is not None and not lists.is_dir():
        raise MissingData(lists, "there is no such folder", f"Point at the lists of {name}.")
    for place in (root / below for below in published.places):
        if place.exists():
            return published.read(place, lists)
    if root.resolve().name in published.places:
        return published.read(root.resolve(), lists)
    looked_for = " or ".join(published.places)
    raise MissingData(root, f"{name} is not in it (no {looked_for})", remedy)

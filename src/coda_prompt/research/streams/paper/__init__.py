"""Datasets of papers by name: where to get them and where they are in the data folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coda_prompt.errors import MissingData
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.paper import aper, cifar, domainnet, imagenet_r


@dataclass(frozen=True)
class PaperDataset:
    """A dataset that the user has to download."""

    locations: tuple[str, ...]
    """Its file or folder below the data folder; the first that exists is read."""
    instructions: str
    """What to download, from where, its size, and where to put it."""
    read: Callable[[Path, Path | None], Source]


PAPER_DATASETS = {
    "cifar-100": PaperDataset(
        cifar.LOCATIONS,
        "Download the python version of CIFAR-100 (cifar-100-python.tar.gz, 161 MB) from "
        "https://www.cs.toronto.edu/~kriz/cifar.html and put it, as it is or extracted, in a "
        "folder",
        cifar.cifar_source,
    ),
    "imagenet-r": PaperDataset(
        imagenet_r.LOCATIONS,
        "Download imagenet-r.tar (about 2 GB) from https://github.com/hendrycks/imagenet-r, "
        "extract it to imagenet-r/ in a folder, and add to that folder the lists "
        f"{' and '.join(imagenet_r.LISTS)} of the released code "
        "(https://github.com/GT-RIPL/CODA-Prompt), which define the paper's split",
        imagenet_r.imagenet_r_source,
    ),
    "domainnet": PaperDataset(
        domainnet.LOCATIONS,
        "Download the cleaned version of DomainNet (six archives, 17.5 GB in total, and twelve "
        "lists) from the page of 'Moment Matching for Multi-Source Domain Adaptation' "
        "(https://ai.bu.edu/M3SDA) and extract it to domainnet/ in a folder",
        domainnet.domainnet_source,
    ),
    "cub-200": PaperDataset(
        aper.CUB_LOCATIONS,
        "Download CUB_200_2011.tgz (1.1 GB) from https://www.vision.caltech.edu/datasets/"
        f"cub_200_2011 and extract it in a folder, or download {aper.SUBSET.format('cub')}",
        aper.cub_source,
    ),
    **{
        name: PaperDataset(
            (name,), f"Download {aper.SUBSET.format(name)}", partial(aper.subset_source, name)
        )
        for name in aper.SUBSETS
    },
}


def paper_source(name: str, root: Path | None, lists: Path | None = None) -> Source:
    """Open a dataset of the paper.

    Args:
        name: a key of `PAPER_DATASETS`.
        root: the data folder, or the dataset's own folder in it.
        lists: folder of the lists that define the split, if they are not with the data.

    Raises:
        MissingData: the dataset is not there; the message says how to get it.
    """
    dataset = PAPER_DATASETS[name]
    remedy = f"{dataset.instructions}, and set --data (or CODA_DATA) to that folder."
    if root is None:
        raise MissingData(name, "no data folder is given", remedy)
    root = Path(os.path.expanduser(root))
    if not root.is_dir():
        raise MissingData(root, "there is no such folder", remedy)
    if lists is not None and not lists.is_dir():
        raise MissingData(lists, "there is no such folder", f"Point at the lists of {name}.")
    for path in (root / location for location in dataset.locations):
        if path.exists():
            return dataset.read(path, lists)
    if root.resolve().name in dataset.locations or all(
        (root / part).is_dir() for part in ("train", "test")
    ):
        return dataset.read(root.resolve(), lists)
    expected = " or ".join([*dataset.locations, "class folders in train and test"])
    raise MissingData(root, f"{name} is not in it (no {expected})", remedy)

"""Train and test images by name: pocket, the datasets of the paper, `hub:`, `domains:`, folders."""

from __future__ import annotations

from pathlib import Path

from coda_prompt.errors import UnknownName
from coda_prompt.images import folders, hf_datasets
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.paper import PAPER_DATASETS, paper_source
from coda_prompt.research.streams.pocket import STRENGTH, pocket_source


def open_source(
    name: str, *, data: Path | None = None, lists: Path | None = None, strength: float | None = None
) -> Source:
    """Open the train and test images that a name stands for.

    Args:
        name: `pocket`, a dataset of the paper, `hub:` and a dataset as `hub_source` opens it,
            `domains:` and a folder of domain folders, or a folder.
        data: The folder with the datasets of the paper.
        lists: The folder with the lists of a dataset of the paper, if they are not beside it.
        strength: How much the renditions of `pocket` differ. Default: as in the benchmark.

    Raises:
        MissingData: The data are not there or incomplete.
        UnknownName: There is neither a dataset nor a folder of this name.
    """
    if name == "pocket":
        return pocket_source(STRENGTH if strength is None else strength)
    if name in PAPER_DATASETS:
        return paper_source(name, data, lists)
    if name.startswith(hf_datasets.PREFIX):
        return hf_datasets.hub_source(name.removeprefix(hf_datasets.PREFIX))
    if name.startswith(folders.DOMAIN_PREFIX):
        return folders.domain_source(name.removeprefix(folders.DOMAIN_PREFIX))
    if Path(name).name == name and not Path(name).exists():
        raise UnknownName("source or folder", name, ("pocket", *PAPER_DATASETS))
    return folders.folder_source(name)

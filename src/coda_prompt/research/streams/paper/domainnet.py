"""DomainNet: six domains of 345 classes, split by the published lists of each domain."""

from __future__ import annotations

import re
from pathlib import Path

from coda_prompt.errors import CorruptFile, MissingData
from coda_prompt.images.sources import Source
from coda_prompt.research.streams.paper.lists import ListEntry, check_path, source_from_lists

LOCATIONS = ("domainnet",)
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_NUMBER = re.compile("-?[0-9]{1,9}")


def domainnet_source(path: Path, lists: Path | None = None) -> Source:
    """Open DomainNet; class ids are the published ones.

    Args:
        path: folder of the six domain folders.
        lists: folder of `<domain>_train.txt` and `<domain>_test.txt`; by default `path`.
    """
    missing = [domain for domain in DOMAINS if not (path / domain).is_dir()]
    if missing:
        problem = f"the folders of these domains are missing: {', '.join(missing)}"
        raise MissingData(path, problem, "Extract all six archives in it.")
    train, test = (
        [entry for domain in DOMAINS for entry in _read_list(domain, split, lists or path)]
        for split in ("train", "test")
    )
    return source_from_lists("domainnet", path, train, test, lambda path: Path(path).parts[-3])


def _read_list(domain: str, split: str, folder: Path) -> list[ListEntry]:
    path = folder / f"{domain}_{split}.txt"
    if not path.is_file():
        remedy = "Download the twelve lists, a train and a test list for each domain, from the "
        remedy += "dataset's page and put them next to the six folders."
        raise MissingData(path, "there is no such list", remedy)
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CorruptFile(path, "it is not a text file") from error
    entries = []
    for line in filter(str.strip, lines):
        file, _, label = line.strip().rpartition(" ")
        if not (file.startswith(f"{domain}/") and _NUMBER.fullmatch(label)):
            raise CorruptFile(path, f"'{line[:200]}' is not a line like {domain}/class/file.jpg 0")
        entries.append(ListEntry(check_path(file, path, depth=2), int(label), path))
    return entries

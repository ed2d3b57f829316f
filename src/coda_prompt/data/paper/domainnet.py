"""DomainNet: six domains of the same 345 classes, with the published lists of each."""

from __future__ import annotations

import re
from pathlib import Path

from coda_prompt.data.paper.lists import ListEntry, check_path, source_from_lists
from coda_prompt.data.sources import Source
from coda_prompt.errors import CorruptFile, MissingData

PLACES = ("domainnet",)
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_NUMBER = re.compile("-?[0-9]{1,9}")


def domainnet_source(place: Path, lists: Path | None = None) -> Source:
    """The source in `place`; `<domain>_train.txt` and `<domain>_test.txt` are there or in `lists`.

    Class ids are the published ones.
    """
    absent = [domain for domain in DOMAINS if not (place / domain).is_dir()]
    if absent:
        raise MissingData(
            place,
            f"of the six domains it has no folder {', '.join(absent)}",
            "Extract all six archives in it.",
        )
    train, test = (
        [image for domain in DOMAINS for image in _listed(domain, part, lists or place)]
        for part in ("train", "test")
    )
    return source_from_lists("domainnet", place, train, test, lambda path: path.split("/")[0])


def _listed(domain: str, part: str, folder: Path) -> list[ListEntry]:
    path = folder / f"{domain}_{part}.txt"
    if not path.is_file():
        raise MissingData(
            path,
            "the list is not there",
            "Get the twelve lists, a train and a test list for each domain, from the dataset's "
            "page, and put them beside the six folders.",
        )
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as problem:
        raise CorruptFile(path, "it is not text") from problem
    listed = []
    for line in filter(str.strip, lines):
        file, _, label = line.strip().rpartition(" ")
        if not (file.startswith(f"{domain}/") and _NUMBER.fullmatch(label)):
            raise CorruptFile(path, f"'{line[:200]}' is not a line like {domain}/class/file.jpg 0")
        listed.append(ListEntry(check_path(file, path, depth=2), int(label), path))
    return listed

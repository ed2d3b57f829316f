"""What a person should hear before their images are learned."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from coda_prompt.data.images import convert_channels
from coda_prompt.data.resolve import Labelled
from coda_prompt.errors import join_names
from coda_prompt.preprocessing import Preprocessing

UNKNOWN = "unknown"
"""What a prediction says where no class is likely enough."""
FEW = 5
IMBALANCE = 10
MOST_COMPARED = 300
LOOKED_AT = 32
"""Images whose size and colours are looked at."""


def warnings(
    images: Labelled, known: Sequence[str], backbone: str, pixels: Preprocessing
) -> list[str]:
    """In the order of how much they matter."""
    counts = images.counts()
    found = []
    few = [name for name, count in counts.items() if count < FEW]
    if few:
        found.append(
            f"{len(few)} of {len(counts)} classes have fewer than {FEW} images "
            f"({_quoted(few)}): expect mistakes on them, and none is held out to measure it"
        )
    single = [name for name, count in counts.items() if count == 1]
    if alone := [name for name in single if name not in known]:
        found.append(
            f"{_quoted(alone)}: learned from one image, so that what the model keeps of the class "
            "is that image's feature"
        )
    if more := [name for name in single if name in known]:
        found.append(
            f"{_quoted(more)}: one more image, whose feature is the difference of the model and "
            "the version before it"
        )
    if len(counts) > 1 and max(counts.values()) > IMBALANCE * min(counts.values()):
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        found.append(
            f"'{most}' has {counts[most]} images and '{least}' {counts[least]}: the model will "
            f"lean towards '{most}'"
        )
    found += [
        f"class names '{first}' and '{second}' look like one class written in two ways"
        for first, second in near_duplicates(list(counts), known)
    ]
    if len({*known, *counts}) == 1:
        found.append("it is the only class yet: every image will be taken for it")
    if UNKNOWN in counts:
        found.append(f"class '{UNKNOWN}' has the name that 'coda predict --unknown-below' answers")
    found += _about_pixels(images, backbone, pixels)
    return [*images.remarks, *found]


def summary(images: Labelled) -> str:
    """How many images of which classes and which size."""
    counts = images.counts()
    some = _some(images)
    sides = sorted(image.size for image in some)
    smallest, largest = sides[0], sides[-1]
    size = f"{smallest[0]} x {smallest[1]}"
    if largest != smallest:
        size += f" to {largest[0]} x {largest[1]}"
    each = join_names([f"{name} {count}" for name, count in counts.items()], 12)
    return f"{len(counts)} classes, {sum(counts.values())} images of {size} px: {each}"


def near_duplicates(new: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Names that differ in case, spaces, accents, plural or one letter."""
    pairs = []
    names = [*known, *(name for name in new if name not in known)]
    similar = len(names) <= MOST_COMPARED  # each with each takes its time
    plain = [_plain(name) for name in names]
    for place, name in enumerate(names):
        if name not in new:
            continue
        for other in range(place):
            first, second = plain[other], plain[place]
            near = (
                similar
                and len(min(first, second, key=len)) > 4
                and (difflib.SequenceMatcher(None, first, second).ratio() > 0.92)
            )
            if not first.isdecimal() and (
                first == second or (near and not _numbered(first, second))
            ):
                pairs.append((names[other], name))
    return pairs


def _plain(name: str) -> str:
    folded = unicodedata.normalize("NFKD", name).casefold()
    letters = "".join(letter for letter in folded if letter.isalnum())
    return letters.removesuffix("s") or folded


def _numbered(first: str, second: str) -> bool:
    """`type 1` and `type 2` are two classes."""
    return [c for c in first if not c.isdecimal()] == [c for c in second if not c.isdecimal()]


def _about_pixels(images: Labelled, backbone: str, pixels: Preprocessing) -> list[str]:
    looked, found = _some(images), []
    side = float(np.median([min(image.size) for image in looked]))
    if side < pixels.size / 2:
        found.append(
            f"images are about {side:.0f} px small, the backbone expects {pixels.size} px: they "
            "are enlarged and carry little detail"
        )
    if backbone == "pocket" and _photographs(looked):
        found.append(
            "these look like photographs, and 'pocket' was trained on small sketches: take "
            "--backbone vit-b16-in21k, or deit-tiny on a slow machine"
        )
    return found


def _some(images: Labelled) -> list[Any]:
    """Images from first to last."""
    count = len(images.split)
    places = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(int))
    return [images.split.image(int(place)) for place in places]


def _photographs(images: Sequence[Any]) -> bool:
    """Large, and coloured or with many shades; sketches have mostly ground and ink."""
    large = [image for image in images if min(image.size) >= 64]
    if len(large) <= len(images) / 2:
        return False
    shades = []
    for image in large:
        grey = np.asarray(convert_channels(image, 1).resize((64, 64)))
        shades.append(np.mean((grey > 40) & (grey < 215)))
    return float(np.median(shades)) > 0.3


def _quoted(names: Sequence[str]) -> str:
    return join_names([f"'{name}'" for name in names])

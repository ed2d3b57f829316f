"""Which backbone suits images, warnings before they are learned, and a summary of them."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence

import numpy as np

from coda_prompt.errors import counted, join_names
from coda_prompt.images.labelled import Labelled, Sample
from coda_prompt.images.sources import FileSplit
from coda_prompt.learner.network import Network
from coda_prompt.learner.resemblance import kind_finding

FEW_IMAGES = 5
IMBALANCE = 10
MAX_COMPARED_NAMES = 300
"""With more class names, only equal ones are reported: comparing all pairs would take too long."""
MIXED = 0.2
"""Minimum share of sampled images of the other kind in a mixed lesson."""
OTHER_KIND = {
    "pocket": ("photographs", "small sketches", "photo, or vit-b16-in21k"),
    "photo": ("drawings", "photographs", "pocket"),
}
"""Embedded backbone -> images that it is not for, what it was trained on, what is for them."""


def warnings(network: Network, images: Labelled, checked: Labelled | None = None) -> list[str]:
    """Return what to check before learning these images, most important first.

    Args:
        network: What will learn them.
        images: The images of the lesson.
        checked: Images of known classes that are evaluated before and after.
    """
    known, size = network.classes, network.views.preprocessing.size
    balanced = getattr(network.method.config, "balance", False)
    counts = images.counts()
    messages = list(images.remarks)
    earlier = {task.files: number for number, task in enumerate(network.tasks, 1) if task.files}
    if earlier and isinstance(images.split, FileSplit):
        number = earlier.get(images.fingerprint)
        if number is not None:
            messages.append(
                f"these files were learned before, in lesson {number}: they count twice"
            )
    few = [f"'{name}'" for name, count in counts.items() if count < FEW_IMAGES]
    if few:
        messages.append(
            f"{len(few)} of {len(counts)} classes have fewer than {FEW_IMAGES} images "
            f"({join_names(few)}): expect mistakes on them, and none is held out to measure it"
        )
    single = [name for name, count in counts.items() if count == 1]
    if new := [f"'{name}'" for name in single if name not in known]:
        messages.append(
            f"{join_names(new)}: learned from one image, so the model stores the feature of that "
            "image as the class"
        )
    if continued := [f"'{name}'" for name in single if name in known]:
        messages.append(
            f"{join_names(continued)}: one more image, whose feature can be computed from the "
            "model and its previous version"
        )
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] > IMBALANCE * counts[least] and not balanced:
        messages.append(
            f"'{most}' has {counts[most]} images and '{least}' {counts[least]}: the model will "
            f"be biased towards '{most}'"
        )
    messages += [
        f"class names '{first}' and '{second}' may be two spellings of one class"
        for first, second in _similar_names(list(counts), known)
    ]
    if len({*known, *counts}) == 1:
        messages.append("this is the only class so far: every image will be assigned to it")
    side = float(np.median([min(sample.size) for sample in images.samples]))
    if side < size / 2:
        messages.append(
            f"images are about {side:.0f} px, but the backbone expects {size} px: "
            "they are enlarged and have little detail"
        )
    if others := images_of_other_kind(network, images):
        backbone = network.backbone_name.partition("@")[0]
        kind, trained_on, suited = OTHER_KIND[backbone]
        messages.append(
            f"{others} of {len(images.samples)} sampled images look like {kind}, but '{backbone}' "
            f"was trained on {trained_on}: for {kind} make a model with --backbone {suited}"
        )
    else:
        messages += kind_finding(network.tasks, (sample.drawing for sample in images.samples))
    if checked is not None and not set(checked.names) & set(known):
        messages.append("none of the classes to check is known yet: nothing to forget")
    return messages


def images_of_other_kind(network: Network, images: Labelled) -> int:
    """Return how many sampled images the backbone is not for; 0 if they are few."""
    sampled, drawings = len(images.samples), sum(sample.drawing for sample in images.samples)
    backbone = network.backbone_name.partition("@")[0]
    others = {"pocket": sampled - drawings, "photo": drawings}.get(backbone, 0)
    return others if others > MIXED * sampled else 0


def choose_backbone(samples: Sequence[Sample]) -> tuple[str, str]:
    """Return the embedded backbone for the majority of the images, and why."""
    count, drawings = len(samples), sum(sample.drawing for sample in samples)
    if drawings > count - drawings:
        return "pocket", f"pocket: {drawings} of {count} sampled images are drawings"
    return "photo", f"photo: {count - drawings} of {count} sampled images are photographs"


def summary(images: Labelled) -> str:
    """Return the number of images of each class and the range of their sizes in one line."""
    counts = images.counts()
    sizes = sorted(sample.size for sample in images.samples)
    smallest, largest = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    size = smallest if largest == smallest else f"{smallest} to {largest}"
    each = join_names([f"{name} {count}" for name, count in counts.items()], 12)
    classes, total = counted(len(counts), "class"), counted(sum(counts.values()), "image")
    return f"{classes}, {total} of {size} px: {each}"


def _similar_names(new: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of names that differ in case, spaces, accents, plural or one letter."""
    names = [*known, *(name for name in new if name not in known)]
    folded = [unicodedata.normalize("NFKD", name).casefold() for name in names]
    letters = ["".join(filter(str.isalnum, name)) for name in folded]
    plain = [short.removesuffix("s") or name for short, name in zip(letters, folded, strict=True)]
    pairs = []
    for later, name in enumerate(names):
        for earlier in range(later) if name in new else ():
            first, second = plain[earlier], plain[later]
            similar = (
                len(names) <= MAX_COMPARED_NAMES
                and len(min(first, second, key=len)) > 4
                and difflib.SequenceMatcher(None, first, second).ratio() > 0.92
                and not _differ_in_number(first, second)
            )
            if not first.isdecimal() and (first == second or similar):
                pairs.append((names[earlier], name))
    return pairs


def _differ_in_number(first: str, second: str) -> bool:
    """Return whether only digits differ: `type 1` and `type 2` are two classes."""
    return [c for c in first if not c.isdecimal()] == [c for c in second if not c.isdecimal()]

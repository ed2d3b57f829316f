"""What is worth telling about images: before they are learned, afterwards, and when evaluated."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import counted, join_names
from coda_prompt.images.labelled import Labelled, Sample
from coda_prompt.learner.hashes import MAX_DIFFERENT_BITS, Hashes, LearnedHashes
from coda_prompt.learner.model import LearnedModel
from coda_prompt.learner.records import TaskRecord
from coda_prompt.statistics.moments import Moments, shrink_covariance
from coda_prompt.statistics.unknown import DEFAULT_RATE

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

FEW_IMAGES = 5
IMBALANCE = 10
MAX_COMPARED_NAMES = 300
"""With more class names, only equal ones are reported: comparing all pairs would take too long."""
MIXED = 0.2
"""Minimum share of sampled images of the other kind in a mixed lesson."""
ADVICE = {"drawing": "photo", "photograph": "pocket"}
"""Kind of images that an encoder is for -> the encoder for the others."""
KIND_DIFFERENCE = 0.5
"""Difference of the shares of drawings from which images are of another kind."""
MOST_ATYPICAL, MIN_ATYPICAL = 0.3, 5
"""More atypical images than this share, and at least so many, are of another kind. Of new
photographs of learned classes 4 to 7 % are, of their cartoons and sketches 59 to 100 %."""
MIN_IMAGES = 12
"""Smaller lessons say too little about how the images of a class vary."""
MAX_COMPARED = 4000
"""Larger lessons are not searched for duplicates: that takes images x images products."""
DUPLICATE = 0.998
"""Cosine of features; the closest of 1280 different drawings of the pocket dataset have 0.993."""
MIN_VARIANCE = 1e-6
"""Of the mean square of features. A smaller variance is rounding: the images are all the same."""
SIMILAR = 6.0
"""Squared Mahalanobis distance of class means, less what sampling adds. Halves of one class have 0
to 6, the closest classes of the pocket dataset 8 or more; 6 is an error of 11 % between the two."""
MISLABELLED = 20.0
"""Log-likelihood ratio of another class against its own class from which an image is suspicious."""
SMALL_LESSON, MISLABELLED_SMALL, MIN_SUSPICIOUS = 300, 10.0, 3
"""In lessons of fewer images the covariance is shrunk more, and ratios are smaller: this ratio is
enough if so many images have it."""
MIN_SHARE = 0.0075
"""Lessons without wrong labels have fewer suspicious images (docs/lab/unknown.md)."""
MAX_SHOWN, MAX_OF_A_GROUP = 5, 3


# -- the images themselves


def image_findings(
    model: LearnedModel, images: Labelled, samples: Sequence[Sample], checked: Labelled | None
) -> list[str]:
    """Return what to check about the images of a lesson, most important first.

    Args:
        model: What will learn them.
        images: The images of the lesson.
        samples: Size and kind of some of them.
        checked: Images of known classes that are evaluated before and after.
    """
    known, counts = model.classes, images.counts()
    messages = [*images.remarks]
    earlier = {task.files: number for number, task in enumerate(model.tasks, 1) if task.files}
    if earlier and (number := earlier.get(images.files_fingerprint or "")) is not None:
        messages.append(f"these files were learned before, in lesson {number}: they count twice")
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
    if counts[most] > IMBALANCE * counts[least] and not model.additive:
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
    messages += _size_and_kind(model, samples)
    if checked is not None and not set(checked.names) & set(known):
        messages.append("none of the classes to check is known yet: nothing to forget")
    return messages


def _size_and_kind(model: LearnedModel, samples: Sequence[Sample]) -> list[str]:
    """Return whether images are too small for the encoder, or of another kind."""
    if not samples:
        return []
    messages, size = [], max(pixels.size for pixels in model.encoder.pixels)
    side = float(np.median([min(sample.size) for sample in samples]))
    if side < size / 2:
        messages.append(
            f"images are about {side:.0f} px, but the backbone expects {size} px: "
            "they are enlarged and have little detail"
        )
    if others := images_of_other_kind(model, samples):
        taught = model.backbone.kind
        kind = "photograph" if taught == "drawing" else "drawing"
        suited = ADVICE[taught]
        messages.append(
            f"{others} of {len(samples)} sampled images look like {kind}s, but "
            f"'{model.backbone.name}' was trained on {taught}s: for {kind}s make a model with "
            f"--backbone {suited}"
        )
        return messages
    return [*messages, *kind_finding(model.tasks, (sample.drawing for sample in samples))]


def images_of_other_kind(model: LearnedModel, samples: Sequence[Sample]) -> int:
    """Return how many sampled images the encoder is not for; 0 if they are few."""
    sampled, drawings = len(samples), sum(sample.drawing for sample in samples)
    others = sampled - drawings if model.backbone.kind == "drawing" else drawings
    return others if others > MIXED * sampled else 0


def choose_backbone(samples: Sequence[Sample]) -> tuple[str, str]:
    """Return the embedded encoder for the majority of the images, and why."""
    count, drawings = len(samples), sum(sample.drawing for sample in samples)
    if drawings > count - drawings:
        return "pocket", f"pocket: {drawings} of {count} sampled images are drawings"
    return "photo", f"photo: {count - drawings} of {count} sampled images are photographs"


def summary(images: Labelled) -> str:
    """Return the number of images of each class in one line."""
    counts = images.counts()
    each = join_names([f"{name} {count}" for name, count in counts.items()], 12)
    return f"{counted(len(counts), 'class')}, {counted(sum(counts.values()), 'image')}: {each}"


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


# -- images beside those that were taught


def kind_finding(tasks: Sequence[TaskRecord], drawings: Iterable[bool]) -> list[str]:
    """Say whether images are drawings and those taught were photographs, or the other way round.

    Args:
        tasks: The lessons of the model.
        drawings: Of each sampled image, whether it is a drawing.
    """
    sampled = list(drawings)
    taught = [(sum(task.images.values()), task.drawings) for task in tasks]
    known = [(images, share) for images, share in taught if images and share is not None]
    if not sampled or not known:
        return []
    share = sum(images * share for images, share in known) / sum(images for images, _ in known)
    count = sum(sampled)
    if abs(count / len(sampled) - share) <= KIND_DIFFERENCE:
        return []
    kinds = ["drawings", "photographs"]
    if count / len(sampled) < share:
        kinds, count = kinds[::-1], len(sampled) - count
    return [
        f"{count} of {len(sampled)} sampled images look like {kinds[0]}, and the images taught "
        f"before are mostly {kinds[1]}: expect mistakes, with probabilities that are too high"
    ]


def typicality_finding(typicality: Floats, what: str) -> list[str]:
    """Say whether many images of learned classes are not typical of what was taught.

    Args:
        typicality: Of each image.
        what: The images, in words.
    """
    total, atypical = len(typicality), int((typicality < DEFAULT_RATE).sum())
    if atypical < MIN_ATYPICAL or atypical <= MOST_ATYPICAL * total:
        return []
    return [
        f"{atypical} of {total} {what} are not typical of the images taught before (about "
        f"{round(DEFAULT_RATE * total)} would be expected): they look different, for example "
        "sketches instead of photographs, and probabilities are too high for them"
    ]


def repeated_finding(
    hashes: Hashes, before: LearnedHashes, classes: Sequence[str], name: Callable[[int], str]
) -> list[str]:
    """Name images that resemble one of an earlier lesson.

    Args:
        hashes: Of the images.
        before: Those of earlier lessons.
        classes: All class names by row.
        name: From the position of an image to its name.
    """
    nearest, differing = before.nearest(hashes)
    found = np.flatnonzero(differing <= MAX_DIFFERENT_BITS).tolist()
    if not found:
        return []
    shown = [
        f"{name(at)} (as '{classes[int(before.rows[nearest[at]])]}')" for at in found[:MAX_SHOWN]
    ]
    more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    return [f"near-duplicates of images learned before: {'; '.join(shown)}{more}"]


# -- the features of a lesson


def lesson_hints(
    features: NDArray[np.float32],
    rows: Rows,
    names: Sequence[str],
    before: Moments,
    image_name: Callable[[int], str],
    suited: bool = True,
) -> list[str]:
    """Return what looks wrong with the images of a lesson.

    Args:
        features: N x D.
        rows: The class of each image.
        names: Class names by row.
        before: Statistics of the same features before the lesson; they may have more columns.
        image_name: From the position of an image in the lesson to its name.
        suited: Whether the encoder is for such images; else their features say little, but still
            which of them are the same.
    """
    taught, hints = np.unique(rows), []
    same = [row for row in taught.tolist() if _are_the_same(features[rows == row])]
    if _are_the_same(features):
        classes = [f"'{names[row]}'" for row in taught.tolist()]
        apart = f": {join_names(classes)} cannot be told apart" if len(classes) > 1 else ""
        return [f"all images of this lesson are the same{apart}"]
    if same:
        classes = [f"'{names[row]}'" for row in same]
        hints.append(
            f"all images of {join_names(classes)} are the same: such a class learns no more from "
            "them than from one image"
        )
    if not suited:
        return hints
    groups = near_duplicates(features) if len(features) <= MAX_COMPARED else []
    # Classes whose images are all the same were named above.
    groups = [group for group in groups if {*rows[group].tolist()} not in [{row} for row in same]]
    if groups:
        groups.sort(key=lambda group: len(np.unique(rows[group])) == 1)
        shown = [
            " and ".join(map(image_name, group[:MAX_OF_A_GROUP]))
            + (f" and {len(group) - MAX_OF_A_GROUP} more" if len(group) > MAX_OF_A_GROUP else "")
            + (" (of different classes)" if len(np.unique(rows[group])) > 1 else "")
            for group in groups[:MAX_SHOWN]
        ]
        more = f"; and {len(groups) - MAX_SHOWN} more groups" if len(groups) > MAX_SHOWN else ""
        hints.append(f"near-duplicates: {'; '.join(shown)}{more}")
    if len(features) >= MIN_IMAGES:
        hints += _hints_of_distances(features.astype(np.float64), rows, names, before, image_name)
    return hints


def near_duplicates(features: NDArray[np.floating]) -> list[list[int]]:
    """Return the positions of images that are nearly the same, each group in ascending order.

    Images of a group are connected by pairs: the first and the last of a burst may differ more.
    """
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(lengths, 1e-12)
    pairs = np.argwhere(np.triu(directions @ directions.T, k=1) > DUPLICATE).tolist()
    groups: dict[int, list[int]] = {}
    for first, second in pairs:
        mine, other = groups.get(first, [first]), groups.get(second, [second])
        if mine is not other:
            joined = sorted({*mine, *other})
            groups |= dict.fromkeys(joined, joined)
    return [group for first, group in sorted(groups.items()) if first == group[0]]


def _are_the_same(features: NDArray[np.floating]) -> bool:
    """Return whether several images differ in nothing but rounding."""
    variance, squares = features.var(axis=0).sum(), np.square(features).sum(axis=1).mean()
    return len(features) > 1 and bool(variance <= MIN_VARIANCE * squares)


def _hints_of_distances(
    features: Floats,
    rows: Rows,
    names: Sequence[str],
    before: Moments,
    image_name: Callable[[int], str],
) -> list[str]:
    """Compare images and means with class Gaussians that share one covariance."""
    hints, width = [], features.shape[1]
    taught, own = np.unique(rows, return_inverse=True)
    lesson = Moments.empty(width).added(features, own)
    covariance, freedom = lesson.covariance()
    scatter, means, counts = covariance * freedom, lesson.means(), lesson.counts.astype(float)
    all_rows, all_means, all_counts = taught.tolist(), means, counts
    if len(before.counts):
        old, old_freedom = before.covariance()
        scatter, freedom = scatter + old[:width, :width] * old_freedom, freedom + old_freedom
        others = [row for row in range(len(before.counts)) if row not in all_rows]
        all_rows = all_rows + others
        all_means = np.concatenate([means, before.means()[others, :width]])
        all_counts = np.concatenate([counts, before.counts[others]])
    if freedom < 1:
        return []
    covariance = scatter / freedom
    precision = np.linalg.inv(shrink_covariance(covariance, freedom))
    # The mean of a class without an image is farther from it by the factor n / (n - 1).
    distances = _squared_distances(features, all_means, precision)
    factor = np.square(counts / np.maximum(counts - 1, 1))[own]
    positions = np.arange(len(features))
    distance = distances[positions, own] * factor
    distances[positions, own] = np.inf
    ratios = (distance - distances.min(axis=1)) / 2
    ratios[counts[own] < 3] = -np.inf
    for index in _suspicious(ratios):
        other = names[all_rows[int(distances[index].argmin())]]
        hints.append(
            f"{image_name(index)} looks like '{other}' and was taught as "
            f"'{names[int(rows[index])]}'"
        )
    noise = float((precision * covariance).sum())
    sampled = noise * (1 / counts[:, None] + 1 / np.maximum(all_counts, 1))
    apart = _squared_distances(means, all_means, precision) - sampled
    for first, second in np.argwhere(apart < SIMILAR).tolist():
        if second > first and all_counts[second] > 1 and counts[first] > 1:
            hints.append(
                f"'{names[all_rows[first]]}' looks like '{names[all_rows[second]]}': if they are "
                "one class, merge them with merge-classes"
            )
    return hints


def _suspicious(ratios: Floats) -> list[int]:
    """Return the positions of images that look mislabelled, the most suspicious first."""
    suspicious = int((ratios > MISLABELLED).sum())
    if len(ratios) < SMALL_LESSON:
        several = int((ratios > MISLABELLED_SMALL).sum())
        suspicious = several if several >= MIN_SUSPICIOUS else suspicious
    if suspicious < MIN_SHARE * len(ratios):
        suspicious = 0
    order: list[int] = np.argsort(-ratios, kind="stable").tolist()
    return order[: min(suspicious, MAX_SHOWN)]


def _squared_distances(rows: Floats, means: Floats, precision: Floats) -> Floats:
    """Return the squared Mahalanobis distance of each row from each mean, N x C."""
    scaled = means @ precision
    result: Floats = (
        ((rows @ precision) * rows).sum(axis=1, keepdims=True)
        - 2 * rows @ scaled.T
        + (scaled * means).sum(axis=1)
    )
    return result

"""Hints after a lesson: images that look mislabelled or duplicated, classes that look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import join_names
from coda_prompt.learner.unknown import UnknownDetector
from coda_prompt.research.methods.moments import MIN_VARIANCE, FeatureMoments
from coda_prompt.research.methods.shrinkage import shrink_covariance

MIN_IMAGES = 12
"""Smaller lessons say too little about how the images of a class vary."""
MAX_COMPARED = 4000
"""Larger lessons are not searched for duplicates: that takes images x images products."""
DUPLICATE = 0.998
"""Cosine of features; the closest of 1280 different drawings of the pocket dataset have 0.993."""
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


def lesson_hints(
    features: Tensor,
    labels: Tensor,
    names: Sequence[str],
    before: UnknownDetector | None,
    image_name: Callable[[int], str],
    suited: bool = True,
) -> tuple[str, ...]:
    """Return what looks wrong with the images of a lesson.

    Args:
        features: Class tokens before the final norm, N x D.
        labels: The row of the class of each image.
        names: Class names by row.
        before: Statistics of the classes before the lesson; None: there are none.
        image_name: From the position of an image in the lesson to its name.
        suited: Whether the backbone is for such images; else their features say little, but still
            which of them are the same.
    """
    features, labels, hints = features.detach().cpu().double(), labels.cpu(), list[str]()
    same = [row for row in labels.unique().tolist() if _are_the_same(features[labels == row])]
    if _are_the_same(features):
        classes = [f"'{names[row]}'" for row in labels.unique().tolist()]
        apart = f": {join_names(classes)} cannot be told apart" if len(classes) > 1 else ""
        return (f"all images of this lesson are the same{apart}",)
    if same:
        classes = [f"'{names[row]}'" for row in same]
        hints.append(
            f"all images of {join_names(classes)} are the same: such a class learns no more from "
            "them than from one image"
        )
    if not suited:
        return tuple(hints)
    groups = near_duplicates(features) if len(features) <= MAX_COMPARED else []
    # Classes whose images are all the same were named above.
    groups = [group for group in groups if {*labels[group].tolist()} not in [{row} for row in same]]
    if groups:
        groups.sort(key=lambda group: len(labels[group].unique()) == 1)
        shown = [
            " and ".join(map(image_name, group[:MAX_OF_A_GROUP]))
            + (f" and {len(group) - MAX_OF_A_GROUP} more" if len(group) > MAX_OF_A_GROUP else "")
            + (" (of different classes)" if len(labels[group].unique()) > 1 else "")
            for group in groups[:MAX_SHOWN]
        ]
        more = f"; and {len(groups) - MAX_SHOWN} more groups" if len(groups) > MAX_SHOWN else ""
        hints.append(f"near-duplicates: {'; '.join(shown)}{more}")
    if len(features) >= MIN_IMAGES:
        hints += _hints_of_distances(features, labels, names, before, image_name)
    return tuple(hints)


def near_duplicates(features: Tensor) -> list[list[int]]:
    """Return the positions of images that are nearly the same, each group in ascending order.

    Images of a group are connected by pairs: the first and the last of a burst may differ more.
    """
    directions = F.normalize(features)
    pairs = ((directions @ directions.T).triu(diagonal=1) > DUPLICATE).nonzero().tolist()
    groups: dict[int, list[int]] = {}
    for first, second in pairs:
        mine, other = groups.get(first, [first]), groups.get(second, [second])
        if mine is not other:
            joined = sorted({*mine, *other})
            groups |= dict.fromkeys(joined, joined)
    return [group for first, group in sorted(groups.items()) if first == group[0]]


def _are_the_same(features: Tensor) -> bool:
    """Return whether several images differ in nothing but rounding."""
    variance = features.var(dim=0, correction=0).sum()
    squares = features.square().sum(dim=1).mean()
    return len(features) > 1 and bool(variance <= MIN_VARIANCE * squares)


def _hints_of_distances(
    features: Tensor,
    labels: Tensor,
    names: Sequence[str],
    before: UnknownDetector | None,
    image_name: Callable[[int], str],
) -> list[str]:
    """Compare images and means with class Gaussians that share one covariance."""
    hints = []
    rows, own = labels.unique(return_inverse=True)
    lesson = FeatureMoments(features.shape[1])
    lesson.grow(len(rows))
    lesson.add(features, own)
    counts, means = lesson.counts.frozen.double(), lesson.means()
    covariance, freedom = lesson.covariance()
    scatter = covariance * freedom
    all_rows, all_means, all_counts = rows.tolist(), means, counts
    moments = None if before is None else before.class_moments()
    if moments is not None and len(moments.counts):
        width = features.shape[1]  # the statistics begin with those of the class tokens
        covariance, old_freedom = moments.covariance()
        covariance, old_means = covariance[:width, :width], moments.means()[:, :width]
        scatter, freedom = scatter + covariance * old_freedom, freedom + old_freedom
        others = [row for row in range(len(moments.counts)) if row not in all_rows]
        all_rows, all_means = all_rows + others, torch.cat([means, old_means[others]])
        all_counts = torch.cat([counts, moments.counts.frozen[others].double()])
    if freedom < 1:
        return []
    covariance = scatter / freedom
    precision = torch.linalg.inv(shrink_covariance(covariance, freedom))
    noise = float((precision * covariance).sum())
    # The mean of a class without an image is farther from it by the factor n / (n - 1).
    distances = _squared_distances(features, all_means, precision)
    factor = (counts / (counts - 1).clamp(min=1)).square()[own]
    distance = distances.gather(1, own[:, None])[:, 0] * factor
    distances.scatter_(1, own[:, None], torch.inf)
    ratios = (distance - distances.amin(dim=1)) / 2
    ratios[counts[own] < 3] = -torch.inf
    suspicious = int((ratios > MISLABELLED).sum())
    if len(features) < SMALL_LESSON:
        several = int((ratios > MISLABELLED_SMALL).sum())
        suspicious = several if several >= MIN_SUSPICIOUS else suspicious
    if suspicious < MIN_SHARE * len(features):
        suspicious = 0
    for index in ratios.argsort(descending=True)[: min(suspicious, MAX_SHOWN)].tolist():
        other = names[all_rows[int(distances[index].argmin())]]
        hints.append(
            f"{image_name(index)} looks like '{other}' and was taught as "
            f"'{names[int(labels[index])]}'"
        )
    sampled = noise * (1 / counts[:, None] + 1 / all_counts.clamp(min=1))
    apart = _squared_distances(means, all_means, precision) - sampled
    for first, second in (apart < SIMILAR).nonzero().tolist():
        if second > first and all_counts[second] > 1 and counts[first] > 1:
            hints.append(
                f"'{names[all_rows[first]]}' looks like '{names[all_rows[second]]}': if they are "
                "one class, merge them with merge-classes"
            )
    return hints


def _squared_distances(rows: Tensor, means: Tensor, precision: Tensor) -> Tensor:
    """Return the squared Mahalanobis distance of each row from each mean, N x C."""
    scaled = means @ precision
    return (
        ((rows @ precision) * rows).sum(dim=1, keepdim=True)
        - 2 * rows @ scaled.T
        + (scaled * means).sum(dim=1)
    )

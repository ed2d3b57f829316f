"""Unknown images: how typical an image is of the learned classes, from running statistics.

The score of an image needs only counts, sums and second moments of frozen features (class tokens
before the final norm, which removes their length).

A threshold fitted in one lesson must stay right when later lessons change the statistics, and
images of earlier lessons are gone by then. Scores are therefore standardised by the scores of
features sampled from the current class Gaussians, and scaled by the number of classes. What is
stored of a lesson is a histogram of the standardised scores of its images, computed by
cross-validation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.nn import functional as F

from coda_prompt.errors import BadOption, CorruptFile
from coda_prompt.learner.typicality import BINS, Prior, UnknownScorer, histogram_bins
from coda_prompt.research.methods.bank import Bank, ClassRows, CPUModule
from coda_prompt.research.methods.moments import FeatureMoments

CONTRADICTION = "its statistics of unknown images contradict each other"
PREFIX = "unknown."
"""Begins the names of the detector's tensors in a model."""
DEFAULT_RATE = 0.05
"""Share of images of known classes that `auto` rejects by mistake."""
FOLDS = 10
"""Of the images of a class. What their number changes is corrected (`_add`)."""


@dataclass(frozen=True)
class UnknownRule:
    """When an image is unknown: if either condition holds."""

    below: float = 0.0
    """The probability of the most likely class is below this."""
    rate: float | None = None
    """The image is less typical of the learned classes than all but this share of their images;
    None: typicality is not used."""

    @classmethod
    def parse(
        cls, unknown: str | None = None, rate: float = DEFAULT_RATE, below: float = 0.0
    ) -> UnknownRule:
        """Make a rule of what a user asks for.

        Raises:
            BadOption: `unknown` is neither None nor `auto`, or a number is not between 0 and 1.
        """
        if unknown not in (None, "auto"):
            raise BadOption("the prediction", "unknown", f"'{unknown}' is not 'auto'")
        if not 0 < rate < 1:
            raise BadOption("the prediction", "unknown-rate", f"{rate} is not between 0 and 1")
        if not 0 <= below <= 1:
            raise BadOption("the prediction", "unknown-below", f"{below} is not between 0 and 1")
        return cls(below, None if unknown is None else rate)

    def rejects(self, probability: float, typicality: float | None) -> bool:
        """Whether an image with this probability of its most likely class is unknown."""
        if self.rate is not None and typicality is not None and typicality < self.rate:
            return True
        return probability < self.below


EVERYTHING_KNOWN = UnknownRule()
"""Rejects nothing."""


class UnknownDetector(ClassRows, CPUModule):
    """Running statistics that tell images of learned classes from others.

    All of it adds up: over lessons, and over models that learned on the same backbone. A lesson is
    added when the statistics are next read, so that learning does not wait for it.

    Args:
        width: Number of features.
        removable: Store the second moments of each class, so that it can be removed exactly.
        prior: Statistics of the images the backbone was trained on.
    """

    def __init__(self, width: int, removable: bool = False, prior: Prior | None = None) -> None:
        super().__init__()
        self.width, self.prior = width, prior
        self.moments = FeatureMoments(width, removable=removable)
        self.scores = Bank((BINS,), dtype=torch.int64)
        """Histogram of the standardised scores of the images of each class."""
        self.class_banks = (self.scores,)
        self.pending: list[tuple[Tensor, Tensor, int]] = []
        """Features, labels and the number of classes of lessons that are not added yet."""

    def learned(self, features: Tensor, labels: Tensor, classes: int) -> UnknownDetector:
        """Return a detector that has learned the images of one more lesson.

        Args:
            features: `ViT.plain_tokens`, of which the first `width` are used.
            labels: The row of the class of each image.
            classes: Number of classes after the lesson.
        """
        detector = copy.deepcopy(self)
        features = features[:, : self.width].detach().cpu().double()
        detector.pending.append((features, labels, classes))
        return detector

    @property
    def images(self) -> int:
        """Number of images the threshold is fitted on."""
        return int(self.histogram().sum())

    def class_moments(self) -> FeatureMoments:
        """Return the counts, sums and second moments of all classes."""
        self._add_pending()
        return self.moments

    def scorer(self) -> UnknownScorer:
        """Return what computes the scores of images from the current statistics.

        Raises:
            CorruptFile: They contradict each other.
        """
        histogram = self.histogram()
        try:
            scorer = UnknownScorer(self.moments, histogram, self.prior)
        except LinAlgError as error:
            raise CorruptFile("The model", CONTRADICTION) from error
        if not (scorer.center.isfinite().all() and scorer.spread.isfinite().all()):
            raise CorruptFile("The model", CONTRADICTION)
        return scorer

    def histogram(self) -> Tensor:
        """Return the histogram of the scores of known images."""
        self._add_pending()
        return self.scores.frozen.sum(dim=0)

    # -- the state in a model

    def state(self) -> dict[str, Tensor]:
        """Return all tensors under their names in a model."""
        self._add_pending()
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor], classes: int) -> bool:
        """Load what `state` returned.

        Args:
            tensors: All tensors of a model whose names begin with `PREFIX`.
            classes: Number of classes of the model.

        Returns:
            Whether the tensors fit the backbone and the number of classes.
        """
        state = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        if state.keys() != self.state_dict().keys():
            return False
        for name, module in self.named_modules():
            if isinstance(module, Bank) and not module.resize(state[f"{name}.frozen"]):
                return False
        own = self.state_dict()
        if any(own[name].shape != tensor.shape for name, tensor in state.items()):
            return False
        self.load_state_dict(state)
        taught = not classes or bool(self.moments.counts.frozen.any())
        return taught and self.moments.is_consistent(classes) and len(self.scores) == classes

    # -- editing: see methods/additive.py

    def drop_classes(self, rows: Sequence[int]) -> None:
        self._add_pending()
        self.moments.drop_classes(rows)
        super().drop_classes(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        self._add_pending()
        self.moments.unite_classes(rows, into)
        super().unite_classes(rows, into)

    def absorb(self, other: UnknownDetector, rows: Sequence[int]) -> None:
        self._add_pending()
        other._add_pending()
        self.moments.absorb(other.moments, rows)
        super().absorb(other, rows)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        """Move images to other classes; their scores stay with the class they were taught as."""
        self._add_pending()
        self.moments.move_images(features[:, : self.width].cpu().double(), source, labels)

    def grow(self, classes: int) -> None:
        self._add_pending()
        self.moments.grow(classes)
        super().grow(classes)

    # -- adding a lesson

    def _add_pending(self) -> None:
        lessons, self.pending = self.pending, []
        for lesson in lessons:
            self._add(*lesson)

    def _add(self, features: Tensor, labels: Tensor, classes: int) -> None:
        """Add the images of a lesson, and the scores that new images like them would have.

        An image is scored without the images of its fold. Such a score is too low: the statistics
        have fewer images than those that score new images. The image is therefore scored without
        two folds too, and its score is extrapolated to all images, linearly in 1 / images of its
        class, as the variance of a mean.
        """
        self.grow(classes)
        self.moments.add(features, labels)
        full = UnknownScorer(self.moments, self.histogram(), self.prior)

        def scores_without(left_out: Tensor, scored: Tensor) -> Tensor:
            rest = _without(self.moments, features[left_out], labels[left_out])
            scorer = UnknownScorer(rest, full.histogram, self.prior, like=full)
            return scorer.standardised(features[scored])

        folds, used = _folds(labels)
        counts = self.moments.counts.frozen.double()
        histogram = self.scores.frozen
        for fold in range(int(used.max())):
            one = folds == fold
            two = one | ((fold < used[labels]) & (folds == (fold + 1) % used[labels]))
            left = [counts - torch.bincount(labels[each], minlength=classes) for each in (one, two)]
            # an image whose class has no other image says nothing about known images
            scored = one & (left[0][labels] > 0)
            if not scored.any():
                continue
            rows = labels[scored]
            all_images, without_one, without_two = (each[rows] for each in (counts, *left))
            scores = scores_without(one, scored)
            change = (all_images - without_one) / (without_one - without_two).clamp(min=1)
            change = change * without_two / all_images
            if change.any():  # else a class has no image without two folds
                scores = scores + change * (scores - scores_without(two, scored))
            bins = F.one_hot(histogram_bins(scores), BINS)
            histogram = histogram.index_add(0, rows, bins)
        self.scores.frozen = histogram


def _without(moments: FeatureMoments, features: Tensor, labels: Tensor) -> FeatureMoments:
    """Return moments without images that are in them."""
    reduced = FeatureMoments(features.shape[1])
    counts = torch.bincount(labels, minlength=len(moments.counts))
    reduced.counts.frozen = moments.counts.frozen - counts
    reduced.sums.frozen = moments.sums.frozen.index_add(0, labels, features, alpha=-1)
    reduced.total = moments.second_moments() - features.T @ features
    return reduced


def _folds(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Spread the images of each class evenly over folds.

    Returns:
        The fold of each image, and the number of folds of each class, which may be 0.
    """
    folds, used = torch.zeros_like(labels), torch.bincount(labels).clamp(max=FOLDS)
    for row in labels.unique().tolist():
        members = (labels == row).nonzero()[:, 0]
        folds[members] = torch.arange(len(members)) % FOLDS
    return folds, used

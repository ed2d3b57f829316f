"""Unknown images: how typical an image is of the learned classes, from running statistics.

The score of an image combines measures that need only counts, sums and second moments of frozen
features (class tokens before the final norm, which removes their length) and of random features of
them: Mahalanobis distances, also relative to all images (Ren et al. 2021,
https://arxiv.org/abs/2106.09022), and whitened cosine similarities to the class means.
docs/lab/unknown.md compares them.

A threshold fitted in one lesson must stay right when later lessons change the statistics, and
images of earlier lessons are gone by then. Scores are therefore standardised by the scores of
features sampled from the current class Gaussians, and what is stored of a lesson is a histogram of
the standardised scores of its images, computed by cross-validation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.errors import BadOption
from coda_prompt.methods.additive import absorb_rows, other_rows, unite_rows
from coda_prompt.methods.bank import Bank
from coda_prompt.methods.moments import FeatureMoments
from coda_prompt.methods.shrinkage import shrink_covariance
from coda_prompt.seeding import keyed_generator

PREFIX = "unknown."
"""Begins the names of the detector's tensors in a model."""
DEFAULT_RATE = 0.05
"""Share of images of known classes that `auto` rejects by mistake."""
HIDDEN = 256
"""Random features; their second moments take 0.5 MB of a model."""
WEIGHTS = {
    "relative Mahalanobis distance": 1.0,
    "whitened cosine": 1.0,
    "relative Mahalanobis distance of random features": 1.0,
    "whitened cosine of random features": 1.0,
    "Mahalanobis distance": 0.25,
    "Mahalanobis distance of random features": 0.25,
}
"""Weights of the standardised measures in the score. The last two have little to say about classes
that resemble the learned ones; they recognise images far from all of them."""
FOLDS = 20
"""With fewer, scores are computed without so many images that too few of others are rejected."""
BINS = 256
SAMPLES = 512
"""Features sampled from the class Gaussians to standardise scores."""


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


class UnknownDetector(nn.Module):
    """Running statistics that tell images of learned classes from others.

    All of it adds up: over lessons, and over models that learned on the same backbone. A lesson is
    added when the statistics are next read, so that learning does not wait for it.

    Args:
        width: Number of features of the backbone.
        removable: Store the second moments of each class, so that it can be removed exactly.
    """

    def __init__(self, width: int, removable: bool = False) -> None:
        super().__init__()
        self.moments = FeatureMoments(width, removable=removable)
        self.hidden = FeatureMoments(HIDDEN, removable=removable)
        self.scores = Bank((BINS,), dtype=torch.int64)
        """Histogram of the standardised scores of the images of each class."""
        self.known_images = Bank(dtype=torch.int64)
        """Images in the statistics when those of a class were last scored."""
        self.pending: list[tuple[Tensor, Tensor, int]] = []
        """Features, labels and the number of classes of lessons that are not added yet."""

    def _apply(self, fn: Any, recurse: bool = True) -> UnknownDetector:
        return self  # statistics stay on the CPU in float64, as those of FeatureMoments

    def learned(self, features: Tensor, labels: Tensor, classes: int) -> UnknownDetector:
        """Return a detector that has learned the images of one more lesson.

        Args:
            features: Class tokens of the plain ViT before its final norm, N x D.
            labels: The row of the class of each image.
            classes: Number of classes after the lesson.
        """
        detector = copy.deepcopy(self)
        detector.pending.append((features.detach().cpu().double(), labels, classes))
        return detector

    @property
    def images(self) -> int:
        """Number of images the threshold is fitted on."""
        return int(self.histogram().sum())

    def scorer(self) -> UnknownScorer:
        """Return what computes the scores of images from the current statistics."""
        return UnknownScorer(self.moments, self.hidden, self.histogram())

    def histogram(self) -> Tensor:
        """Return the histogram of the scores of known images.

        Scores from when less than half as many images were known are left out: with few images
        the statistics are less precise, and all scores lower.
        """
        self._add_pending()
        known = self.known_images.frozen
        return self.scores.frozen[2 * known >= known.max(dim=0, keepdim=True).values].sum(dim=0)

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
        parts = (self.moments, self.hidden)
        rows = {len(self.scores), len(self.known_images)}
        return rows == {classes} and all(part.is_consistent(classes) for part in parts)

    # -- editing: see methods/additive.py

    def drop_classes(self, rows: Sequence[int]) -> None:
        self._add_pending()
        for part in (self.moments, self.hidden):
            part.drop_classes(rows)
        for bank in (self.scores, self.known_images):
            bank.keep(other_rows(len(bank), rows))

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        self._add_pending()
        for part in (self.moments, self.hidden):
            part.unite_classes(rows, into)
        unite_rows(self.scores, rows, into)
        self.known_images.frozen[into] = self.known_images.frozen[list(rows)].max()
        self.known_images.keep(other_rows(len(self.known_images), [r for r in rows if r != into]))

    def absorb(self, other: UnknownDetector, rows: Sequence[int]) -> None:
        self._add_pending()
        other._add_pending()
        self.moments.absorb(other.moments, rows)
        self.hidden.absorb(other.hidden, rows)
        absorb_rows(self.scores, other.scores, rows)
        self.known_images.append([0] * (len(self.scores) - len(self.known_images)))
        for row, known in zip(rows, other.known_images.frozen, strict=True):
            self.known_images.frozen[row] = self.known_images.frozen[row].maximum(known)

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        """Move images to other classes; their scores stay with the class they were taught as."""
        self._add_pending()
        features = features.cpu().double()
        self.moments.move_images(features, source, labels)
        self.hidden.move_images(random_features(features), source, labels)

    def grow(self, classes: int) -> None:
        """Add classes without images up to `classes`."""
        self._add_pending()
        self.moments.grow(classes)
        self.hidden.grow(classes)
        self.scores.append(torch.zeros(classes - len(self.scores), BINS))
        self.known_images.append([0] * (classes - len(self.known_images)))

    # -- adding a lesson

    def _add_pending(self) -> None:
        lessons, self.pending = self.pending, []
        for lesson in lessons:
            self._add(*lesson)

    def _add(self, features: Tensor, labels: Tensor, classes: int) -> None:
        """Add the images of a lesson, and the scores each has without the images of its fold."""
        hidden, folds = random_features(features), _folds(labels)
        self.grow(classes)
        self.moments.add(features, labels)
        self.hidden.add(hidden, labels)
        scores = self.scores.frozen
        scorer = UnknownScorer(self.moments, self.hidden, scores.sum(dim=0))
        for fold in folds.unique().tolist():
            inside = folds == fold
            rest = _without(self.moments, features[inside], labels[inside])
            hidden_rest = _without(self.hidden, hidden[inside], labels[inside])
            # an image whose class has no other image says nothing about known images
            inside &= rest.counts.frozen[labels] > 0
            if inside.any():
                scorer = UnknownScorer(rest, hidden_rest, scores.sum(dim=0), like=scorer)
                bins = _bins(scorer.standardised(features[inside]))
                scores = scores.index_add(0, labels[inside], F.one_hot(bins, BINS))
        self.scores.frozen = scores
        known = self.known_images.frozen.clone()
        known[labels] = self.moments.counts.frozen.sum()
        self.known_images.frozen = known


class Gaussians(nn.Module):
    """Classes as Gaussians with one shared covariance, and all images as one Gaussian.

    Args:
        moments: Statistics of the features.
    """

    mean: Tensor
    whitening: Tensor
    class_means: Tensor
    background: Tensor

    def __init__(self, moments: FeatureMoments) -> None:
        super().__init__()
        counts = moments.counts.frozen
        seen, count = counts > 0, int(counts.sum())
        mean = moments.sums.frozen.sum(dim=0) / max(1, count)
        covariance, freedom = moments.covariance()
        self.factor = torch.linalg.cholesky(shrink_covariance(covariance, freedom))
        """Cholesky factor of the covariance within classes."""
        self.means = moments.means()[seen]
        centred, weights = self.means - mean, counts[seen, None] / max(1, count - 1)
        total = covariance * (freedom / max(1, count - 1)) + centred.T @ (weights * centred)
        whitening = _inverse_transposed(self.factor)
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)
        self.register_buffer("class_means", centred @ whitening)
        background = torch.zeros_like(covariance)
        if len(self.means) > 1:  # with one class, its images and all images are the same
            total = shrink_covariance(total, count - 1)
            background = _inverse_transposed(torch.linalg.cholesky(total))
        self.register_buffer("background", background)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return relative Mahalanobis distance, whitened cosine and distance, negated: B each."""
        centred = features - self.mean
        white = centred @ self.whitening
        distances = (
            white.square().sum(dim=1, keepdim=True)
            - 2 * white @ self.class_means.T
            + self.class_means.square().sum(dim=1)
        )
        relative = torch.logsumexp(-distances / 2, dim=1)
        relative = relative + (centred @ self.background).square().sum(dim=1) / 2
        cosine = (F.normalize(white) @ F.normalize(self.class_means).T).amax(dim=1)
        return relative, cosine, -distances.amin(dim=1)


class UnknownScorer(nn.Module):
    """Computes how typical images are of the learned classes, from their features.

    Args:
        moments: Statistics of the features.
        hidden: Statistics of the random features.
        histogram: Histogram of the standardised scores of images of known classes.
        like: Standardise scores as this scorer does.
    """

    projection: Tensor
    center: Tensor
    spread: Tensor
    histogram: Tensor

    def __init__(
        self,
        moments: FeatureMoments,
        hidden: FeatureMoments,
        histogram: Tensor,
        like: UnknownScorer | None = None,
    ) -> None:
        super().__init__()
        self.plain, self.random = Gaussians(moments), Gaussians(hidden)
        self.register_buffer("projection", _projection(moments.sums.frozen.shape[1]))
        self.register_buffer("histogram", histogram.double())
        if like is None:
            sampled = self.measures(_sample(self.plain.means, self.plain.factor))
            center, spread = sampled.mean(dim=0), sampled.std(dim=0).clamp(min=1e-12)
        self.register_buffer("center", center if like is None else like.center)
        self.register_buffer("spread", spread if like is None else like.spread)

    def measures(self, features: Tensor) -> Tensor:
        """Compute the measures of `WEIGHTS`, B x measures; larger is more typical."""
        hidden = (features @ self.projection).abs()
        relative, cosine, distance = self.plain(features)
        random_relative, random_cosine, random_distance = self.random(hidden)
        measures = [relative, cosine, random_relative, random_cosine, distance, random_distance]
        return torch.stack(measures, dim=1)

    def standardised(self, features: Tensor) -> Tensor:
        """Compute the scores, B: a weighted mean of the standardised measures."""
        measures = (self.measures(features) - self.center) / self.spread
        weights = measures.new_tensor(list(WEIGHTS.values()))
        return measures @ (weights / weights.sum())

    def typicality(self, scores: Tensor) -> Tensor:
        """Return the share of images of known classes whose score is not above each of `scores`.

        Counted as in conformal prediction, (1 + lower scores) / (1 + images): an image of a known
        class is below a rate r with a probability of at most r.
        """
        position = _squashed(scores)[:, None] * BINS - torch.arange(BINS).to(scores)
        below = (position.clamp(0, 1) * self.histogram).sum(dim=1)
        return (1 + below) / (1 + self.histogram.sum())

    def forward(self, features: Tensor) -> Tensor:
        """Return the typicality of images with these features, B."""
        return self.typicality(self.standardised(features.to(self.projection.dtype)))

    def can_reject(self, rate: float) -> bool:
        """Whether there are enough images to reject a share of `rate`."""
        return int(self.histogram.sum()) >= images_needed(rate)

    def check_rate(self, rate: float) -> None:
        """Check that images can be rejected at a rate.

        Raises:
            BadOption: Too few images were learned for it.
        """
        if not self.can_reject(rate):
            raise BadOption(
                "the model",
                "unknown",
                f"a rate of {rate:g} can be fitted on {images_needed(rate)} images or more, and "
                f"the classes of this model have {int(self.histogram.sum())} that are not alone in "
                "their class; learn more images, raise --unknown-rate, or use --unknown-below",
            )


def images_needed(rate: float) -> int:
    """Return the number of images from which on a rate of rejections can be fitted."""
    return int(np.ceil(1 / rate)) - 1


def random_features(features: Tensor) -> Tensor:
    """Compute random features of features, N x HIDDEN.

    Absolute values are never zero: a rectifier that is active for one image only would leave that
    image's features in a row of the second moments.
    """
    return (features @ _projection(features.shape[1])).abs()


def _projection(width: int) -> Tensor:
    """Return random weights, which are the same everywhere: models can be merged."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal((width, HIDDEN)))


def _inverse_transposed(factor: Tensor) -> Tensor:
    """Return the matrix that whitens rows, from the Cholesky factor of their covariance."""
    identity = torch.eye(len(factor), dtype=factor.dtype)
    return torch.linalg.solve_triangular(factor, identity, upper=False).T.contiguous()


def _sample(means: Tensor, factor: Tensor) -> Tensor:
    """Sample features from Gaussians around class means, the same number for each class."""
    rows = torch.arange(SAMPLES) * len(means) // SAMPLES
    generator = keyed_generator(0, "samples of known classes")
    noise = torch.randn(SAMPLES, means.shape[1], dtype=means.dtype, generator=generator)
    return means[rows] + noise @ factor.T


def _without(moments: FeatureMoments, features: Tensor, labels: Tensor) -> FeatureMoments:
    """Return moments without images that are in them."""
    reduced = FeatureMoments(features.shape[1])
    counts = torch.bincount(labels, minlength=len(moments.counts))
    reduced.counts.frozen = moments.counts.frozen - counts
    reduced.sums.frozen = moments.sums.frozen.index_add(0, labels, features, alpha=-1)
    reduced.total = moments.second_moments() - features.T @ features
    return reduced


def _squashed(scores: Tensor) -> Tensor:
    """Map standardised scores to 0 ... 1, finest around 0."""
    return (1 + scores / (1 + scores.abs())) / 2


def _bins(scores: Tensor) -> Tensor:
    """Return the bin of the histogram of each score."""
    return (_squashed(scores) * BINS).long().clamp(0, BINS - 1)


def _folds(labels: Tensor) -> Tensor:
    """Return the fold of each image; the images of a class are spread evenly over the folds."""
    folds = torch.zeros_like(labels)
    for row in labels.unique().tolist():
        members = (labels == row).nonzero()[:, 0]
        folds[members] = torch.arange(len(members)) % FOLDS
    return folds

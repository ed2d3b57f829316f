"""Unknown images: how typical an image is of the learned classes, from running statistics.

The score of an image combines measures that need only counts, sums and second moments of frozen
features: Mahalanobis distances, also relative to all images (Ren et al. 2021,
https://arxiv.org/abs/2106.09022), and cosine similarities to the class means, plain and whitened.
docs/lab/unknown.md compares them.

A threshold fitted in one lesson must stay right when later lessons change the statistics, and
images of earlier lessons are gone by then. Scores are therefore standardised by the scores of
features sampled from the current class Gaussians, and what is stored of a lesson is a histogram of
the standardised scores of its images, computed by cross-validation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.errors import BadOption, CorruptFile
from coda_prompt.methods.bank import Bank
from coda_prompt.methods.moments import FeatureMoments
from coda_prompt.methods.shrinkage import shrink_covariance
from coda_prompt.seeding import keyed_generator

PREFIX = "unknown."
"""Begins the names of the detector's tensors in a model."""
DEFAULT_RATE = 0.05
"""Share of images of known classes that `auto` rejects by mistake."""
HIDDEN = 512
"""Random features; their second moments take 2 MB of a model."""
WEIGHTS = {
    "relative Mahalanobis distance": 1.0,
    "whitened cosine of random features": 1.0,
    "whitened cosine": 1.0,
    "cosine": 1.0,
    "Mahalanobis distance": 0.5,
}
"""Weights of the standardised measures in the score. The last one has little to say about classes
that resemble the learned ones, but it alone recognises images that are no drawing or photograph."""
FOLDS = 5
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
            BadOption: `unknown` is neither None nor `auto`, or `rate` is not between 0 and 1.
        """
        if unknown not in (None, "auto"):
            raise BadOption("the prediction", "unknown", f"'{unknown}' is not 'auto'")
        if not 0 < rate < 1:
            raise BadOption("the prediction", "unknown-rate", f"{rate} is not between 0 and 1")
        return cls(below, None if unknown is None else rate)

    def rejects(self, probability: float, typicality: float | None) -> bool:
        """Whether an image with this probability of its most likely class is unknown."""
        if self.rate is not None:
            assert typicality is not None
            if typicality < self.rate:
                return True
        return probability < self.below


def images_needed(rate: float) -> int:
    """Return the number of images from which on a rate of rejections can be fitted."""
    return int(np.ceil(1 / rate)) - 1


class UnknownDetector(nn.Module):
    """Running statistics that tell images of learned classes from others.

    All of it adds up: over lessons, and over models that learned on the same backbone.

    Args:
        width: Number of features of the backbone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.moments = FeatureMoments(width)
        self.hidden = FeatureMoments(HIDDEN)
        self.scores = Bank((BINS,), dtype=torch.int64)
        """Histogram of the standardised scores of the images of each class."""

    def _apply(self, fn: object, recurse: bool = True) -> UnknownDetector:
        return self  # statistics stay on the CPU in float64, as those of FeatureMoments

    @property
    def classes(self) -> int:
        return len(self.scores)

    @property
    def images(self) -> int:
        """Number of images the threshold is fitted on."""
        return int(self.scores.frozen.sum())

    def learned(self, features: Tensor, labels: Tensor, classes: int) -> UnknownDetector:
        """Return a detector that has learned the images of one more lesson.

        Args:
            features: Plain frozen features of the images, N x D.
            labels: The row of the class of each image.
            classes: Number of classes after the lesson.
        """
        features, labels = features.detach().cpu().double(), labels.cpu()
        hidden = random_features(features)
        detector = copy.deepcopy(self)
        detector._grow(classes)
        detector.moments.add(features, labels)
        detector.hidden.add(hidden, labels)
        folds, scores = _folds(labels), detector.scores.frozen
        for fold in folds.unique().tolist():
            inside = folds == fold
            rest = _without(detector.moments, features[inside], labels[inside])
            hidden_rest = _without(detector.hidden, hidden[inside], labels[inside])
            # an image whose class has no other image says nothing about known images
            inside &= rest.counts.frozen[labels] > 0
            if inside.any():
                scorer = UnknownScorer(rest, hidden_rest, scores.sum(dim=0))
                counts = _histograms(scorer.standardised(features[inside]))
                scores = scores.index_add(0, labels[inside], counts)
        detector.scores.frozen = scores
        return detector

    def scorer(self) -> UnknownScorer:
        """Return what computes the scores of images from the current statistics."""
        return UnknownScorer(self.moments, self.hidden, self.scores.frozen.sum(dim=0))

    def check_rate(self, rate: float) -> None:
        """Check that images can be rejected at a rate.

        Raises:
            BadOption: Too few images were learned for it.
        """
        if self.images < (needed := images_needed(rate)):
            raise BadOption(
                "the model",
                "unknown",
                f"a rate of {rate:g} can be fitted on {needed} images or more, and the classes of "
                f"this model have {self.images} that are not alone in their class; learn more "
                "images, raise --unknown-rate, or use --unknown-below",
            )

    # -- the state in a model

    def state(self) -> dict[str, Tensor]:
        """Return all tensors under their names in a model."""
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    @classmethod
    def from_state(
        cls, width: int, classes: int, tensors: Mapping[str, Tensor]
    ) -> UnknownDetector | None:
        """Read the detector of a model.

        Args:
            width: Number of features of the backbone.
            classes: Number of classes of the model.
            tensors: All tensors of the model.

        Returns:
            The detector; None if the model was made by a version without it.

        Raises:
            CorruptFile: The tensors do not fit.
        """
        state = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in tensors.items()
            if name.startswith(PREFIX)
        }
        if not state:
            return None
        detector = cls(width)
        detector._grow(classes)
        own = detector.state_dict()
        if {name: (each.shape, each.dtype) for name, each in own.items()} != {
            name: (each.shape, each.dtype) for name, each in state.items()
        }:
            problem = "its statistics of unknown images do not fit its classes and backbone"
            raise CorruptFile("The model", problem)
        detector.load_state_dict(state)
        return detector

    # -- editing: the protocol of all additive states

    def drop_classes(self, rows: list[int]) -> None:
        """Remove classes. What their images added to shared second moments remains."""
        self.moments.drop_classes(rows)
        self.hidden.drop_classes(rows)
        kept = [row for row in range(self.classes) if row not in rows]
        self.scores.frozen = self.scores.frozen[kept]

    def unite_classes(self, rows: list[int], into: int) -> None:
        """Make one class of several."""
        self.moments.unite_classes(rows, into)
        self.hidden.unite_classes(rows, into)
        scores = self.scores.frozen.clone()
        scores[into] = scores[sorted({*rows, into})].sum(dim=0)
        kept = [row for row in range(self.classes) if row == into or row not in rows]
        self.scores.frozen = scores[kept]

    def absorb(self, other: UnknownDetector, rows: list[int]) -> None:
        """Add the statistics of another model, whose classes are `rows` of this one."""
        self.moments.absorb(other.moments, rows)
        self.hidden.absorb(other.hidden, rows)
        missing = max([*rows, self.classes - 1]) + 1 - self.classes
        self.scores.append(torch.zeros(missing, BINS))
        self.scores.frozen = self.scores.frozen.index_add(
            0, torch.tensor(rows), other.scores.frozen
        )

    # -- steps of a lesson

    def _grow(self, classes: int) -> None:
        new = classes - self.classes
        for moments, width in ((self.moments, self.width), (self.hidden, HIDDEN)):
            moments.counts.append(torch.zeros(new))
            moments.sums.append(torch.zeros(new, width))
        self.scores.append(torch.zeros(new, BINS))


class UnknownScorer(nn.Module):
    """Computes how typical images are of the learned classes, from their features.

    Args:
        moments: Statistics of the features.
        hidden: Statistics of the random features.
        histogram: Histogram of the standardised scores of images of known classes.
    """

    projection: Tensor
    mean: Tensor
    whitening: Tensor
    class_means: Tensor
    directions: Tensor
    background: Tensor
    hidden_mean: Tensor
    hidden_whitening: Tensor
    hidden_directions: Tensor
    center: Tensor
    spread: Tensor
    histogram: Tensor

    def __init__(self, moments: FeatureMoments, hidden: FeatureMoments, histogram: Tensor) -> None:
        super().__init__()
        seen = moments.counts.frozen > 0
        count = int(moments.counts.frozen.sum())
        self.several = bool(seen.sum() > 1)
        """With one class, distances from it and from all images are the same."""
        means, mean, within = moments.means()[seen], _mean(moments), moments.covariance()
        factor = torch.linalg.cholesky(shrink_covariance(*within))
        total = moments.total / max(count - 1, 1) - torch.outer(mean, mean) * (
            count / max(count - 1, 1)
        )
        whitening = _inverse_transposed(factor)
        background = torch.linalg.cholesky(shrink_covariance(total, count - 1))
        hidden_factor = torch.linalg.cholesky(shrink_covariance(*hidden.covariance()))
        hidden_mean, hidden_whitening = _mean(hidden), _inverse_transposed(hidden_factor)
        tensors = {
            "projection": _projection(len(moments.total)),
            "mean": mean,
            "whitening": whitening,
            "class_means": (means - mean) @ whitening,
            "directions": F.normalize(means),
            "background": _inverse_transposed(background),
            "hidden_mean": hidden_mean,
            "hidden_whitening": hidden_whitening,
            "hidden_directions": F.normalize(
                (hidden.means()[seen] - hidden_mean) @ hidden_whitening
            ),
            "histogram": histogram.double(),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        sampled = self.measures(_sample(means, factor))
        self.register_buffer("center", sampled.mean(dim=0))
        self.register_buffer("spread", sampled.std(dim=0).clamp(min=1e-12))

    def measures(self, features: Tensor) -> Tensor:
        """Compute the measures the score is made of, B x measures; larger is more typical."""
        centred = features - self.mean
        white = centred @ self.whitening
        distances = (
            white.square().sum(dim=1, keepdim=True)
            - 2 * white @ self.class_means.T
            + self.class_means.square().sum(dim=1)
        )
        relative = torch.logsumexp(-distances / 2, dim=1)
        if self.several:
            relative = relative + (centred @ self.background).square().sum(dim=1) / 2
        hidden = (F.relu(features @ self.projection) - self.hidden_mean) @ self.hidden_whitening
        cosines = [
            (F.normalize(rows) @ directions.T).amax(dim=1)
            for rows, directions in (
                (hidden, self.hidden_directions),
                (white, F.normalize(self.class_means)),
                (features, self.directions),
            )
        ]
        return torch.stack([relative, *cosines, -distances.amin(dim=1)], dim=1)

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
        position = squash(scores)[:, None] * BINS - torch.arange(BINS).to(scores)
        below = (position.clamp(0, 1) * self.histogram).sum(dim=1)
        return (1 + below) / (1 + self.histogram.sum())

    def forward(self, features: Tensor) -> Tensor:
        """Return the typicality of images with these features, B."""
        return self.typicality(self.standardised(features.to(self.mean.dtype)))


def squash(scores: Tensor) -> Tensor:
    """Map standardised scores to 0 ... 1, finest around 0."""
    return (1 + scores / (1 + scores.abs())) / 2


def random_features(features: Tensor) -> Tensor:
    """Compute random features of features, N x HIDDEN."""
    return F.relu(features @ _projection(features.shape[1]))


def _projection(width: int) -> Tensor:
    """Return random weights, which are the same everywhere: models can be merged."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal((width, HIDDEN)))


def _mean(moments: FeatureMoments) -> Tensor:
    """Return the mean of all images."""
    return moments.sums.frozen.sum(dim=0) / moments.counts.frozen.sum().clamp(min=1)


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
    reduced.total = moments.total - features.T @ features
    return reduced


def _histograms(scores: Tensor) -> Tensor:
    """Return the bin of each score as a row of counts, N x BINS."""
    return F.one_hot((squash(scores) * BINS).long().clamp(0, BINS - 1), BINS)


def _folds(labels: Tensor) -> Tensor:
    """Return the fold of each image; the images of a class are spread evenly over the folds."""
    folds = torch.zeros_like(labels)
    for row in labels.unique().tolist():
        members = (labels == row).nonzero()[:, 0]
        folds[members] = torch.arange(len(members)) % FOLDS
    return folds

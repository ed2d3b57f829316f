"""How typical an image is of learned classes: the score of unknown images and its calibration.

The relative Mahalanobis distance (Ren et al. 2021, https://arxiv.org/abs/2106.09022): from the
nearest classes, less that from all images. docs/lab/unknown.md compares it with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np
import torch
from torch import Tensor, nn

from coda_prompt.errors import BadOption
from coda_prompt.research.methods.moments import FeatureMoments
from coda_prompt.research.methods.shrinkage import shrink_covariance
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.vit.catalog import LoadedBackbone
from coda_prompt.storage.tensors import decode_tensors

FAR = 6.0
"""From here on, in standard deviations, the Mahalanobis distance itself counts: it recognises
images that resemble nothing (noise, another kind of image), and says little about others."""
PRIOR_IMAGES = 2400
"""Number of images that the prior counts as in means and covariances."""
PRIOR_CLASSES = 5
"""Number of classes that the prior counts as in `DEPTH_EXPONENT`."""
DEPTH_EXPONENT = 0.25
"""The more classes are known, the closer is an unusual image of a known class to one of them: low
scores shrink with this power of the number of classes, for drawings and photographs alike."""
DEPTH_CLASSES = 400
"""Scores of a model of so many classes are not scaled."""
BINS = 256
SAMPLES = 512
"""Features sampled from the class Gaussians to standardise scores."""


@dataclass(frozen=True)
class Prior:
    """Statistics of the images a backbone was trained on: what images of any class look like."""

    covariance: Tensor
    """Within classes."""
    class_means: Tensor
    """All classes have the same number of images."""

    @classmethod
    def of(cls, backbone: LoadedBackbone) -> Prior | None:
        """Return the statistics that come with a backbone; None if there are none."""
        name = f"{backbone.name}-statistics.safetensors"
        asset = resources.files("coda_prompt") / "assets" / name
        if not asset.is_file():
            return None
        file = decode_tensors(asset.read_bytes(), name)
        if file.description is None or file.description["fingerprint"] != backbone.fingerprint:
            return None
        return cls(**{name: tensor.double() for name, tensor in file.tensors.items()})

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.covariance)

    @cached_property
    def total(self) -> Tensor:
        """Covariance of all images."""
        return self.covariance + torch.cov(self.class_means.T)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of all images."""
        return self.class_means.mean(dim=0)


class Gaussians(nn.Module):
    """Classes as Gaussians with one shared covariance, and all images as one Gaussian.

    Args:
        moments: Statistics of the features.
        prior: Counts as `PRIOR_IMAGES` more images in the covariances and the mean.
    """

    mean: Tensor
    whitening: Tensor
    class_means: Tensor
    background: Tensor

    def __init__(self, moments: FeatureMoments, prior: Prior | None = None) -> None:
        super().__init__()
        counts = moments.counts.frozen
        seen, count = counts > 0, int(counts.sum())
        mean = moments.sums.frozen.sum(dim=0) / max(1, count)
        (covariance, freedom), (total, _) = moments.covariance(), moments.total_covariance()
        self.means = moments.means()[seen]
        if prior is not None:  # of so many images that nothing needs to be shrunk
            own = freedom / (freedom + PRIOR_IMAGES)
            mean = own * mean + (1 - own) * prior.mean
            covariance = own * covariance + (1 - own) * prior.covariance
            total = own * total + (1 - own) * prior.total
        else:
            covariance = shrink_covariance(covariance, freedom)
            total = shrink_covariance(total, count - 1)
        self.factor = torch.linalg.cholesky(covariance)
        """Cholesky factor of the covariance within classes."""
        whitening = _inverse_transposed(self.factor)
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)
        self.register_buffer("class_means", (self.means - mean) @ whitening)
        background = torch.zeros_like(covariance)
        if prior is not None or len(self.means) > 1:  # else its images are all images
            background = _inverse_transposed(torch.linalg.cholesky(total))
        self.register_buffer("background", background)

    def sample_classes(self) -> Tensor:
        """Sample features from the classes, the same number from each."""
        rows = torch.arange(SAMPLES) * len(self.means) // SAMPLES
        generator = keyed_generator(0, "samples of known classes")
        noise = torch.randn(SAMPLES, len(self.mean), dtype=self.mean.dtype, generator=generator)
        return self.means[rows] + noise @ self.factor.T

    def forward(self, features: Tensor) -> Tensor:
        """Compute the relative and the plain Mahalanobis distance, negated, B x 2."""
        centred = features - self.mean
        white = centred @ self.whitening
        distances = (
            white.square().sum(dim=1, keepdim=True)
            - 2 * white @ self.class_means.T
            + self.class_means.square().sum(dim=1)
        )
        relative = torch.logsumexp(-distances / 2, dim=1)
        relative = relative + (centred @ self.background).square().sum(dim=1) / 2
        return torch.stack([relative, -distances.amin(dim=1)], dim=1)


class UnknownScorer(nn.Module):
    """Computes how typical images are of the learned classes, from their features.

    Args:
        moments: Statistics of the features.
        histogram: Histogram of the standardised scores of images of known classes.
        prior: Statistics of the images the backbone was trained on.
        like: Standardise scores as this scorer does.
    """

    center: Tensor
    spread: Tensor
    depth: Tensor
    histogram: Tensor
    shares: Tensor

    def __init__(
        self,
        moments: FeatureMoments,
        histogram: Tensor,
        prior: Prior | None = None,
        like: UnknownScorer | None = None,
    ) -> None:
        super().__init__()
        self.gaussians = Gaussians(moments, prior)
        self.register_buffer("histogram", histogram.double())
        self.register_buffer("shares", _shares(self.histogram))
        if like is None:
            sampled = self.gaussians(self.gaussians.sample_classes())
            center, spread = sampled.mean(dim=0), sampled.std(dim=0).clamp(min=1e-12)
            classes = len(self.gaussians.means) + (0 if prior is None else PRIOR_CLASSES)
            depth = center.new_tensor((DEPTH_CLASSES / classes) ** DEPTH_EXPONENT)
        else:
            center, spread, depth = like.center, like.spread, like.depth
        self.register_buffer("center", center)
        self.register_buffer("spread", spread)
        self.register_buffer("depth", depth)

    def standardised(self, features: Tensor) -> Tensor:
        """Compute the scores, B: the relative distance, and the distance of images beyond `FAR`.

        0 is the mean of samples of known classes. The scale depends on the number of classes, so
        that a score means the same in an earlier and in a later lesson.
        """
        relative, distance = ((self.gaussians(features) - self.center) / self.spread).T
        return (relative + (distance + FAR).clamp(max=0)) / self.depth

    def typicality(self, scores: Tensor) -> Tensor:
        """Return the share of images of known classes whose score is below each of `scores`.

        As in conformal prediction, the scores of n images divide all scores into n + 1 intervals,
        and a new image of a known class is equally likely in each of them. Within an interval the
        share is interpolated, so that it is below a rate r with a probability of r, however few
        images there are.
        """
        position = _squashed(scores)[:, None] * BINS - torch.arange(BINS).to(scores)
        return (position.clamp(0, 1) * self.shares).sum(dim=1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the typicality of images from `ViT.plain_tokens`, B."""
        features = features[:, : len(self.gaussians.mean)].to(self.gaussians.mean.dtype)
        return self.typicality(self.standardised(features))

    def can_reject(self, rate: float) -> bool:
        """Whether there are enough images to reject a share of `rate`."""
        return not self.missing_images(rate)

    def missing_images(self, rate: float) -> int:
        """Return how many more images must be learned to reject a share of `rate`."""
        return max(0, images_needed(rate) - int(self.histogram.sum()))

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


def _shares(histogram: Tensor) -> Tensor:
    """Spread each count of a histogram, and one at its end, over the empty bins before it."""
    counts = histogram.clone()
    counts[-1] += 1
    filled = counts.nonzero()[:, 0]
    widths = filled.diff(prepend=filled.new_tensor([-1]))
    return (counts[filled] / widths).repeat_interleave(widths) / counts.sum()


def images_needed(rate: float) -> int:
    """Return the minimum number of images to fit a rate of rejections."""
    return int(np.ceil(1 / rate)) - 1


def _inverse_transposed(factor: Tensor) -> Tensor:
    """Return the matrix that whitens rows, from the Cholesky factor of their covariance."""
    identity = torch.eye(len(factor), dtype=factor.dtype)
    return torch.linalg.solve_triangular(factor, identity, upper=False).T.contiguous()


def _squashed(scores: Tensor) -> Tensor:
    """Map standardised scores to 0 ... 1, finest around 0."""
    return (1 + scores / (1 + scores.abs())) / 2


def histogram_bins(scores: Tensor) -> Tensor:
    """Return the bin of the histogram of each score."""
    return (_squashed(scores) * BINS).long().clamp(0, BINS - 1)

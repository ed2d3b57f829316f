"""LoRanPAC: minimum-norm least squares on random features with a continually truncated spectrum.

Peng et al., ICLR 2025, https://arxiv.org/abs/2410.00645. The paper has 100,000 random features;
the default here is at most 10,000. `width` changes it.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import MethodConfig, ParameterCount
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.random_features import (
    RandomFeatureMethod,
    RandomFeatures,
    default_projected,
)
from coda_prompt.research.vit.vit import ViT

UPDATE_SIZE = 10_000
"""Images after which the spectrum is updated and truncated, as in the released code; a task ends
with an update."""
NO_ENERGY = 1e-6
"""Singular values below this share of the largest one are float32 rounding."""


@dataclass(frozen=True, config=STRICT)
class LoRanPACConfig(MethodConfig):
    """Options of LoRanPAC."""

    width: int | None = Field(default=None, ge=1, le=100_000)
    """Number of random features (E). Default: 16 per backbone feature, at most 10,000. Worst where
    it is close to the number of images; use several times as many."""
    kept: float = Field(default=0.75, gt=0, le=1)
    """Share of the spectrum that is kept: of the images so far, and of the random features."""
    max_rank: int = Field(default=10_000, ge=1)
    """Largest number of singular values that are kept."""
    ridge: float = Field(default=0.0, ge=0)
    """Added to the squared singular values; none in the paper."""


class LoRanPAC(RandomFeatureMethod, ClosedForm):
    """LoRanPAC: least squares on random features of frozen features, small directions left out."""

    Config = LoRanPACConfig
    variants = MappingProxyType({"loranpac": {}})

    def __init__(self, backbone: ViT, config: LoRanPACConfig) -> None:
        super().__init__(backbone, config)
        features = backbone.config.width
        self.statistics: TruncatedSpectrum = TruncatedSpectrum(
            features, config.width or default_projected(features), config
        )

    def scores(self, features: Tensor) -> Tensor:
        return self.statistics(features)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.statistics.sums.frozen.numel())


class TruncatedSpectrum(RandomFeatures):
    """The leading singular vectors and values of the random features of all images so far.

    `spectrum` has the rows S U^T (k x E): H^T = U S V^T without the directions left out.
    """

    def __init__(self, width: int, projected: int, config: LoRanPACConfig) -> None:
        super().__init__(width, projected)
        self.config = config
        self.spectrum = Bank((projected,))

    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        for chunk, rows in zip(features.split(UPDATE_SIZE), labels.split(UPDATE_SIZE), strict=True):
            hidden = self.hidden(chunk)  # H
            self.sums.frozen = self.sums.frozen.index_add(1, rows, hidden.T)  # G
            counts = torch.bincount(rows, minlength=self.classes)
            self.counts.frozen = self.counts.frozen + counts
            self._update(hidden)
        # W = U diag(1 / (S^2 + ridge)) U^T G; the rows of `spectrum` contain S once more.
        scaled = self.spectrum.frozen.cpu().double()
        squares = scaled.square().sum(dim=1, keepdim=True)  # S^2
        targets = scaled @ self.sums.frozen.cpu().double()
        solved = scaled.T @ (targets / (squares * (squares + self.config.ridge)))
        self.weight.frozen = solved.to(self.weight.frozen).contiguous()

    def _update(self, hidden: Tensor) -> None:
        """Replace U, S by the leading left singular vectors and values of [U S, H^T].

        From the smaller one of the two Gram matrices: E x E where there are more rows than random
        features. In float64 on the CPU, because the Gram matrix squares the condition.
        """
        rank, stacked = self._rank(), torch.cat([self.spectrum.frozen, hidden]).cpu().double()
        more_rows = len(stacked) > self.projected
        gram = stacked.T @ stacked if more_rows else stacked @ stacked.T
        squares, vectors = torch.linalg.eigh(gram)  # ascending
        squares, vectors = squares.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
        rows = squares.sqrt()[:, None] * vectors.T if more_rows else vectors.T @ stacked  # S U^T
        has_energy = squares > NO_ENERGY**2 * squares[0]
        self.spectrum.frozen = rows[has_energy].to(self.spectrum.frozen)

    def _rank(self) -> int:
        """k = min(0.75 n, 0.75 E, 10,000) after n images, but not below the number of classes."""
        kept = self.config.kept
        images = round(kept * int(self.counts.frozen.sum()))
        return min(max(images, self.classes), round(kept * self.projected), self.config.max_rank)

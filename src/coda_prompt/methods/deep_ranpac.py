"""Deep RanPAC: RanPAC's classifier on the tokens of several blocks, plain or prompted.

RanPAC: McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251. Not in that paper: an
image's features are the class token and the mean patch token after each of the last blocks.
docs/lab/cifar-100-laptop.md has measurements.
"""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.errors import BadOption
from coda_prompt.methods.closedform import RanPAC
from coda_prompt.methods.coda_ranpac import CodaRanPAC, CodaRanPACConfig
from coda_prompt.methods.options import STRICT
from coda_prompt.methods.ridge import RidgeClassifier, RidgeConfig
from coda_prompt.model.vit import Images


@dataclass(frozen=True, config=STRICT)
class DeepRidgeConfig(RidgeConfig):
    """Options of Deep RanPAC."""

    last_blocks: int = Field(default=3, ge=1)
    """Number of blocks, counted from the last, whose tokens are features."""


@dataclass(frozen=True, config=STRICT)
class CodaDeepRanPACConfig(CodaRanPACConfig, DeepRidgeConfig):
    """Options of Deep RanPAC on CODA-P's prompts."""


class DeepFeatures(RidgeClassifier):
    """Mixin: the features of an image are tokens of the last blocks."""

    config: DeepRidgeConfig

    def feature_width(self) -> int:
        blocks, vit = self.config.last_blocks, self.vit_config
        if blocks > vit.depth:
            problem = f"the backbone has {vit.depth} blocks, not {blocks}"
            raise BadOption("the method", "last_blocks", problem)
        return 2 * blocks * vit.width


class DeepRanPAC(DeepFeatures, RanPAC):
    """Deep RanPAC: RanPAC's classifier on the tokens of the last blocks."""

    Config = DeepRidgeConfig
    variants = MappingProxyType({"deep-ranpac": {"width": 4096}})
    needs_queries = False

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.backbone.pooled_features(images, self.config.last_blocks)

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.statistics(self.features(images, queries))


class CodaDeepRanPAC(DeepFeatures, CodaRanPAC):
    """CODA-P-Deep-RanPAC: the same on prompts that are learned in the first task."""

    Config = CodaDeepRanPACConfig
    variants = MappingProxyType({"coda-p-deep-ranpac": {"width": 4096}})
    config: CodaDeepRanPACConfig

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if queries is None:
            images = self.backbone.start(images, self.first_block)
            queries = self.queries(images)
        prefixes = self.prefixes(queries)
        return self.backbone.pooled_features(images, self.config.last_blocks, prefixes)

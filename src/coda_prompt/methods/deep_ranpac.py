"""Deep RanPAC: RanPAC's classifier on the tokens of several blocks, plain or prompted.

RanPAC: McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251. Not in that paper: an
image's features are the class token and the mean patch token after each of the last blocks.
docs/lab/default-method.md measures what they add.
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
from coda_prompt.methods.ridge import RidgeConfig
from coda_prompt.model.vit import Images, ViTConfig

LAST_BLOCKS = 3


@dataclass(frozen=True, config=STRICT)
class DeepRidgeConfig(RidgeConfig):
    """Options of Deep RanPAC."""

    last_blocks: int = Field(default=LAST_BLOCKS, ge=1)
    """Number of blocks, counted from the last, whose tokens are features."""


@dataclass(frozen=True, config=STRICT)
class CodaDeepRanPACConfig(CodaRanPACConfig):
    """Options of Deep RanPAC on CODA-P's prompts."""

    last_blocks: int = Field(default=LAST_BLOCKS, ge=1)
    """Number of blocks, counted from the last, whose tokens are features."""


class DeepRanPAC(RanPAC):
    """Deep RanPAC: RanPAC's classifier on the tokens of the last blocks."""

    Config = DeepRidgeConfig
    variants = MappingProxyType({"deep-ranpac": {"width": 4096}})
    needs_queries = False
    config: DeepRidgeConfig

    def feature_width(self) -> int:
        return pooled_width(self.vit_config, self.config.last_blocks)

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.backbone.pooled_features(images, self.config.last_blocks)

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.statistics(self.features(images, queries))


class CodaDeepRanPAC(CodaRanPAC):
    """CODA-P-Deep-RanPAC: the same on prompts that are learned in the first task."""

    Config = CodaDeepRanPACConfig
    variants = MappingProxyType({"coda-p-deep-ranpac": {"width": 4096}})
    config: CodaDeepRanPACConfig

    def feature_width(self) -> int:
        return pooled_width(self.vit_config, self.config.last_blocks)

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if queries is None:
            images = self.backbone.open(images, self.first_block)
            queries = self.queries(images)
        prefixes = self.prefixes(queries)
        return self.backbone.pooled_features(images, self.config.last_blocks, prefixes)


def pooled_width(vit: ViTConfig, last_blocks: int) -> int:
    """The length of `ViT.pooled_features`.

    Raises:
        BadOption: The ViT has fewer blocks.
    """
    if last_blocks > vit.depth:
        problem = f"the backbone has {vit.depth} blocks, not {last_blocks}"
        raise BadOption("the method", "last_blocks", problem)
    return 2 * last_blocks * vit.width

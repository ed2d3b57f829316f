"""RanPAC: ridge regression on random features of a frozen ViT.

McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251. Two of the three kinds of features
are not in that paper:

- `final`: the class token, as published;
- `blocks`: the class token and the mean patch token after each of the last blocks
  (docs/lab/cifar-100-laptop.md has measurements);
- `tokens`: random features of the last class token, beside the same tokens as they are. Random
  features of early tokens cost accuracy where images are few, because few random features cover
  many tokens badly; the tokens themselves do not (docs/lab/token-ranpac.md has measurements).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import BadOption
from coda_prompt.research.methods.base import MethodConfig, ParameterCount
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.random_features import RandomFeatureMethod, default_projected
from coda_prompt.research.methods.ridge import RandomRidge, RidgeConfig, RidgeSums
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import Images, ViT

MAX_TOKEN_PROJECTED = 4096
"""By default; with the tokens, the sums of a ViT-S are as large as those of final features."""


@dataclass(frozen=True, config=STRICT)
class RanPACConfig(RidgeConfig):
    """Options of RanPAC."""

    features: Literal["final", "blocks", "tokens"] = "final"
    """What the regression sees of an image: random features of the final class token (`final`), of
    the class tokens and mean patch tokens of the last blocks (`blocks`), or of the final class
    token beside all these tokens as they are (`tokens`)."""
    last_blocks: int = Field(default=3, ge=1)
    """Number of blocks, counted from the last, whose tokens are features; not for `final`."""


class RanPAC(RandomFeatureMethod, ClosedForm):
    """RanPAC: ridge regression on random ReLU features of frozen features."""

    Config: ClassVar[type[MethodConfig]] = RanPACConfig
    variants = MappingProxyType(
        {
            "ranpac": {},
            "deep-ranpac": {"features": "blocks", "width": 4096},
            "token-ranpac": {"features": "tokens", "ridge": "relative"},
        }
    )
    config: RanPACConfig
    statistics: RandomRidge

    def __init__(self, backbone: ViT, config: RanPACConfig) -> None:
        super().__init__(backbone, config)
        self.needs_queries = config.features == "final"
        width, token_width = self.feature_width(), backbone.config.width
        projected = config.width or default_projected(token_width)
        if config.features == "tokens":
            random = config.width or min(MAX_TOKEN_PROJECTED, projected)
            self.statistics = TokenRidge(token_width, width // token_width, random, config)
        else:
            self.statistics = RandomRidge(width, projected, config)

    def feature_width(self) -> int:
        """The number of features of an image."""
        blocks, vit = self.config.last_blocks, self.vit_config
        if self.config.features == "final":
            return vit.width
        if blocks > vit.depth:
            problem = f"the backbone has {vit.depth} blocks, not {blocks}"
            raise BadOption("the method", "last_blocks", problem)
        return 2 * blocks * vit.width

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if self.config.features == "final":
            return self.queries(images) if queries is None else queries
        return self.backbone.pooled_features(images, self.config.last_blocks)

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.scores(self.features(images, queries))

    def scores(self, features: Tensor) -> Tensor:
        return self.statistics(features)

    # -- statistics

    def task_sums(self, labels: Tensor) -> RidgeSums:
        return RidgeSums(self.statistics, labels, len(self.task_sizes))

    def add_sums(self, sums: RidgeSums) -> None:
        self.statistics.add_sums(sums)

    def parameter_count(self) -> ParameterCount:
        return ParameterCount(0, self.statistics.sums.frozen.numel())


class TokenRidge(RandomRidge):
    """Ridge regression on random features of the last class token and on all tokens.

    h = [ReLU(c W) sqrt(2 / M), t_1, ..., t_K] / sqrt(2), where c is the last class token, W has M
    columns, and t_k are the K tokens, each of unit length, divided by sqrt(K).

    Args:
        token_width: Features of a token.
        tokens: Tokens of an image: of each block the class token and the mean patch token.
        random: Number of random features, M.
        config: Options of the regression.
    """

    def __init__(self, token_width: int, tokens: int, random: int, config: RidgeConfig) -> None:
        width = tokens * token_width
        super().__init__(width, random + width, config)
        self.projection_shape = (token_width, random)

    def hidden(self, features: Tensor) -> Tensor:
        token_width, random = self.projection_shape
        with full_precision(features.device):
            features = features.to(self.weight.frozen.dtype)
            tokens = F.normalize(features.unflatten(1, (-1, token_width)), dim=2)  # B x K x D
            class_token = tokens[:, -2]  # of the last block
            projected = F.relu(class_token @ self.projection(features))
            # Both parts have a mean squared length of 1/2.
            parts = (projected / random**0.5, tokens.flatten(1) / (2 * tokens.shape[1]) ** 0.5)
            return torch.cat(parts, dim=1)

"""Token RanPAC: RanPAC's classifier that also sees the tokens of several blocks as they are.

RanPAC: McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251. Not in that paper: the
regression is on h = [ReLU(c W) sqrt(2 / M), t_1, ..., t_K] / sqrt(2), where c is the last class
token, W has M columns, and t_k are the K class tokens and mean patch tokens of the last blocks,
each token of unit length, divided by sqrt(K). Random features of early tokens cost accuracy where
images are few, because few random features cover many tokens badly; the tokens themselves do not.
docs/lab/token-ranpac.md has measurements.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.methods.deep_ranpac import CodaDeepRanPAC, DeepFeatures, DeepRanPAC
from coda_prompt.methods.random_features import default_projected
from coda_prompt.methods.ridge import RandomRidge, RidgeConfig
from coda_prompt.model.linear import full_precision

MAX_RANDOM_FEATURES = 4096
"""By default; with the tokens, the sums of a ViT-S are as large as RanPAC's."""


class TokenRidge(RandomRidge):
    """Ridge regression on random features of the last class token and on all tokens.

    Args:
        token_width: Features of a token.
        tokens: Tokens of an image: of each block the class token and the mean patch token.
        random: Number of random features.
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


class TokenFeatures(DeepFeatures):
    """Mixin: random features of the last class token only, and all tokens as they are."""

    def make_statistics(self) -> RandomRidge:
        width = self.vit_config.width
        random = self.config.width or min(MAX_RANDOM_FEATURES, default_projected(width))
        return TokenRidge(width, self.feature_width() // width, random, self.config)


class TokenRanPAC(TokenFeatures, DeepRanPAC):
    """Token RanPAC: RanPAC's classifier on the class token, and on tokens of the last blocks."""

    variants = MappingProxyType({"token-ranpac": {"ridge": "relative"}})


class CodaTokenRanPAC(TokenFeatures, CodaDeepRanPAC):
    """CODA-P-Token-RanPAC: the same on prompts that are learned in the first task."""

    variants = MappingProxyType({"coda-p-token-ranpac": {"ridge": "relative"}})

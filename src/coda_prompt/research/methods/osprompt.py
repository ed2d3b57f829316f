"""OS-Prompt and OS-Prompt++: One-stage Prompt-based Continual Learning.

Kim, Li and Panda, ECCV 2024, https://arxiv.org/abs/2402.16189. Paper and released code differ in
the loss of OS-Prompt++; each is a value of `reference`:

- `similarity` (paper): the weights that the query and the reference give to components, compared
  after a softmax;
- `token` (released code): the mean squared difference of query and reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.research.methods.base import Loss
from coda_prompt.research.methods.coda import CodaConfig, CodaPrompt, component_weights
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.vit.vit import BlockEdits, Images, Prefix


@dataclass(frozen=True, config=STRICT)
class OSPromptConfig(CodaConfig):
    """Options of OS-Prompt."""

    attention: bool = False
    """Attention vectors, as CODA-P has them; OS-Prompt has none."""
    reference: Literal["none", "similarity", "token"] = "none"
    """How training compares a block's query with the class token as it leaves the plain ViT
    (OS-Prompt++): not at all, as in the paper, or as in the released code."""
    reference_weight: float = Field(default=1e-4, ge=0)
    """Weight of this loss (lambda)."""


class OSPrompt(CodaPrompt):
    """OS-Prompt: CODA-P whose query is the class token that enters each block, in one pass.

    Only the training of OS-Prompt++ runs the plain ViT as well, for the reference.
    """

    Config = OSPromptConfig
    variants = MappingProxyType({"os-prompt": {}, "os-prompt++": {"reference": "similarity"}})
    needs_queries = False
    config: OSPromptConfig

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.backbone.features(images, self._edits(lambda position, query: None))

    def loss(self, batch: TrainingBatch) -> Loss:
        """Cross-entropy + lambda sum_l L_l, averaged over the batch."""
        assert batch.images is not None
        entering: dict[int, Tensor] = {}
        edits = self._edits(entering.__setitem__)
        features = self.backbone.features(batch.images, edits)
        per_image = self.head.masked_loss(features, batch.labels)
        if self.config.reference != "none" and entering:
            reference = self.queries(batch.images)  # r, without a gradient
            differences = [
                self._difference(position, query, reference) for position, query in entering.items()
            ]
            per_image = per_image + self.config.reference_weight * torch.stack(differences).sum(0)
        return Loss(per_image, torch.zeros_like(per_image), self.penalty())

    def _edits(self, seen: Callable[[int, Tensor], object]) -> dict[int, BlockEdits]:
        """Prefixes made from the tokens that enter a block; `seen` is called with each query."""
        if not len(self.components):
            return {}
        return {
            block: BlockEdits(partial(self._prefix, position, seen))
            for position, block in enumerate(self.blocks)
        }

    def _prefix(
        self, position: int, seen: Callable[[int, Tensor], object], tokens: Tensor
    ) -> Prefix:
        """p_l = sum_m cos(q_l, K_m) P_m with q_l = x_l[class]."""
        query = tokens[:, 0]
        seen(position, query)
        (prefix,) = self.prefixes(query, slice(position, position + 1)).values()
        return prefix

    def _difference(self, position: int, query: Tensor, reference: Tensor) -> Tensor:
        """L_l of each image: |softmax(cos(q_l, K)) - softmax(cos(r, K))|^2, or MSE(q_l, r)."""
        if self.config.reference == "token":
            return (query - reference).square().mean(dim=1)
        shares = [
            torch.cat(
                [
                    component_weights(token, *vectors)[0]
                    for _, *vectors in self.rows_of(slice(position, position + 1))
                ],
                dim=1,
            ).softmax(dim=1)
            for token in (query, reference)
        ]
        return (shares[0] - shares[1]).square().sum(dim=1)

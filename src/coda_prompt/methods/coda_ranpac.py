"""CODA-P-RanPAC: CODA-Prompt's prompts, learned in the first task, with RanPAC's classifier.

Smith et al., CVPR 2023, https://arxiv.org/abs/2211.13218, and McDonnell et al., NeurIPS 2023,
https://arxiv.org/abs/2307.02251.
"""

from __future__ import annotations

from types import MappingProxyType

from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.methods.base import ParameterCount, TaskBrief
from coda_prompt.methods.coda import CodaConfig, CodaPrompt
from coda_prompt.methods.options import STRICT
from coda_prompt.methods.ridge import RidgeClassifier, RidgeConfig
from coda_prompt.model.vit import Images


@dataclass(frozen=True, config=STRICT)
class CodaRanPACConfig(CodaConfig, RidgeConfig):
    """Options of CODA-P with RanPAC's classifier."""


class CodaRanPAC(RidgeClassifier, CodaPrompt):
    """CODA-P-RanPAC: prompts learned in the first task of several classes, RanPAC's classifier.

    The prompts are frozen afterwards, because changing them would invalidate the sums of older
    classes. The linear head is only used to train the prompts.
    """

    Config = CodaRanPACConfig
    variants = MappingProxyType({"coda-p-ranpac": {}})
    imprints = False
    config: CodaRanPACConfig

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if self.components.trainable is None:
            self.head.close()

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.statistics(self.features(images, queries))

    def parameter_count(self) -> ParameterCount:
        prompts = sum(bank.frozen.numel() for bank in self.prompt_banks.values())
        return ParameterCount(prompts, self.statistics.sums.frozen.numel())

    def _new_components(self, brief: TaskBrief) -> int:
        """Learn prompts only while the sums are empty."""
        return 0 if self.statistics.classes else super()._new_components(brief)

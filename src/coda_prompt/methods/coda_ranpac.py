"""CODA-P's prompts with RanPAC's classifier: adapt once to the data at hand, then never forget."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.methods.base import MethodConfig, ParameterCount, TaskBrief
from coda_prompt.methods.coda import CodaConfig, CodaPrompt
from coda_prompt.methods.options import STRICT
from coda_prompt.methods.ridge import RidgeClassifier, RidgeConfig
from coda_prompt.model.vit import Images


@dataclass(frozen=True, config=STRICT)
class CodaRanPACConfig(CodaConfig, RidgeConfig):
    """Options of CODA-P with RanPAC's classifier."""


class CodaRanPAC(RidgeClassifier, CodaPrompt):
    """CODA-P's prompts, learned in the first task (of several classes), with RanPAC's classifier.

    Prompts that went on changing would make the sums of older classes stale. The linear head only
    serves the training of the prompts.
    """

    Config: ClassVar[type[MethodConfig]] = CodaRanPACConfig
    variants = MappingProxyType({"coda-p-ranpac": {}})
    config: CodaRanPACConfig

    def wants_class_means(self, classes: tuple[int, ...]) -> bool:
        return False

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if self.components.trainable is None:
            self.head.close()

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.statistics(self.features(images, queries))

    def parameter_count(self) -> ParameterCount:
        prompts = sum(bank.frozen.numel() for bank in self.prompt_banks.values())
        return ParameterCount(prompts, self.statistics.sums.frozen.numel())

    def _learns_prompts(self, brief: TaskBrief) -> bool:
        """Once, and before there are sums that other features would not fit."""
        unused = not self.statistics.classes
        return unused and super()._learns_prompts(brief)

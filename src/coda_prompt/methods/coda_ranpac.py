"""CODA-P-RanPAC: CODA-Prompt's prompts, learned in the first task, with RanPAC's classifier.

Smith et al., CVPR 2023, https://arxiv.org/abs/2211.13218, and McDonnell et al., NeurIPS 2023,
https://arxiv.org/abs/2307.02251.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.errors import CannotEdit
from coda_prompt.methods.additive import drop_rows
from coda_prompt.methods.base import MethodConfig, ParameterCount, TaskBrief
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

    Config: ClassVar[type[MethodConfig]] = CodaRanPACConfig
    variants = MappingProxyType({"coda-p-ranpac": {}})
    imprints = False
    config: CodaRanPACConfig

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        if self.components.trainable is None:
            self.head.close()

    def drop_classes(self, rows: Sequence[int]) -> None:
        drop_rows((self.head.weight, self.head.bias), rows)
        super().drop_classes(rows)

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        drop_rows((self.head.weight, self.head.bias), [row for row in rows if row != into])
        super().unite_classes(rows, into)

    def absorb(self, other: CodaRanPAC, rows: Sequence[int]) -> None:
        raise CannotEdit(
            "each of these models has learned prompts of its own, and sums of "
            "differently prompted features do not add up"
        )

    @property
    def fixed_features(self) -> bool:
        return not self.in_task and len(self.task_sizes) > 0

    def scores(self, features: Tensor) -> Tensor:
        return self.statistics(features)

    def logits(self, images: Images, queries: Tensor | None = None) -> Tensor:
        return self.scores(self.features(images, queries))

    def parameter_count(self) -> ParameterCount:
        prompts = sum(bank.frozen.numel() for bank in self.prompt_banks.values())
        return ParameterCount(prompts, self.statistics.sums.frozen.numel())

    def _new_components(self, brief: TaskBrief) -> int:
        """Learn prompts only while the sums are empty."""
        return 0 if self.statistics.classes else super()._new_components(brief)

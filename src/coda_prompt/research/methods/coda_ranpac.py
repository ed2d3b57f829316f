"""CODA-P-RanPAC: RanPAC on a ViT with CODA-Prompt's prompts, which are learned in the first task.

Smith et al., CVPR 2023, https://arxiv.org/abs/2211.13218, and McDonnell et al., NeurIPS 2023,
https://arxiv.org/abs/2307.02251.
"""

from __future__ import annotations

from types import MappingProxyType

from pydantic.dataclasses import dataclass
from torch import Tensor

from coda_prompt.research.methods.base import Loss, ParameterCount, TaskBrief
from coda_prompt.research.methods.coda import CodaConfig, CodaPrompt
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.methods.ranpac import RanPAC, RanPACConfig
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.vit.vit import Images, ViT


@dataclass(frozen=True, config=STRICT)
class CodaRanPACConfig(CodaConfig, RanPACConfig):
    """Options of RanPAC with those of CODA-P's prompts."""


class CodaRanPAC(RanPAC):
    """CODA-P-RanPAC: prompts learned in the first task of several classes, RanPAC's classifier.

    The prompts are frozen afterwards, because changing them would invalidate the sums of older
    classes. The linear head is only used to train the prompts.
    """

    Config = CodaRanPACConfig
    variants = MappingProxyType(
        {f"coda-p-{name}": options for name, options in RanPAC.variants.items()}
    )
    closed_form = False
    loss_in_parts = True
    config: CodaRanPACConfig
    prompts: CodaPrompt
    """Trains the prompts. It is no module of its own: its banks are those of this method."""

    def __init__(self, backbone: ViT, config: CodaRanPACConfig) -> None:
        super().__init__(backbone, config)
        prompts = FirstTaskPrompts(backbone, config)
        object.__setattr__(self, "prompts", prompts)
        for name, module in prompts.named_children():
            setattr(self, name, module)
        self.needs_queries, self.first_block = True, prompts.first_block

    def begin_task(self, brief: TaskBrief) -> None:
        self.prompts.name = self.name
        self.prompts.begin_task(brief)
        self.in_task = True
        self.grow_statistics(brief)
        if self.prompts.components.trainable is None:
            self.prompts.head.close()

    def end_task(self) -> None:
        self.prompts.end_task()
        super().end_task()

    def queries(self, images: Images) -> Tensor:
        return self.prompts.queries(images)

    @property
    def plain_queries(self) -> bool:
        return self.prompts.plain_queries

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        if queries is None:
            images = self.backbone.start(images, self.prompts.first_block)
            queries = self.queries(images)
        prefixes = self.prompts.prefixes(queries)
        if self.config.features == "final":
            return self.backbone.features(images, prefixes)
        return self.backbone.pooled_features(images, self.config.last_blocks, prefixes)

    @property
    def fixed_features(self) -> bool:
        return not self.in_task and len(self.task_sizes) > 0

    def loss(self, batch: TrainingBatch) -> Loss:
        return self.prompts.loss(batch)

    def parameter_count(self) -> ParameterCount:
        prompts = sum(bank.frozen.numel() for bank in self.prompts.prompt_banks.values())
        return ParameterCount(prompts, self.statistics.sums.frozen.numel())

    def _is_consistent(self) -> bool:
        return super()._is_consistent() and self.prompts._is_consistent()


class FirstTaskPrompts(CodaPrompt):
    """Prompts that are learned while there are no earlier classes."""

    imprints = False

    def _new_components(self, brief: TaskBrief) -> int:
        earlier = self.classes_seen - int(self.task_sizes.frozen[-1])
        return 0 if earlier else super()._new_components(brief)

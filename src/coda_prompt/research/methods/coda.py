"""CODA-Prompt: Continual Decomposed Attention-based Prompting.

Smith et al., CVPR 2023, https://arxiv.org/abs/2211.13218. Three published forms differ in how
components are initialised and kept orthogonal; each is a preset:

- `paper`: all components orthonormal from the start, 0.1 times the Frobenius norm of eq. 6;
- `release-2022`: the same start, 1e-7 times the mean square;
- `release-2023` (default): new components orthogonal to all older ones at each task, no penalty.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import BadOption
from coda_prompt.research.methods import orthogonal
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import (
    MethodConfig,
    PromptConfig,
    PromptMethod,
    TaskBrief,
)
from coda_prompt.research.methods.frozen_cache import FrozenCache
from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import Prefixes, ViT

log = logging.getLogger(__name__)

Initialisation = Literal["all-at-once", "task-by-task", "uniform"]
Penalty = Literal["frobenius", "mean-square"]

PRESETS: MappingProxyType[str, tuple[Initialisation, Penalty, float]] = MappingProxyType(
    {
        "paper": ("all-at-once", "frobenius", 0.1),
        "release-2022": ("all-at-once", "mean-square", 1e-6 * 0.1),
        "release-2023": ("task-by-task", "mean-square", 0.0),
    }
)
PENALTIES = MappingProxyType(
    {"frobenius": orthogonal.frobenius_penalty, "mean-square": orthogonal.mean_square_penalty}
)
EPSILON = 1e-12


@dataclass(frozen=True, config=STRICT)
class CodaConfig(PromptConfig):
    """Options of CODA-P."""

    components: int = Field(default=100, ge=1)
    """Components per block in all, divided among `tasks`; the first tasks get the remainder."""
    tasks: int | None = Field(default=None, ge=1)
    """Number of tasks that share `components`; None: open-ended, `components_per_task` each."""
    components_per_task: int | None = Field(default=None, ge=1)
    """Components a task adds where the number of tasks is unknown or exceeded; None: a tenth of
    `components`, as with the paper's ten tasks."""
    length: int = Field(default=8, ge=1)
    """Rows of a prompt; half go to the keys, half to the values."""
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Prompted blocks, counted from 0."""
    preset: Literal["paper", "release-2022", "release-2023"] = "release-2023"
    """The published form: how components are initialised and kept orthogonal."""
    orthogonality_weight: float | None = Field(default=None, ge=0)
    """Weight of the orthogonality penalty (lambda); None: the preset's."""
    attention: bool = True
    """Ablation: without, weights are cos(q, K)."""
    freezing: bool = True
    """Ablation: without, older components keep training."""
    orthogonality: bool = True
    """Ablation: without, no penalty and components start uniform in [0, 1)."""


def component_weights(queries: Tensor, keys: Tensor, attention: Tensor | None = None) -> Tensor:
    """alpha = cos(q * A, K) (eq. 5), blocks x B x M, for queries B x D.

    q * A needs no B x M x D tensor: cos(q * A_m, K_m) = q.(A_m * K_m/|K_m|) / sqrt(q^2 . A_m^2).
    Without attention vectors alpha = cos(q, K) (eq. 4).
    """
    with full_precision(queries.device):  # a cosine in half precision is noise
        queries, keys = queries.to(keys.dtype), F.normalize(keys, dim=-1, eps=EPSILON)
        if attention is None:
            return F.normalize(queries, dim=-1, eps=EPSILON) @ keys.mT
        # Clamped before the root, which has no gradient at 0.
        lengths = (queries.square() @ attention.square().mT).clamp_min(EPSILON**2).sqrt()
        return queries @ (attention * keys).mT / lengths


class CodaPrompt(PromptMethod):
    """CODA-P: prompts are sums of components, weighted by attended key-query similarity.

    The two halves of a prompt are prefixes of a block's keys and values. Banks stack the tensors of
    all prompted blocks: blocks x components x ...
    """

    Config: ClassVar[type[MethodConfig]] = CodaConfig
    variants = MappingProxyType({"coda-p": {}, "coda-p-s": {"components": 20, "length": 4}})
    config: CodaConfig

    def prefixes(self, queries: Tensor, blocks: slice = slice(None)) -> Prefixes:
        """The halves of p = sum_m alpha_m P_m (eq. 3), over frozen and open components.

        Args:
            queries: B x D.
            blocks: Positions among the prompted blocks; default: all of them.
        """
        sums = [  # blocks x B x LD
            component_weights(queries, *vectors) @ components.flatten(2)
            for components, *vectors in self.rows_of(blocks)
        ]
        if not sums:
            return {}
        prompts = sum(sums[1:], sums[0]).unflatten(2, (self.config.length, -1))
        keys, values = prompts.chunk(2, dim=2)  # each blocks x B x L/2 x D
        return dict(zip(self.blocks[blocks], zip(keys, values, strict=True), strict=True))

    def rows_of(self, blocks: slice = slice(None)) -> list[list[Tensor]]:
        """P, K and, if used, A of some blocks: of the frozen components, of the open ones."""
        banks = self.prompt_banks.values()
        frozen = [bank.frozen[blocks] for bank in banks if bank.frozen.shape[1]]
        opened = [bank.trainable[blocks] for bank in banks if bank.trainable is not None]
        return [rows for rows in (frozen, opened) if rows]

    def penalty(self) -> Tensor:
        """lambda (L(P) + L(K) + L(A)), L(B) = |B B^T - I| (eqs. 6 and 7)."""
        if not self._penalty_weight or self.components.trainable is None:
            return self.keys.frozen.new_zeros(())
        parts = [
            self._penalty(bank.frozen, bank.trainable, self._frozen_errors[name](bank.frozen))
            for name, bank in self.prompt_banks.items()
            if bank.trainable is not None
        ]
        return self._penalty_weight * torch.stack(parts).sum()

    # -- state, and how it grows

    def __init__(self, backbone: ViT, config: CodaConfig) -> None:
        super().__init__(backbone, config, {"blocks": "length"})
        initialisation, penalty, weight = _published_form(config)
        self._initialisation = initialisation if config.orthogonality else "uniform"
        self._penalty, self._penalty_weight = PENALTIES[penalty], weight * config.orthogonality
        blocks, width = len(config.blocks), backbone.config.width
        self.components = Bank((config.length, width), groups=blocks)  # P
        self.keys = Bank((width,), groups=blocks)  # K
        self.attention = Bank((width,), groups=blocks)  # A
        self.prompt_banks = {"components": self.components, "keys": self.keys}
        if config.attention:
            self.prompt_banks["attention"] = self.attention
        self.component_sizes = Bank(dtype=torch.int64)
        self._frozen_errors = {
            name: FrozenCache(orthogonal.gram_error) for name in self.prompt_banks
        }

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        count = self._new_components(brief)
        self.component_sizes.append([count])
        if not count:
            return
        learned, total, width = len(self.keys), self.config.components, self.vit_config.width
        if self._initialisation != "uniform" and learned <= width < learned + count:
            log.warning(
                "%d components in %d dimensions: new keys and attention vectors without an "
                "orthogonal direction left start as random unit vectors from now on",
                learned + count,
                width,
            )
        for name, bank in self.prompt_banks.items():
            older, generator = bank.frozen, brief.generator(name)
            if self._initialisation == "uniform":
                rows = orthogonal.uniform_rows(older, count, generator)
            elif self._initialisation == "all-at-once" and learned + count <= total:
                # One basis for all tasks, not keyed by the task; each takes its part.
                shared = keyed_generator(brief.seed, name)
                basis = orthogonal.orthonormal_rows(older[:, :0], total, shared)
                rows = basis[:, learned : learned + count].contiguous()
            else:
                rows = orthogonal.orthonormal_rows(older, count, generator)
            if self.config.freezing:
                bank.open(rows)
            else:
                bank.append(rows)
                bank.reopen()

    def _new_components(self, brief: TaskBrief) -> int:
        """The number of components a task adds; none if it has one class, which has no loss."""
        config, learned = self.config, int((self.component_sizes.rows > 0).sum())
        if len(brief.classes) < 2:
            return 0
        if config.tasks is None or learned >= config.tasks:
            return config.components_per_task or max(1, config.components // 10)
        share, remainder = divmod(config.components, config.tasks)
        return share + (learned < remainder)

    def _is_consistent(self) -> bool:
        rows = {len(bank) for bank in self.prompt_banks.values()}
        return super()._is_consistent() and rows == {int(self.component_sizes.rows.sum())}


def _published_form(config: CodaConfig) -> tuple[Initialisation, Penalty, float]:
    """How components are initialised, the penalty and its weight; checks the options of these."""
    initialisation, penalty, weight = PRESETS[config.preset]
    if initialisation == "all-at-once" and config.tasks is None:
        problem = (
            f"preset '{config.preset}' initialises all components together and needs the number of "
            "tasks; give it, or use preset 'release-2023'"
        )
        raise BadOption("CODA-P", "tasks", problem)
    if config.tasks is not None and config.components < config.tasks:
        problem = f"{config.components} components cannot be divided among {config.tasks} tasks"
        raise BadOption("CODA-P", "components", f"{problem}; use at least one per task")
    own_weight = config.orthogonality_weight
    return initialisation, penalty, weight if own_weight is None else own_weight

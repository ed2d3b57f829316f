"""CODA-P: prompts as sums of components, weighted by attended key-query similarity.

Three published forms differ in how components start and what keeps them orthogonal; each is a
preset (SPEC 3):

- `paper`: all components orthonormal from the start, 0.1 times the Frobenius norm of eq. 6;
- `release-2022`: the same start, 1e-7 times the mean square;
- `release-2023` (default): new components orthogonal to all older ones at each task, no penalty.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.errors import BadOption
from coda_prompt.methods.base import (
    MethodConfig,
    PromptConfig,
    PromptMethod,
    TaskBrief,
    full_precision,
    split_prompts,
)
from coda_prompt.methods.frozen_cache import FrozenCache
from coda_prompt.methods.options import STRICT, check_blocks, check_length
from coda_prompt.methods.orthogonal import (
    frobenius_penalty,
    gram_error,
    mean_square_penalty,
    orthonormal_rows,
    uniform_rows,
)
from coda_prompt.model.vit import Prefixes, ViT
from coda_prompt.seeding import keyed_generator

log = logging.getLogger(__name__)

Start = Literal["all-at-once", "task-by-task", "uniform"]
Penalty = Literal["frobenius", "mean-square"]

PRESETS: MappingProxyType[str, tuple[Start, Penalty, float]] = MappingProxyType(
    {
        "paper": ("all-at-once", "frobenius", 0.1),
        "release-2022": ("all-at-once", "mean-square", 1e-6 * 0.1),
        "release-2023": ("task-by-task", "mean-square", 0.0),
    }
)
SMALLEST = 1e-12
PENALTIES = MappingProxyType({"frobenius": frobenius_penalty, "mean-square": mean_square_penalty})


@dataclass(frozen=True, config=STRICT)
class CodaConfig(PromptConfig):
    """Options of CODA-P."""

    components: int = Field(default=100, ge=1)
    """Components per block in all, shared out over `tasks`; the remainder goes to the first."""
    tasks: int | None = Field(default=None, ge=1)
    """How many tasks share `components`; None: open-ended, `components_per_task` each."""
    components_per_task: int | None = Field(default=None, ge=1)
    """Components a task adds where the number of tasks is unknown or has been passed; None: a
    tenth of `components`, as with the paper's ten tasks."""
    length: int = Field(default=8, ge=1)
    """Rows of a prompt; half go to the keys, half to the values."""
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Prompted blocks, counted from 0."""
    preset: Literal["paper", "release-2022", "release-2023"] = "release-2023"
    """Which published form: how components start, and the penalty that keeps them orthogonal."""
    orthogonality_weight: float | None = Field(default=None, ge=0)
    """Weight of the orthogonality penalty (lambda); None: the preset's."""
    attention: bool = True
    """Ablation: without, weights are cos(q, K)."""
    freezing: bool = True
    """Ablation: without, older components keep training."""
    orthogonality: bool = True
    """Ablation: without, no penalty and components start uniform in [0, 1)."""


class CodaPrompt(PromptMethod):
    """CODA-P: prompts are sums of components, weighted by attended key-query similarity.

    Eqs. 3-7 of the paper. Tensors of all prompted blocks are stacked in the first axis.
    """

    Config: ClassVar[type[MethodConfig]] = CodaConfig
    variants = MappingProxyType({"coda-p": {}, "coda-p-s": {"components": 20, "length": 4}})
    grows: ClassVar[Mapping[str, int]] = {
        **PromptMethod.grows,
        "components": 1,
        "keys": 1,
        "attention": 1,
        "component_sizes": 0,
    }
    config: CodaConfig

    components: Tensor
    keys: Tensor
    attention: Tensor
    component_sizes: Tensor

    def __init__(self, backbone: ViT, config: CodaConfig) -> None:
        super().__init__(backbone, config, config.blocks)
        check_length("length", config.length)
        check_blocks("blocks", config.blocks, backbone)
        if not config.blocks:
            raise BadOption("CODA-P", "blocks", "prompts need at least one block")
        start, self._penalty_name, weight = PRESETS[config.preset]
        if start == "all-at-once" and config.tasks is None:
            raise BadOption(
                "CODA-P",
                "tasks",
                f"preset '{config.preset}' starts all components together and needs the number of "
                "tasks; give it, or use preset 'release-2023'",
            )
        if config.tasks is not None and config.components < config.tasks:
            raise BadOption(
                "CODA-P",
                "components",
                f"{config.components} components cannot be shared out over {config.tasks} tasks; "
                "use at least one per task",
            )
        if config.orthogonality_weight is not None:
            weight = config.orthogonality_weight
        self._start: Start = start if config.orthogonality else "uniform"
        self._penalty_weight = weight if config.orthogonality else 0.0
        self.kinds = ("components", "keys", "attention")[: 3 if config.attention else 2]
        blocks, width = len(config.blocks), backbone.config.width
        self.register_buffer("components", torch.zeros(blocks, 0, config.length, width))
        self.register_buffer("keys", torch.zeros(blocks, 0, width))
        self.register_buffer("attention", torch.zeros(blocks, 0, width))
        self.register_buffer("component_sizes", torch.zeros(0, dtype=torch.int64))
        self._folded = FrozenCache(folded)
        self._frozen_error = {kind: FrozenCache(gram_error) for kind in self.kinds}
        self.new_components: nn.Parameter | None = None
        self.new_keys: nn.Parameter | None = None
        self.new_attention: nn.Parameter | None = None

    # -- growth

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        count = self._next_count() if self._learns_prompts(brief) else 0
        self.component_sizes = torch.cat(
            [self.component_sizes, self.component_sizes.new_tensor([count])]
        )
        if not count:
            return
        self._say_where_crowded(count)
        for kind in self.kinds:
            held: Tensor = getattr(self, kind)
            new = self._start_rows(kind, held, count, brief)
            if not self.config.freezing:
                new = torch.cat([held, new], dim=1)
                setattr(self, kind, held[:, :0])
            setattr(self, f"new_{kind}", nn.Parameter(new))

    def end_task(self) -> None:
        for kind in self.kinds:
            new: nn.Parameter | None = getattr(self, f"new_{kind}")
            if new is not None:
                setattr(self, kind, torch.cat([getattr(self, kind), new.detach()], dim=1))
                setattr(self, f"new_{kind}", None)
        super().end_task()

    def _next_count(self) -> int:
        config, learned = self.config, int((self.component_sizes > 0).sum())
        if config.tasks is None or learned >= config.tasks:
            return config.components_per_task or max(1, config.components // 10)
        share, remainder = divmod(config.components, config.tasks)
        return share + (learned < remainder)

    def _start_rows(self, kind: str, held: Tensor, count: int, brief: TaskBrief) -> Tensor:
        """The first values of `count` new rows per block, in the shape of `held`."""
        learned = held.shape[1]
        if self._start == "uniform":
            return uniform_rows(held, count, brief.generator(kind))
        flat = held.flatten(2)
        if self._start == "all-at-once" and learned + count <= self.config.components:
            # Keyed by what all tasks have in common: each takes its part of one basis.
            common = keyed_generator(brief.seed, kind)
            rows = orthonormal_rows(flat[:, :0], self.config.components, common)
            rows = rows[:, learned : learned + count]
        else:
            rows = orthonormal_rows(flat, count, brief.generator(kind))
        return rows.unflatten(2, held.shape[2:]).contiguous()

    def _say_where_crowded(self, count: int) -> None:
        """One line when the first kind of vector runs out of orthogonal directions."""
        learned, width = self.keys.shape[1], self.keys.shape[2]
        if self._start != "uniform" and learned <= width < learned + count:
            log.warning(
                "%d components in %d dimensions: from now on new keys and attention vectors that "
                "find no orthogonal direction left start as random unit vectors",
                learned + count,
                width,
            )

    def _sizes_agree(self, state: Mapping[str, Tensor]) -> bool:
        counts = {state[kind].shape[1] for kind in self.kinds}
        counts.add(int(state["component_sizes"].sum()))
        return super()._sizes_agree(state) and len(counts) == 1

    # -- prompts

    def prefixes(self, queries: Tensor) -> Prefixes:
        """p = sum_m alpha_m P_m (eq. 3), the old components' part and the new ones'."""
        parts = []
        if self.components.shape[1]:
            attended = (self.keys, self.attention) if self.config.attention else (self.keys,)
            parts.append(_summed(queries, self._folded(*attended), self.components))
        if self.new_components is not None and self.new_keys is not None:
            parts.append(
                _summed(queries, folded(self.new_keys, self.new_attention), self.new_components)
            )
        if not parts:
            return {}
        prompts = parts[0] + parts[1] if len(parts) > 1 else parts[0]
        return {
            block: split_prompts(prompts[position])
            for position, block in enumerate(self.config.blocks)
        }

    def penalty(self) -> Tensor:
        if not self._penalty_weight or self.new_components is None:
            return super().penalty()
        measure = PENALTIES[self._penalty_name]
        parts = [
            measure(getattr(self, kind), getattr(self, f"new_{kind}"), error(getattr(self, kind)))
            for kind, error in self._frozen_error.items()
        ]
        return self._penalty_weight * torch.stack(parts).sum()


class FoldedKeys(NamedTuple):
    """Keys and attention vectors, in the two products that weights are made of."""

    matched: Tensor
    """blocks x M x D: A * K / |K|, or K / |K| without attention vectors."""
    squares: Tensor | None
    """blocks x M x D: A^2; None without attention vectors."""


def folded(keys: Tensor, attention: Tensor | None = None) -> FoldedKeys:
    with full_precision(keys.device):
        unit = F.normalize(keys, dim=-1, eps=SMALLEST)
        if attention is None:
            return FoldedKeys(unit, None)
        return FoldedKeys(attention * unit, attention.square())


def component_weights(queries: Tensor, keys: FoldedKeys) -> Tensor:
    """alpha = cos(q * A, K) (eq. 5), blocks x B x M, for queries B x D.

    q * A needs no B x M x D tensor: cos(q * A_m, K_m) = q.(A_m * K_m/|K_m|) / sqrt(q^2 . A_m^2).
    Without attention vectors alpha = cos(q, K) (eq. 4).
    """
    with full_precision(queries.device):  # a cosine in half precision is noise
        queries = queries.to(keys.matched.dtype)
        if keys.squares is None:
            return F.normalize(queries, dim=-1, eps=SMALLEST) @ keys.matched.mT
        squared_length = queries.square() @ keys.squares.mT
        return queries @ keys.matched.mT / squared_length.clamp_min(SMALLEST**2).sqrt()


def _summed(queries: Tensor, keys: FoldedKeys, components: Tensor) -> Tensor:
    """blocks x B x L x D."""
    weights = component_weights(queries, keys)
    return (weights @ components.flatten(2)).unflatten(2, components.shape[2:])

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
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from coda_prompt.errors import BadOption
from coda_prompt.methods.bank import Bank
from coda_prompt.methods.base import (
    MethodConfig,
    PromptConfig,
    PromptMethod,
    TaskBrief,
    full_precision,
    split_prompts,
)
from coda_prompt.methods.frozen_cache import FrozenCache
from coda_prompt.methods.options import STRICT
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

Initialisation = Literal["all-at-once", "task-by-task", "uniform"]
Penalty = Literal["frobenius", "mean-square"]

PRESETS: MappingProxyType[str, tuple[Initialisation, Penalty, float]] = MappingProxyType(
    {
        "paper": ("all-at-once", "frobenius", 0.1),
        "release-2022": ("all-at-once", "mean-square", 1e-6 * 0.1),
        "release-2023": ("task-by-task", "mean-square", 0.0),
    }
)
PENALTIES = MappingProxyType({"frobenius": frobenius_penalty, "mean-square": mean_square_penalty})
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


class CodaPrompt(PromptMethod):
    """CODA-P: prompts are sums of components, weighted by attended key-query similarity.

    For the query q of an image, each prompted block computes

        alpha_m = cos(q * A_m, K_m)     (eq. 5)
        p       = sum_m alpha_m P_m     (eq. 3)

    and uses the two halves of p as prefixes of its keys and values. Banks stack the tensors of all
    prompted blocks: blocks x components x ...
    """

    Config: ClassVar[type[MethodConfig]] = CodaConfig
    variants = MappingProxyType({"coda-p": {}, "coda-p-s": {"components": 20, "length": 4}})
    config: CodaConfig

    def __init__(self, backbone: ViT, config: CodaConfig) -> None:
        super().__init__(backbone, config, {"blocks": "length"})
        initialisation, penalty, weight = PRESETS[config.preset]
        if initialisation == "all-at-once" and config.tasks is None:
            raise BadOption(
                "CODA-P",
                "tasks",
                f"preset '{config.preset}' initialises all components together and needs the "
                "number of tasks; give it, or use preset 'release-2023'",
            )
        if config.tasks is not None and config.components < config.tasks:
            raise BadOption(
                "CODA-P",
                "components",
                f"{config.components} components cannot be divided among {config.tasks} tasks; "
                "use at least one per task",
            )
        if config.orthogonality_weight is not None:
            weight = config.orthogonality_weight
        self._initialisation = initialisation if config.orthogonality else "uniform"
        self._penalty, self._penalty_weight = PENALTIES[penalty], weight * config.orthogonality
        blocks, width = len(config.blocks), backbone.config.width
        self.components = Bank((config.length, width), groups=blocks)  # P
        self.keys = Bank((width,), groups=blocks)  # K
        self.attention = Bank((width,), groups=blocks)  # A
        self.component_sizes = Bank(dtype=torch.int64)
        self._frozen_products = FrozenCache(key_products)
        self._frozen_errors = {name: FrozenCache(gram_error) for name in self.prompt_banks}

    @property
    def prompt_banks(self) -> dict[str, Bank]:
        """The banks that grow by one row per component."""
        banks = {"components": self.components, "keys": self.keys}
        return banks | {"attention": self.attention} if self.config.attention else banks

    # -- equations 3 to 7

    def prefixes(self, queries: Tensor) -> Prefixes:
        """Key and value prefixes of every prompted block (eq. 3), frozen and open components."""
        attended = (self.keys, self.attention) if self.config.attention else (self.keys,)
        parts = []
        if self.components.frozen.shape[1]:
            products = self._frozen_products(*(bank.frozen for bank in attended))
            parts.append(weighted_sum(queries, products, self.components.frozen))
        keys, attention = self.keys.trainable, self.attention.trainable
        if self.components.trainable is not None and keys is not None:
            products = key_products(keys, attention)
            parts.append(weighted_sum(queries, products, self.components.trainable))
        if not parts:
            return {}
        prompts = sum(parts[1:], parts[0])  # blocks x B x L x D
        return {
            block: split_prompts(prompt) for block, prompt in zip(self.blocks, prompts, strict=True)
        }

    def penalty(self) -> Tensor:
        """lambda (L(P) + L(K) + L(A)), L(B) = |B B^T - I| (eqs. 6 and 7)."""
        if not self._penalty_weight or self.components.trainable is None:
            return super().penalty()
        parts = [
            self._penalty(bank.frozen, bank.trainable, self._frozen_errors[name](bank.frozen))
            for name, bank in self.prompt_banks.items()
            if bank.trainable is not None
        ]
        return self._penalty_weight * torch.stack(parts).sum()

    # -- growth

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        count = self._next_count() if self._learns_prompts(brief) else 0
        self.component_sizes.append([count])
        if not count:
            return
        self._warn_if_crowded(count)
        for name, bank in self.prompt_banks.items():
            rows = self._initial_rows(name, bank.frozen, count, brief)
            if self.config.freezing:
                bank.open(rows)
            else:
                bank.append(rows)
                bank.reopen()

    def _next_count(self) -> int:
        config, learned = self.config, int((self.component_sizes.rows > 0).sum())
        if config.tasks is None or learned >= config.tasks:
            return config.components_per_task or max(1, config.components // 10)
        share, remainder = divmod(config.components, config.tasks)
        return share + (learned < remainder)

    def _initial_rows(self, name: str, older: Tensor, count: int, brief: TaskBrief) -> Tensor:
        """The initial values of `count` new rows per block, in the shape of `older`."""
        learned = older.shape[1]
        if self._initialisation == "uniform":
            return uniform_rows(older, count, brief.generator(name))
        flat = older.flatten(2)
        if self._initialisation == "all-at-once" and learned + count <= self.config.components:
            # Not keyed by the task: each task takes its part of one basis.
            shared = keyed_generator(brief.seed, name)
            rows = orthonormal_rows(flat[:, :0], self.config.components, shared)
            rows = rows[:, learned : learned + count]
        else:
            rows = orthonormal_rows(flat, count, brief.generator(name))
        return rows.unflatten(2, older.shape[2:]).contiguous()

    def _warn_if_crowded(self, count: int) -> None:
        """Warn once, when keys run out of orthogonal directions."""
        learned, width = len(self.keys), self.keys.frozen.shape[2]
        if self._initialisation != "uniform" and learned <= width < learned + count:
            log.warning(
                "%d components in %d dimensions: new keys and attention vectors without an "
                "orthogonal direction left start as random unit vectors from now on",
                learned + count,
                width,
            )

    def _is_consistent(self) -> bool:
        rows = {len(bank) for bank in self.prompt_banks.values()}
        return super()._is_consistent() and rows == {int(self.component_sizes.rows.sum())}


class KeyProducts(NamedTuple):
    """Keys and attention vectors, combined as eq. 5 needs them."""

    unit_keys: Tensor
    """blocks x M x D: A * K / |K|, or K / |K| without attention vectors."""
    squares: Tensor | None
    """blocks x M x D: A^2; None without attention vectors."""


def key_products(keys: Tensor, attention: Tensor | None = None) -> KeyProducts:
    with full_precision(keys.device):
        unit = F.normalize(keys, dim=-1, eps=EPSILON)
        if attention is None:
            return KeyProducts(unit, None)
        return KeyProducts(attention * unit, attention.square())


def component_weights(queries: Tensor, keys: KeyProducts) -> Tensor:
    """alpha = cos(q * A, K) (eq. 5), blocks x B x M, for queries B x D.

    q * A needs no B x M x D tensor: cos(q * A_m, K_m) = q.(A_m * K_m/|K_m|) / sqrt(q^2 . A_m^2).
    Without attention vectors alpha = cos(q, K) (eq. 4).
    """
    with full_precision(queries.device):  # a cosine in half precision is noise
        queries = queries.to(keys.unit_keys.dtype)
        if keys.squares is None:
            return F.normalize(queries, dim=-1, eps=EPSILON) @ keys.unit_keys.mT
        squared_length = queries.square() @ keys.squares.mT
        # Clamped before the root, which has no gradient at 0.
        return queries @ keys.unit_keys.mT / squared_length.clamp_min(EPSILON**2).sqrt()


def weighted_sum(queries: Tensor, keys: KeyProducts, components: Tensor) -> Tensor:
    """p = sum_m alpha_m P_m (eq. 3), blocks x B x L x D."""
    weights = component_weights(queries, keys)
    return (weights @ components.flatten(2)).unflatten(2, components.shape[2:])

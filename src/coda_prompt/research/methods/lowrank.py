"""Low-rank changes B A of linear maps in every block, which grow by task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from coda_prompt.errors import BadOption
from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.base import Loss, TrainedMethod
from coda_prompt.research.methods.stages import TrainingBatch
from coda_prompt.research.vit.linear import full_precision
from coda_prompt.research.vit.vit import NO_EDITS, BlockEdits, Images, LowRank, ViT, ViTConfig

Target = Literal["q", "k", "v", "fc1", "fc2"]


class LowRankDelta(nn.Module):
    """Changes of linear maps in all blocks, W + B A; each task adds rows to A and columns to B.

    `down` has the rows of A and `up` the columns of B, each blocks x rank x width: the rows of
    several tasks one after another give the sum of their products B_i A_i.

    Args:
        config: The ViT to change.
        targets: The linear maps.
        shared_down: One A for all targets instead of one each.
    """

    def __init__(
        self, config: ViTConfig, targets: Sequence[Target], *, shared_down: bool = False
    ) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_width
        inputs: dict[str, int] = {each: hidden if each == "fc2" else width for each in targets}
        outputs = {each: hidden if each == "fc1" else width for each in targets}
        if shared_down:
            inputs = {"shared": inputs[targets[0]]}
        self.shared_down = shared_down
        self.down = nn.ModuleDict(
            {name: Bank((width,), groups=config.depth) for name, width in inputs.items()}
        )
        self.up = nn.ModuleDict(
            {name: Bank((width,), groups=config.depth) for name, width in outputs.items()}
        )

    def __len__(self) -> int:
        """The rank of all tasks together."""
        return len(self.banks()[-1])

    def banks(self) -> list[Bank]:
        """All banks, those of A first."""
        modules = (*self.down.values(), *self.up.values())
        return [bank for bank in modules if isinstance(bank, Bank)]

    def open_down(self, rank: int, generator: torch.Generator) -> None:
        """Open rows of A, uniform within 1/sqrt(inputs) (Kaiming with a = sqrt 5)."""
        for bank in self.down.values():
            assert isinstance(bank, Bank)
            blocks, _, inputs = bank.frozen.shape
            rows = torch.empty(blocks, rank, inputs).uniform_(-1, 1, generator=generator)
            bank.open(rows / inputs**0.5)

    def open_up(self, rank: int) -> None:
        """Open columns of B at zero, so that the ViT is unchanged."""
        for bank in self.up.values():
            assert isinstance(bank, Bank)
            blocks, _, outputs = bank.frozen.shape
            bank.open(torch.zeros(blocks, rank, outputs))

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and the transpose of B of each target, each blocks x rank x width."""
        factors = {}
        for target, up in self.up.items():
            down = self.down["shared" if self.shared_down else target]
            assert isinstance(down, Bank)
            assert isinstance(up, Bank)
            factors[target] = (down.rows, up.rows)
        return factors


def edits_of(factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[int, BlockEdits]:
    """The edits of all blocks that add the products of `LowRankDelta.factors`."""
    blocks = max((len(down) for down, _ in factors.values() if down.shape[1]), default=0)
    return {
        block: BlockEdits(
            deltas={
                target: LowRank(down[block], up[block].T)  # type: ignore[misc]
                for target, (down, up) in factors.items()
            }
        )
        for block in range(blocks)
    }


class LowRankMethod(TrainedMethod):
    """Base of methods with low-rank changes of a frozen ViT, trained with the masked loss."""

    loss_in_parts = True

    @abstractmethod
    def edits(self) -> dict[int, BlockEdits]:
        """The low-rank changes of each block; `ViT.merge` adds them to the weights."""

    def features(self, images: Images, queries: Tensor | None) -> Tensor:
        return self.backbone.features(images, self.edits())

    def loss(self, batch: TrainingBatch) -> Loss:
        assert batch.images is not None
        return Loss.of(self.head.masked_loss(self.features(batch.images, None), batch.labels))


def check_rank(owner: str, rank: int, width: int) -> None:
    """Refuse a rank above the width of the ViT.

    Raises:
        BadOption: It is larger.
    """
    if rank > width:
        raise BadOption(owner, "rank", f"{rank} is more than the width of the ViT, {width}")


def attention_moments(
    vit: ViT, batches: Iterator[TrainingBatch], edits: Mapping[int, BlockEdits]
) -> list[Tensor]:
    """Compute E[x x^T] over the tokens x that enter the attention of each block.

    Args:
        vit: The frozen ViT.
        batches: The images.
        edits: What is changed in the blocks.

    Returns:
        D x D in float64 on the CPU, for each block.
    """
    weight = vit.norm.weight
    sums = [torch.zeros(len(weight), len(weight), dtype=torch.float64) for _ in vit.blocks]
    counts = [0] * len(sums)

    def add(block: int, tokens: Tensor) -> None:
        with full_precision(tokens.device):
            rows = tokens.flatten(0, 1).to(weight.dtype)
            sums[block] += (rows.T @ rows).cpu().double()
        counts[block] += len(rows)

    taps = {
        block: replace(edits.get(block, NO_EDITS), tap=partial(add, block))
        for block in range(len(sums))
    }
    for batch in batches:
        assert batch.images is not None
        vit.features(batch.images, taps)
    return [total / count for total, count in zip(sums, counts, strict=True)]

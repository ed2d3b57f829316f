"""Training stages of a task, and the batches that a method's loss receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from coda_prompt.research.vit.vit import Images


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate and weight decay of their own."""

    parameters: Sequence[nn.Parameter]
    learning_rate: float | None = None
    """None: the stage's."""
    factor: float = 1.0
    """Multiplies the learning rate."""
    weight_decay: float | None = None
    """None: the stage's."""


@dataclass(frozen=True)
class Stage:
    """One training of a task. None means: as the training settings (`Training`) say."""

    name: str = "train"
    groups: Sequence[ParameterGroup] = ()
    """What trains; empty: all trainable parameters."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: float = 0.9
    """Of SGD."""
    learning_rate: float | None = None
    weight_decay: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    schedule: Literal["cosine", "lagging-cosine", "annealing", "drop", "constant"] | None = None
    """`annealing`: half a cosine wave over the stage; `drop`: two values, one after the other."""
    final_factor: float = 0.0
    """Where `annealing` and `drop` end, as a share of the learning rate."""
    drop_at: float = 1.0
    """When `drop` changes the learning rate, as a share of the epochs."""
    per_iteration: bool = False
    """Change the learning rate at every step instead of every epoch."""
    data: Literal["augmented", "plain", "features", "generated"] = "augmented"
    """Images augmented or not; features computed once, when the stage begins, so that they must
    not depend on what trains; or what `Method.generate` returns in every epoch, after `fit`."""
    clip_norm: float | None = None
    """Largest norm of the gradient of all parameters."""


class TrainingBatch(NamedTuple):
    """What `Method.loss` receives."""

    images: Images | None
    """B x C x H x W, or the same batch at a later block; None in stages without images."""
    labels: Tensor
    queries: Tensor | None = None
    """B x D, for methods that need queries."""
    features: Tensor | None = None
    """B x D, in stages on features or generated samples."""
    stage: str = "train"
    """The name of the stage."""

"""What a training is told, and what it tells."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from coda_prompt.methods.options import STRICT
from coda_prompt.training.queries import QueryMode
from coda_prompt.training.schedule import Schedule

Matrix = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, lt=1)]


@pydantic_dataclass(frozen=True, config=STRICT)
class Training:
    """How a task is trained. The defaults are the paper's."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=128, ge=1)
    """Images a step, over all processes."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Images a process holds at once; smaller ones accumulate to the same step."""
    learning_rate: float | None = Field(default=None, gt=0, le=1000)
    """None: what the paper trains the method's family with."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    schedule: Schedule = "cosine"
    queries: QueryMode = "exact"
    """Of each image as it is seen, or of the un-augmented image, computed once."""
    views: int | None = Field(default=None, ge=1)
    """Augmented views of an image; their exact queries are remembered. None: new ones for ever."""
    query_memory: int = Field(default=1024, ge=0)
    """Megabytes of remembered queries; more lie in temporary files."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a
    third more time."""
    seed: int = Field(default=0, ge=0)
    """The trial's: class order, splits, initial values, shuffling and augmentation follow."""
    workers: int = Field(default=0, ge=0, le=256)
    """Processes that decode images, for each training process."""


@dataclass(frozen=True)
class Event:
    """What the engine tells of its progress. Counts start at 0."""

    kind: Literal["task", "step", "epoch", "pass", "evaluation"]
    """`pass`: a batch that is looked at without training."""
    task: int
    tasks: int
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0
    loss: float = math.nan
    learning_rate: float = math.nan
    accuracies: tuple[float, ...] = ()
    """After an evaluation: of each task learned so far."""


@dataclass
class Result:
    """What a stream's run measured; every metric follows from the matrices."""

    matrix: Matrix
    """R[t, j]: accuracy on task j after task t over all classes seen by then; NaN elsewhere."""
    own_classes: Matrix
    """The same among the classes of task j only."""
    test_images: list[int]
    losses: list[list[float]] = field(default_factory=list)
    """Per task, the mean loss of each epoch."""

    @classmethod
    def empty(cls, test_images: list[int]) -> Result:
        shape = (len(test_images), len(test_images))
        return cls(np.full(shape, np.nan), np.full(shape, np.nan), test_images)

"""Training settings, events and results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from coda_prompt.research.methods.options import STRICT
from coda_prompt.research.training.schedule import Schedule

QueryMode = Literal["exact", "cached"]
Matrix = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, lt=1)]


@pydantic_dataclass(frozen=True, config=STRICT)
class Training:
    """Training settings of a task. The defaults are those of the CODA-Prompt paper."""

    epochs: int = Field(default=20, ge=1)
    """Number of epochs per task."""
    batch_size: int = Field(default=128, ge=1)
    """Images per optimizer step, over all processes."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Images per forward pass of a process; smaller values accumulate gradients to the same step.
    Default: its share of the batch; on a CPU, where the method allows it, each core computes a part
    of at most 16 images at a time."""
    learning_rate: float | None = Field(default=None, gt=0, le=1000)
    """Initial learning rate. Default: the paper's value for the method."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Coefficients of the running averages of Adam and AdamW."""
    schedule: Schedule = "cosine"
    """Learning rate schedule: `cosine` as in the paper, or `lagging-cosine`, one epoch later, as in
    the released code."""
    queries: QueryMode = "exact"
    """`exact`: query of each augmented image. `cached`: query of the un-augmented image, computed
    once per task."""
    views: int | None = Field(default=None, ge=1)
    """Number of augmented views per image; their queries are cached. Default: a new view every
    epoch."""
    recompute: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, about a
    third more time."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the trial: class order, splits, initialisation, shuffling and augmentation."""
    workers: int = Field(default=0, ge=0, le=256)
    """Number of processes that decode images, per training process."""


@dataclass(frozen=True)
class Event:
    """Progress event of the engine. Task, epoch and step numbers start at 0."""

    kind: Literal["task", "step", "epoch", "pass", "evaluation"]
    """`pass`: progress of a pass over the data without training."""
    task: int
    tasks: int
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0
    loss: float = math.nan
    learning_rate: float = math.nan
    accuracies: tuple[float, ...] = ()
    """Accuracy on each task learned so far; only for `evaluation`."""


@dataclass
class Result:
    """Results of a run over a stream; all metrics are computed from the matrices."""

    matrix: Matrix
    """R[t, j]: accuracy on test group j after task t, over all classes seen then and on images of
    these; NaN if not measured. By default the test groups are those of the tasks."""
    own_classes: Matrix
    """As `matrix`, with predictions restricted to the classes of group j."""
    test_images: list[int]
    """Number of test images of each group."""
    anytime: Matrix
    """Accuracy on all test images of the classes seen so far, after each task; NaN if not
    measured."""
    losses: list[list[float]] = field(default_factory=list)
    """Mean loss of each epoch, per task."""
    domains: dict[str, float] = field(default_factory=dict)
    """The same after the last measured task, by domain."""

    @classmethod
    def empty(cls, test_images: list[int], tasks: int | None = None) -> Result:
        """Make a result without measurements; `tasks` is the number of groups by default."""
        rows = len(test_images) if tasks is None else tasks
        matrix, own_classes = np.full((2, rows, len(test_images)), np.nan)
        return cls(matrix, own_classes, test_images, np.full(rows, np.nan))

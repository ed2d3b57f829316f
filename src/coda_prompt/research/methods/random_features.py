"""Linear classifiers on random ReLU features of frozen features: what RanPAC and LoRanPAC share."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank, ClassRows
from coda_prompt.research.methods.base import Method, TaskBrief
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.vit.linear import full_precision


class RandomFeatures(ClassRows, nn.Module):
    """Class sums of h = ReLU(f W) and a linear classifier of h, solved in `fit`.

    Args:
        width: Length of f.
        projected: Length of h.
    """

    seed: Tensor
    projection_shape: tuple[int, int]
    """Of W."""

    def __init__(self, width: int, projected: int) -> None:
        super().__init__()
        self.width, self.projected = width, projected
        self.projection_shape = (width, projected)
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.sums, self.weight = Bank(groups=projected), Bank(groups=projected)
        self.counts = Bank(dtype=torch.int64)
        self.class_banks = (self.sums, self.weight, self.counts)
        self._projection: tuple[int, Tensor] | None = None

    @property
    def classes(self) -> int:
        return len(self.sums)

    @abstractmethod
    def fit(self, features: Tensor, labels: Tensor, task: int) -> None:
        """Add the images of a task and solve for the weights again."""

    def forward(self, features: Tensor) -> Tensor:
        """Compute the scores, B x classes."""
        hidden = self.hidden(features)
        with full_precision(features.device):
            return hidden @ self.weight.frozen

    def hidden(self, features: Tensor) -> Tensor:
        """Compute h = ReLU(f W), n x projected."""
        with full_precision(features.device):
            features = features.to(self.weight.frozen.dtype)
            return F.relu(features @ self.projection(features))

    def projection(self, like: Tensor) -> Tensor:
        """Return W, drawn from its seed instead of stored; NumPy's RandomState never changes."""
        cached = self._projection
        if cached is not None and torch.compiler.is_exporting():
            return cached[1]  # an exported graph cannot read the value of the seed
        seed = int(self.seed)
        if cached is None or cached[0] != seed or cached[1].device != like.device:
            values = np.random.RandomState(seed).standard_normal(self.projection_shape)
            values = values.astype(np.float32)
            cached = self._projection = (seed, torch.from_numpy(values).to(like.device))
        return cached[1].to(like.dtype)


class RandomFeatureMethod(Method):
    """Mixin that classifies with `statistics`; list it before the method family in the bases."""

    fits = True
    statistics: RandomFeatures

    def begin_task(self, brief: TaskBrief) -> None:
        super().begin_task(brief)
        self.grow_statistics(brief)

    def grow_statistics(self, brief: TaskBrief) -> None:
        """Make room for the new classes of a task; the first one sets the seed."""
        statistics = self.statistics
        if not statistics.classes:
            seed = keyed_generator(brief.seed, "projection").initial_seed() % 2**32
            statistics.seed = statistics.seed.new_tensor(seed)
        statistics.grow(self.classes_seen)

    def fit(self, features: Tensor, queries: Tensor | None, labels: Tensor) -> None:
        self.statistics.fit(features, labels, len(self.task_sizes))

    def _is_consistent(self) -> bool:
        is_seed = 0 <= int(self.statistics.seed) < 2**32
        fits = self.statistics.is_consistent(self.classes_seen)
        return super()._is_consistent() and is_seed and fits


def default_projected(width: int) -> int:
    """The default number of random features: 16 per backbone feature, at most 10,000."""
    return min(10_000, 16 * width)

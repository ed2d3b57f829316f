"""State that adds up over images: classes can be dropped, united, and joined with another model's.

`AdditiveState` is the protocol. A closed-form method implements it by `AdditiveMethod`, whose
`statistics_parts` hold the sums; statistics beside a method (`FeatureMoments`) implement it too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from coda_prompt.errors import BadOption, CannotEdit
from coda_prompt.research.methods.bank import Bank, other_rows
from coda_prompt.research.methods.base import Method


class AdditiveState(Protocol):
    """Sums over images, with one row for each class."""

    def drop_classes(self, rows: Sequence[int]) -> None:
        """Remove classes; later classes move up. Shared sums lose what can be told apart."""

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        """Add up the classes at `rows` in row `into`, one of them, and remove the others."""

    def absorb(self, other: Any, rows: Sequence[int]) -> None:
        """Add the sums of another state; `rows[k]` is the row here of its class k."""

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        """Move images from the class in row `source` to the classes in rows `labels`."""


class AdditiveMethod(Method):
    """Mixin of methods whose learned state is sums; list it before the method family."""

    removable_option: ClassVar[tuple[str, Any] | None] = None
    """The option and its value with which nothing of a dropped class remains; an empty name: it is
    always so; None: it is never so."""

    @abstractmethod
    def statistics_parts(self) -> Sequence[AdditiveState]:
        """The sums; everything else that is learned follows from them."""

    @abstractmethod
    def solve(self) -> None:
        """Compute from the sums what is needed to classify."""

    def drop_classes(self, rows: Sequence[int]) -> None:
        for part in self.statistics_parts():
            part.drop_classes(rows)
        self._drop_rows(rows)
        self.solve()

    def unite_classes(self, rows: Sequence[int], into: int) -> None:
        for part in self.statistics_parts():
            part.unite_classes(rows, into)
        self._drop_rows([row for row in rows if row != into])
        self.solve()

    def absorb(self, other: Any, rows: Sequence[int]) -> None:
        """Add the sums of another method of this kind; its tasks follow those learned here.

        Raises:
            CannotEdit: The sums are of different features.
        """
        if type(other) is not type(self) or other.config != self.config:
            raise CannotEdit("the models were made with different methods or options")
        sizes, first = other.task_sizes.frozen.tolist(), 0
        known = self.classes_seen
        for part, others in zip(self.statistics_parts(), other.statistics_parts(), strict=True):
            part.absorb(others, rows)
        for size in sizes:
            new = [row for row in rows[first : first + size] if row >= known]
            self.task_sizes.append([len(new)])
            first += size
        self.solve()

    def move_images(self, features: Tensor, source: int, labels: Tensor) -> None:
        for part in self.statistics_parts():
            part.move_images(features, source, labels)
        self.solve()

    def _drop_rows(self, rows: Sequence[int]) -> None:
        """Count the removed classes out of the tasks that introduced them."""
        sizes = self.task_sizes.frozen
        tasks = torch.arange(len(sizes)).repeat_interleave(sizes.cpu())
        removed = torch.bincount(tasks[list(rows)], minlength=len(sizes))
        self.task_sizes.frozen = sizes - removed.to(sizes)


def removable_options(method: type[Method], options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the option `removable` by what it means for a method.

    Raises:
        BadOption: The method cannot forget a class without a trace.
    """
    others = {name: value for name, value in options.items() if name != "removable"}
    option = method.removable_option if issubclass(method, AdditiveMethod) else None
    if options.get("removable") is not True:
        return dict(options) if option and option[0] == "removable" else others
    if option is None:
        problem = "only ranpac, slda and ncm can forget a class without a trace"
        raise BadOption("the classifier", "removable", problem)
    return {**others, option[0]: option[1]} if option[0] else others


def is_removable(method: Method) -> bool:
    """Return whether nothing of a class remains in the sums when it is dropped."""
    option = method.removable_option if isinstance(method, AdditiveMethod) else None
    return option is not None and (not option[0] or getattr(method.config, option[0]) == option[1])


def move_sums(sums: Bank, counts: Bank, features: Tensor, source: int, labels: Tensor) -> None:
    """Move images from the sum and the count of row `source` to those of the rows `labels`."""
    axis, sources = sums.axis, torch.full_like(labels, source)
    values = features.to(sums.frozen).movedim(0, axis)
    without = sums.frozen.index_add(axis, sources, values, alpha=-1)
    sums.frozen = without.index_add(axis, labels, values)
    moved = torch.bincount(labels, minlength=len(counts))
    moved[source] -= len(labels)
    counts.frozen = counts.frozen + moved


def without_classes(total: Tensor, sums: Tensor, counts: Tensor, rows: Sequence[int]) -> Tensor:
    """Return second moments of all classes without the classes at `rows`.

    The means of the classes are removed exactly. Their scatter cannot be told apart from that of
    the others: the pooled covariance stays, weighted for the images that remain.

    Args:
        total: Sum of f f^T over all images, D x D.
        sums: Sum of f for each class, C x D.
        counts: Images of each class.
        rows: The classes to remove.
    """
    means = sums / counts.clamp(min=1)[:, None]
    freedom = (counts - 1).clamp(min=0)
    kept = other_rows(len(counts), rows).to(counts.device)
    share = float(freedom[kept].sum()) / max(1, int(freedom.sum()))
    scatter = total - means.T @ sums
    return scatter * share + means[kept].T @ sums[kept]

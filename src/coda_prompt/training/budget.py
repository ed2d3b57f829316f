"""Measure what the training of a task costs, and say when its budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from coda_prompt.data.stream_options import Budget


class Meter:
    """Counts the cost of what runs inside it: multiply-adds or seconds, as its budget says.

    Args:
        budget: What may be spent.
        reduce: Returns the `sum` or `mean` of a value over all processes.

    Example:
        >>> with Meter(Budget(multiply_adds=1e12)) as meter:
        ...     while meter.spent < meter.limit:
        ...         train_one_step()
    """

    def __init__(
        self,
        budget: Budget,
        reduce: Callable[[float, str], float] = lambda value, operation: value,
    ) -> None:
        self._reduce = reduce
        self._operations = MultiplyAddCounter() if budget.multiply_adds else None
        self._started: float | None = None
        self._before = 0.0
        self.limit = next(each for each in (budget.multiply_adds, budget.seconds) if each)

    def __enter__(self) -> Meter:
        self._started = time.monotonic()
        if self._operations is not None:
            self._operations.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, other processes may not get here: nothing is reduced.
        self._before, self._started = self.spent if kind is None else self._before, None
        if self._operations is not None:
            self._operations.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def spent(self) -> float:
        """What was spent so far, by all processes."""
        if self._started is None:
            return self._before
        if self._operations is not None:
            return self._before + self._reduce(self._operations.count, "sum")
        return self._before + self._reduce(time.monotonic() - self._started, "mean")

    def restore(self, spent: float) -> None:
        """Continue from what an interrupted training had spent."""
        self._before += spent - self.spent


class MultiplyAddCounter(TorchDispatchMode):
    """Counts the multiply-adds of matrix products and convolutions, forward and backward.

    The formulas are torch's; its `FlopCounterMode` also hooks into modules, which fails on those
    that are called with parameters.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        fused = {  # CPU operations that torch's registry does not know
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                _attention_backward
            ),
            torch.ops.mkldnn._linear_pointwise: _product,
        }
        self._formulas: dict[Any, Any] = {
            **flop_registry,
            **{operation: shape_wrapper(formula) for operation, formula in fused.items()},
        }
        self.count = 0.0
        """Multiply-adds so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it; a composite one is counted by its parts."""
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            operations = formula(*args, **kwargs, out_val=result) / 2
            self.count += operations  # in one step, as several threads may count
        return result


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _product(inputs: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(inputs) * int(weight[0])

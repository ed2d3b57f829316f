"""Linear layers that cast frozen weights for autocast once and use oneDNN on CPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.vit.fast_cpu import FrozenProduct, computes, product


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class Linear(nn.Linear):
    """`nn.Linear` that is faster while its weights are frozen.

    Autocast would cast frozen weights in every call. Weights may change at any time, but not
    through `.data`, which torch does not count as a change.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._cast: tuple[list[object], list[Tensor], tuple[Tensor, Tensor]] | None = None
        """What was cast: its state and the tensors, and their casts."""

    def reset_parameters(self) -> None:
        """Initialise the weights, unless they have no values yet (meta device)."""
        if not self.weight.is_meta:
            super().reset_parameters()

    @property
    def frozen(self) -> bool:
        return not (self.weight.requires_grad or self.bias.requires_grad)

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        """Apply the layer, or only some rows of it; then GELU, fused if no gradient is needed."""
        weight, bias = self.weights(inputs.device.type)
        if weight.dtype != self.weight.dtype:  # cast for autocast, which ignores float64
            inputs = inputs.to(weight.dtype)
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        fits = inputs.shape[-1] == self.in_features and inputs.dtype == weight.dtype
        if not (fits and self.frozen and computes(inputs, weight)):  # torch raises the errors
            outputs = F.linear(inputs, weight, bias)
            return F.gelu(outputs) if gelu else outputs
        if gelu and not torch.is_grad_enabled():
            return product(inputs, weight, bias, gelu=True)
        outputs = FrozenProduct.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
        return F.gelu(outputs) if gelu else outputs

    def weights(self, device: str) -> tuple[Tensor, Tensor]:
        """Return the weight and the bias, cast for autocast on a type of device if frozen.

        They are cast in the first pass with autocast, and the next pass without it frees the casts.
        """
        if torch.compiler.is_compiling() or device == "meta":
            return self.weight, self.bias
        if self.frozen and self.weight.is_leaf and torch.is_autocast_enabled(device):
            return self._cast_once(torch.get_autocast_dtype(device))
        self._cast = None
        return self.weight, self.bias

    def _cast_once(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sources: list[Tensor] = [self.weight, self.bias]
        state: list[object] = [dtype]
        for each in sources:
            state += [each.data_ptr(), 0 if each.is_inference() else each._version]
        known = self._cast  # another thread may replace it
        if known is not None:
            # A new parameter may have the address of an old one, which is therefore kept.
            same = all(a is b for a, b in zip(known[1], sources, strict=True))
            if same and known[0] == state:
                return known[2]
        with torch.inference_mode(False), torch.no_grad():  # may be used in training later
            cast = (self.weight.to(dtype), self.bias.to(dtype))
        self._cast = (state, sources, cast)
        return cast

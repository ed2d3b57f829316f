"""Linear layers with frozen weights, computed with oneDNN on CPUs.

oneDNN takes about 10% less time than PyTorch's BLAS, and even less if GELU is fused in passes
without gradients (measured by benchmarks/tried.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# The operators torch.compile uses for linear layers on CPUs; missing in builds without oneDNN.
_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)


class Weights(NamedTuple):
    """The weights of a layer as its products read them."""

    forward: Tensor
    """outputs x inputs."""
    backward: Tensor | None
    """inputs x outputs; None if it is not needed."""
    bias: Tensor


class Linear(nn.Linear):
    """`nn.Linear` that, while its weights are frozen, uses oneDNN and casts them for autocast once.

    Autocast would cast frozen weights in every call. Where oneDNN is used, cast weights are stored
    in its own layout: from another layout, it would copy them in every call. Weights may change at
    any time, but not through `.data`, which torch does not count as a change.
    """

    packs = False
    """Use a copy of float32 weights in the layout of oneDNN, too; not in backward passes, which
    would need a second one and gain less."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._copies: dict[Any, tuple[Tensor, tuple[Any, ...], Tensor]] = {}

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        """Apply the layer, or only some rows of it; then GELU, fused if no gradient is needed."""
        device = inputs.device.type
        frozen = not (self.weight.requires_grad or self.bias.requires_grad)
        plain = device == "meta" or torch.compiler.is_compiling()
        casts = not plain and frozen and self.weight.is_leaf and torch.is_autocast_enabled(device)
        if casts:
            inputs = inputs.to(torch.get_autocast_dtype(device))
        uses_onednn = not plain and frozen and self._supports_onednn(inputs, casts)
        if casts or (self.packs and uses_onednn):
            weights = self._copied_once(inputs, rows, uses_onednn)
        else:
            weights = self._weights(rows)
        if not uses_onednn:
            outputs = F.linear(inputs, weights.forward, weights.bias)
        elif gelu and not torch.is_grad_enabled():
            return _PRODUCT(inputs, weights.forward, weights.bias, "gelu", [], "none")
        else:
            outputs = _FrozenLinear.apply(inputs, *weights)  # type: ignore[no-untyped-call]
        return F.gelu(outputs) if gelu else outputs

    def cast_weights(self, batch: int, dtype: torch.dtype, rows: slice | None = None) -> None:
        """Make the copies of frozen weights that products with `batch` inputs use in autocast."""
        inputs = torch.empty(batch, self.in_features, dtype=dtype)
        self._copied_once(inputs, rows, self._supports_onednn(inputs, casts=True))

    def _weights(self, rows: slice | None) -> Weights:
        """Return all weights, or some rows of them, without a copy."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        return Weights(weight, weight.t(), bias)

    def _copied_once(self, inputs: Tensor, rows: slice | None, pack: bool) -> Weights:
        """Return the weights in the precision of the inputs, in the layout of oneDNN if `pack`."""
        plain, dtype, batch = self._weights(rows), inputs.dtype, inputs.shape[:-1].numel()
        part = None if rows is None else (rows.start, rows.stop, rows.step)

        def once(name: str, source: Tensor, own: Tensor, pack: bool) -> Tensor:
            version = 0 if source.is_inference() else source._version
            key = (pack, source.data_ptr(), version)
            known = self._copies.get((name, part, dtype))
            # A new parameter may have the address of an old one, which is therefore kept.
            if known is None or known[0] is not source or known[1] != key:
                with torch.inference_mode(False), torch.no_grad():  # may be used in training later
                    copy = own.to(dtype)
                    known = (source, key, _PACK(copy.contiguous(), batch) if pack else copy)
                self._copies[name, part, dtype] = known
            return known[2]

        forward = once("forward", self.weight, plain.forward, pack)
        backward = plain.backward
        if dtype != self.weight.dtype:
            trains = pack and torch.is_grad_enabled()
            backward = once("backward", self.weight, plain.forward.t(), pack) if trains else None
        return Weights(forward, backward, once("bias", self.bias, plain.bias, False))

    def unpack(self) -> None:
        """Use float32 weights as they are again, and free their copies."""
        self.packs = False
        copies = self._copies.items()
        self._copies = {key: copy for key, copy in copies if key[-1] != self.weight.dtype}

    def _supports_onednn(self, inputs: Tensor, casts: bool) -> bool:
        """Return whether oneDNN can compute products of frozen weights with these inputs."""
        dtype = inputs.dtype
        return (
            _PRODUCT is not None
            and _PACK is not None
            and inputs.device.type == "cpu"
            and inputs.numel() > 0
            and inputs.shape[-1] == self.in_features
            and torch._C._get_tracing_state() is None
            and not torch._C._are_functorch_transforms_active()
            and (
                _supports_bfloat16(dtype) if casts else dtype == self.weight.dtype == torch.float32
            )
            and torch.is_autocast_enabled("cpu") == casts
            and bool(torch.backends.mkldnn.enabled)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}  # packed weights cannot be copied


class _FrozenLinear(torch.autograd.Function):
    """oneDNN product that is differentiable in its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, transposed: Tensor | None, bias: Tensor
    ) -> Any:
        ctx.save_for_backward(transposed)
        return _PRODUCT(inputs, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (transposed,) = ctx.saved_tensors
        return _PRODUCT(gradient, transposed, None, "none", [], ""), None, None, None


def _supports_bfloat16(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

"""Linear layers with frozen weights, computed with oneDNN on CPUs.

oneDNN takes about 10% less time than PyTorch's BLAS, and even less if GELU is fused in passes
without gradients (measured by benchmarks/tried.py).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coda_prompt.model.processor import disable_broken_amx, multiplies_bfloat16

disable_broken_amx()  # when imported, because oneDNN decides once, in its first operation

# The operators torch.compile uses for linear layers on CPUs; missing in builds without oneDNN.
_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)


class Weights(NamedTuple):
    """The weights of a layer as its products read them."""

    forward: Tensor
    """outputs x inputs. On processors without instructions for bfloat16, weights in that precision
    are rounded to it but stored in float32: oneDNN would need several times as long for them."""
    backward: Tensor | None
    """inputs x outputs, stored as `forward` is; None if gradients were not enabled or oneDNN is not
    used."""
    bias: Tensor


def product(inputs: Tensor, weights: Weights, *, gelu: bool = False) -> Tensor:
    """Compute inputs W' + b, and GELU of it, with oneDNN and without recording it for autograd."""
    fused, algorithm = ("gelu", "none") if gelu else ("none", "")
    dtype, bias = inputs.dtype, weights.bias
    if weights.forward.dtype == torch.float32:  # also of rounded weights
        inputs, bias = inputs.float(), bias.float()
    outputs: Tensor = _PRODUCT(inputs, weights.forward, bias, fused, [], algorithm)
    return outputs.to(dtype)


def product_backward(gradient: Tensor, backward: Tensor) -> Tensor:
    """Compute the gradient of the inputs of a product with `Weights.backward`."""
    dtype = gradient.dtype
    if backward.dtype == torch.float32:  # also of rounded weights
        gradient = gradient.float()
    of_inputs: Tensor = _PRODUCT(gradient, backward, None, "none", [], "")
    return of_inputs.to(dtype)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


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

    def reset_parameters(self) -> None:
        """Initialise the weights, unless they have no values yet (meta device)."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        """Apply the layer, or only some rows of it; then GELU, fused if no gradient is needed."""
        fits = inputs.shape[-1] == self.in_features  # else torch raises an error
        batch = math.prod(inputs.shape[:-1]) if fits else 0  # may be symbolic, unlike numel()
        weights, onednn = self.weights_for(inputs.device.type, inputs.dtype, batch, rows)
        if weights.bias.dtype != self.bias.dtype:  # cast for autocast, which ignores float64
            inputs = inputs.to(weights.bias.dtype)
        if not onednn:
            outputs = F.linear(inputs, weights.forward, weights.bias)
            return F.gelu(outputs) if gelu else outputs
        if gelu and not torch.is_grad_enabled():
            return product(inputs, weights, gelu=True)
        outputs = _FrozenLinear.apply(inputs, weights)  # type: ignore[no-untyped-call]
        return F.gelu(outputs) if gelu else outputs

    def weights_for(
        self, device: str, dtype: torch.dtype, batch: int, rows: slice | None = None
    ) -> tuple[Weights, bool]:
        """Return the weights of products with `batch` inputs, and whether oneDNN computes them.

        Frozen weights are cast for autocast when this is called for the first time.

        Args:
            device: Type of the device.
            dtype: Of the inputs.
            batch: Number of inputs.
            rows: Only these rows of the weights.
        """
        frozen = not (self.weight.requires_grad or self.bias.requires_grad)
        if not frozen:
            self._copies.clear()
        if not frozen or device == "meta" or torch.compiler.is_compiling():
            return self._weights(rows), False
        casts = self.weight.is_leaf and torch.is_autocast_enabled(device)
        if casts:
            dtype = torch.get_autocast_dtype(device)
        onednn = device == "cpu" and batch > 0 and self._supports_onednn(dtype, casts)
        if casts or (self.packs and onednn):
            return self._copied_once(dtype, batch, rows, onednn), onednn
        return self._weights(rows), onednn

    def _weights(self, rows: slice | None) -> Weights:
        """Return all weights, or some rows of them, without a copy."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        return Weights(weight, weight.t(), bias)

    def _copied_once(
        self, dtype: torch.dtype, batch: int, rows: slice | None, pack: bool
    ) -> Weights:
        """Return a copy of the weights in a precision, for oneDNN if `pack`."""
        plain = self._weights(rows)
        part = None if rows is None else (rows.start, rows.stop, rows.step)
        layout = "plain"
        if pack:
            layout = "packed" if dtype == torch.float32 or multiplies_bfloat16() else "rounded"

        def once(name: str, source: Tensor, own: Tensor, layout: str) -> Tensor:
            version = 0 if source.is_inference() else source._version
            key = (layout, source.data_ptr(), version)
            known = self._copies.get((name, part, dtype))
            # A new parameter may have the address of an old one, which is therefore kept.
            if known is None or known[0] is not source or known[1] != key:
                with torch.inference_mode(False), torch.no_grad():  # may be used in training later
                    copy = own.to(dtype)
                    if layout == "packed":
                        copy = _PACK(copy.contiguous(), batch)
                    elif layout == "rounded":
                        copy = copy.float()
                    known = (source, key, copy)
                self._copies[name, part, dtype] = known
            return known[2]

        forward = once("forward", self.weight, plain.forward, layout)
        backward = plain.backward
        if layout == "rounded":
            backward = forward.t()
        elif dtype != self.weight.dtype:
            trains = pack and torch.is_grad_enabled()
            backward = once("backward", self.weight, plain.forward.t(), layout) if trains else None
        return Weights(forward, backward, once("bias", self.bias, plain.bias, "plain"))

    def unpack(self) -> None:
        """Use float32 weights as they are again, and free their copies."""
        self.packs = False
        copies = self._copies.items()
        self._copies = {key: copy for key, copy in copies if key[-1] != self.weight.dtype}

    def free_copies(self) -> None:
        """Free all copies of the weights; casts are made again when they are needed."""
        self.packs = False
        self._copies.clear()

    def _supports_onednn(self, dtype: torch.dtype, casts: bool) -> bool:
        """Return whether oneDNN can compute products of frozen weights with such inputs."""
        return (
            _PRODUCT is not None
            and _PACK is not None
            and torch._C._get_tracing_state() is None
            and not torch._C._are_functorch_transforms_active()
            and (dtype == torch.bfloat16 if casts else dtype == self.weight.dtype == torch.float32)
            and torch.is_autocast_enabled("cpu") == casts
            and bool(torch.backends.mkldnn.enabled)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}  # packed weights cannot be copied


class _FrozenLinear(torch.autograd.Function):
    """oneDNN product that is differentiable in its inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Weights) -> Tensor:
        ctx.save_for_backward(weights.backward)  # raises an error if weights change until then
        return product(inputs, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return product_backward(gradient, *ctx.saved_tensors), None

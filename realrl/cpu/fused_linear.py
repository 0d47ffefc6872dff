"""Linear layers, with the norm before them, whose weights are repacked once and used many times without gradient.

This is the only place that knows which machine gains from packing. Where there are `realrl.cpu`, the packed layout
is theirs. Otherwise, with AVX-512, oneDNN's blocked layout is two to five times as fast as the default kernel for the
rows of a decode step; with AVX2 alone it is somewhat faster for very few rows. Everywhere else the plain twin below is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from realrl.cpu import RMSNorm, TiledLinear, can_use, rms_norm
from realrl.model.layers.activation import activate
from realrl.model.layers.linear import HAS_AVX512
from realrl.model.layers.lora import effective_weight
from realrl.model.layers.norm import Norm
from realrl.shape import Activation

LinearOp = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [T, in], residual [T, out] or None) -> x W^T + bias (+ residual) [T, out]."""

_ROWS_HINT = 32  # the packed layout is chosen for about this many rows; others stay within a few percent
_MOST_ROWS_WITH_AVX2 = 24  # SmolLM2-135M: packed a fifth faster with 8 rows, as fast with 32, slower with hundreds


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed kernels exist for this device and dtype."""
    if can_use(device, dtype):
        return True
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packing_pays(device: torch.device, dtype: torch.dtype, n_rows: int) -> bool:
    """Whether packed kernels are the faster ones for products of so many rows."""
    return can_use(device, dtype) or (can_pack(device, dtype) and (HAS_AVX512 or n_rows <= _MOST_ROWS_WITH_AVX2))


def fuse_norm(norm: Norm, dtype: torch.dtype, *, pack: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm [T, H] -> [T, H] of activations of `dtype`."""
    if not (pack and norm.kind == "rms" and can_use(norm.weight.device, dtype)):
        return norm.frozen(dtype)
    operand = _kernel_norm(norm)
    return lambda x: rms_norm(x, operand)


def fuse_linears(linears: Sequence[nn.Linear], *, dtype: torch.dtype, pack: bool, norm: Norm | None = None) -> LinearOp:
    """One operation that computes several layers of equal input, outputs side by side in order.

    Args:
        linears: layers; all or none with bias.
        dtype: to compute in.
        pack: use the packed kernel, see `can_pack`.
        norm: applied to the input first.
    """
    weights, biases = [effective_weight(layer, dtype) for layer in linears], [layer.bias for layer in linears]
    weight, bias = _join(weights), None if biases[0] is None else _join(biases).to(dtype)
    return fuse_weight(weight, bias, pack=pack, norm=norm)


def fuse_weight(weight: torch.Tensor, bias: torch.Tensor | None, *, pack: bool, norm: Norm | None = None) -> LinearOp:
    """`fuse_linears` for one weight [out, in] that is already there; the plain twin aliases it."""
    before, within = _place(norm, weight.device, weight.dtype, pack=pack)
    product = _pack(weight, bias, within) if pack else PlainLinear(weight, bias)
    return product if before is None else (lambda x, residual: product(before(x), residual))


def fuse_gated(
    gate: nn.Linear,
    up: nn.Linear,
    *,
    dtype: torch.dtype,
    pack: bool,
    activation: Activation = "silu",
    norm: Norm | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``activation(gate(x)) * up(x)`` of two layers of equal shape; packed, the kernels apply both while they store."""
    before, within = _place(norm, gate.weight.device, dtype, pack=pack)
    if not pack:
        joined = fuse_linears([gate, up], dtype=dtype, pack=False)
        return _after(before, lambda x: _gate(joined(x, None), activation))
    if can_use(gate.weight.device, dtype):
        bias = None if gate.bias is None else _join([gate.bias, up.bias]).to(dtype)
        weight = effective_weight(up, dtype)
        gated = TiledLinear(weight, bias, within, activation=activation, gate=effective_weight(gate, dtype))
        return _after(before, gated)
    gate_op, up_op = (
        PackedLinear(effective_weight(layer, dtype), None if layer.bias is None else layer.bias.to(dtype))
        for layer in (gate, up)
    )
    return _after(before, lambda x: up_op.times(x, gate_op.activated(x, activation)))


def fuse_activated(
    layer: nn.Linear, *, dtype: torch.dtype, pack: bool, activation: Activation, norm: Norm | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``activation(layer(x))``; packed, the kernel applies it while it stores."""
    weight, bias = effective_weight(layer, dtype), None if layer.bias is None else layer.bias.to(dtype)
    before, within = _place(norm, weight.device, dtype, pack=pack)
    if not pack:
        plain = PlainLinear(weight, bias)
        return _after(before, lambda x: activate(plain(x), activation))
    if can_use(weight.device, dtype):
        return _after(before, TiledLinear(weight, bias, within, activation=activation))
    packed = PackedLinear(weight, bias)
    return _after(before, lambda x: packed.activated(x, activation))


def _place(
    norm: Norm | None, device: torch.device, dtype: torch.dtype, *, pack: bool
) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, RMSNorm | None]:
    """What is to be done before a product of the normalised input, and the norm that the product itself applies."""
    if norm is None:
        return None, None
    if pack and norm.kind == "rms" and can_use(device, dtype):
        return None, _kernel_norm(norm)
    return fuse_norm(norm, dtype, pack=pack), None


def _after(
    before: Callable[[torch.Tensor], torch.Tensor] | None, operation: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    return operation if before is None else (lambda x: operation(before(x)))


def _kernel_norm(norm: Norm) -> RMSNorm:
    return RMSNorm(norm.weight.detach().float() + float(norm.has_offset), norm.eps)


def _pack(weight: torch.Tensor, bias: torch.Tensor | None, norm: RMSNorm | None = None) -> TiledLinear | PackedLinear:
    return TiledLinear(weight, bias, norm) if can_use(weight.device, weight.dtype) else PackedLinear(weight, bias)


def _gate(gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class PlainLinear:
    """The reference: `F.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)


class PackedLinear:
    """The same through oneDNN, with its own copy of the weight in a blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(x W^T + bias)."""
        kernel, algorithm = ("swish", "") if activation == "silu" else ("gelu", "tanh")
        return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, kernel, [], algorithm)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """(x W^T + bias) * factor [T, out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, self._bias, "mul")

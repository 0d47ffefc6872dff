"""A decoder's step by torch's operations: the twin of every other set of kernels; and its products by oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from realrl.config.schema import GenerationConfig
from realrl.cpu.attention import CacheAttention, plain_attention
from realrl.cpu.cache import KVCache, NewTokens
from realrl.cpu.machine import HAS_ONEDNN, has_bf16_kernels
from realrl.cpu.reference import Rope, activate
from realrl.cpu.sampler import Sampler, SamplingOp
from realrl.shape import Activation, NormKind

_ROWS_HINT = 32  # the packed layout is chosen for about this many rows; others stay within a few percent

UnaryOp = Callable[[torch.Tensor], torch.Tensor]
LinearOp = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function (x [T, in], residual [T, out] or None) -> x W^T + bias (+ residual) [T, out]."""
LayersOp = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], NewTokens, Rope], torch.Tensor]
"""Function (x [T, H], keys and values of each layer, tokens, rope) -> [T, H]; keys and values are written to."""


@dataclass(frozen=True)
class LinearWeights:
    """A linear layer without gradient: `weight` [out, in] and `bias` [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class NormLayer(Protocol):
    """The part of `realrl.model.layers.norm.Norm` that kernels use."""

    weight: torch.nn.Parameter
    kind: NormKind
    eps: float
    has_offset: bool

    def frozen(self, dtype: torch.dtype) -> UnaryOp:
        """A copy for activations of `dtype`, without gradient."""


@dataclass(frozen=True)
class LayerOps:
    """A decoder's layer as operations of one set of kernels.

    Attributes:
        qkv: queries, keys and values, side by side; with norm.
        o: output product of the attention.
        inner: first product of the MLP, with norm and activation.
        down: last product of the MLP.
        window: number of tokens, itself included, that a token sees; None for all.
    """

    qkv: LinearOp
    o: LinearOp
    inner: UnaryOp
    down: LinearOp
    window: int | None


class TorchKernels:
    """Torch's operations, on any device and without gradient.

    Args:
        dtype: dtype of weights, activations and KV cache.

    Attributes:
        tiles: a packed matrix has a multiple of one of these numbers of outputs.
        packs_weights: True if every weight is copied into a layout of its own, not only those that are joined.
        fuses_products: True if norms and activations are applied while a product is computed.
        fuses_sampling: True if a token is drawn among all of them without buffers for probabilities.
        head_multiple: heads whose size is a multiple of this are rotated, cached and attended to in one pass that
            reads only the filled part of the cache; None if no heads are.
    """

    tiles: tuple[int, ...] = (1,)
    packs_weights = False
    fuses_products = False
    fuses_sampling = False
    head_multiple: int | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    # ---------------------------------------------------------------- norms and products

    def norm(self, norm: NormLayer) -> UnaryOp:
        """Make the operation [T, H] -> [T, H] of a norm."""
        return norm.frozen(self.dtype)

    def linear(self, layers: Sequence[LinearWeights], norm: NormLayer | None = None) -> LinearOp:
        """Make one operation of several layers of equal input, outputs side by side in order.

        Args:
            layers: layers that all have a bias, or none; a single one's weight is aliased where weights are not packed.
            norm: norm of the input before the product.
        """
        product = self._linear(join(layers))
        if norm is None:
            return product
        before = self.norm(norm)
        return lambda x, residual: product(before(x), residual)

    def gated(
        self, gate: LinearWeights, up: LinearWeights, activation: Activation, norm: NormLayer | None = None
    ) -> UnaryOp:
        """Make the operation ``activation(gate(x)) * up(x)`` of two layers of equal shape."""
        return self._after(norm, self._gated(gate, up, activation))

    def activated(self, layer: LinearWeights, activation: Activation, norm: NormLayer | None = None) -> UnaryOp:
        """Make the operation ``activation(layer(x))``."""
        return self._after(norm, self._activated(layer, activation))

    def _after(self, norm: NormLayer | None, operation: UnaryOp) -> UnaryOp:
        if norm is None:
            return operation
        before = self.norm(norm)
        return lambda x: operation(before(x))

    def _linear(self, layer: LinearWeights) -> LinearOp:
        return plain_linear(layer)

    def _gated(self, gate: LinearWeights, up: LinearWeights, activation: Activation) -> UnaryOp:
        joined = plain_linear(join([gate, up]))

        def operation(x: torch.Tensor) -> torch.Tensor:
            gated, factor = joined(x, None).chunk(2, dim=-1)
            return activate(gated, activation) * factor

        return operation

    def _activated(self, layer: LinearWeights, activation: Activation) -> UnaryOp:
        plain = plain_linear(layer)
        return lambda x: activate(plain(x, None), activation)

    # ---------------------------------------------------------------- attention, whole layers, sampling

    def attends(self, head_dim: int) -> bool:
        """True if heads of this size are attended to in one pass; see `head_multiple`."""
        return self.head_multiple is not None and head_dim % self.head_multiple == 0

    def attention(self, cache: KVCache, tokens: NewTokens) -> CacheAttention:
        """Make the attention of new tokens in all layers; the cache has room for them."""
        return plain_attention(cache, tokens)

    def layers(self, layers: Sequence[LayerOps], *, n_kv_heads: int, head_dim: int) -> LayersOp | None:
        """Make one operation of whole layers, with attention and residuals; None if layers are called one by one."""
        return None

    def sampler(
        self,
        generation: GenerationConfig,
        stop_ids: Sequence[int],
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> SamplingOp:
        """See `Sampler`."""
        return Sampler(generation, stop_ids, max_rows=max_rows, vocab_size=vocab_size, device=device).sample


def join(layers: Sequence[LinearWeights]) -> LinearWeights:
    """Join layers of equal input into one, outputs side by side; all or none with bias. A single one stays itself."""
    if len(layers) == 1:
        return layers[0]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return LinearWeights(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


def plain_linear(layer: LinearWeights) -> LinearOp:
    """The layer by `F.linear`, the reference."""

    def apply(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, layer.weight, layer.bias)
        return y if residual is None else y.add_(residual)

    return apply


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies packed matrices of this device and dtype."""
    if device.type != "cpu" or not HAS_ONEDNN:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_kernels())


class OneDNNKernels(TorchKernels):
    """Torch's operations, with products by oneDNN over weights in its blocked layout.

    With AVX-512 they are two to five times as fast as the default kernel for the rows of a decode step; with AVX2 alone
    somewhat faster for very few rows.
    """

    packs_weights = True

    def _linear(self, layer: LinearWeights) -> LinearOp:
        return PackedLinear(layer)

    def _gated(self, gate: LinearWeights, up: LinearWeights, activation: Activation) -> UnaryOp:
        packed_gate, packed_up = PackedLinear(gate), PackedLinear(up)
        return lambda x: packed_up.times(x, packed_gate.activated(x, activation))

    def _activated(self, layer: LinearWeights, activation: Activation) -> UnaryOp:
        packed = PackedLinear(layer)
        return lambda x: packed.activated(x, activation)


class PackedLinear:
    """A linear layer with its own copy of the weight."""

    def __init__(self, layer: LinearWeights) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS_HINT)
        self._bias = layer.bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Compute activation(x W^T + bias)."""
        kernel, algorithm = ("swish", "") if activation == "silu" else ("gelu", "tanh")
        return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, kernel, [], algorithm)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Compute (x W^T + bias) * factor [T, out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, self._bias, "mul")

"""A decoder's step by the compiled kernels of `loader`; torch computes whatever they do not cover."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from realrl.config.schema import GenerationConfig
from realrl.cpu.attention import CacheAttention
from realrl.cpu.cache import KVCache, NewTokens
from realrl.cpu.operations import HEAD_MULTIPLE, RMSNorm, TiledLinear, attend, rms_norm, sample, tiled_layers
from realrl.cpu.reference import Rope, ScoreTerms
from realrl.cpu.sampler import InvalidLogitsError, SampledTokens, SamplingOp, keeps_all
from realrl.cpu.torch_kernels import (
    LayerOps,
    LayersOp,
    LinearOp,
    LinearWeights,
    NormLayer,
    TorchKernels,
    UnaryOp,
    join,
)
from realrl.shape import Activation


class CompiledKernels(TorchKernels):
    """realrl's own kernels. An RMS norm is a part of the product that follows it."""

    tiles = (32, 48)  # of linear_tiles.h, and of linear_vectors.h
    packs_weights = True
    fuses_products = True
    fuses_sampling = True
    head_multiple = HEAD_MULTIPLE

    def norm(self, norm: NormLayer) -> UnaryOp:
        if norm.kind != "rms":
            return super().norm(norm)
        operand = _operand(norm)
        return lambda x: rms_norm(x, operand)

    def linear(self, layers: Sequence[LinearWeights], norm: NormLayer | None = None) -> LinearOp:
        joined = join(layers)
        within, before = self._place(norm)
        product = TiledLinear(joined.weight, joined.bias, within)
        return product if before is None else lambda x, residual: product(before(x), residual)

    def gated(
        self, gate: LinearWeights, up: LinearWeights, activation: Activation, norm: NormLayer | None = None
    ) -> UnaryOp:
        bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
        within, before = self._place(norm)
        product = TiledLinear(up.weight, bias, within, activation=activation, gate=gate.weight)
        return product if before is None else lambda x: product(before(x))

    def activated(self, layer: LinearWeights, activation: Activation, norm: NormLayer | None = None) -> UnaryOp:
        within, before = self._place(norm)
        product = TiledLinear(layer.weight, layer.bias, within, activation=activation)
        return product if before is None else lambda x: product(before(x))

    def _place(self, norm: NormLayer | None) -> tuple[RMSNorm | None, UnaryOp | None]:
        """The norm that a product applies itself, and the operation to run before the product."""
        if norm is None:
            return None, None
        return (_operand(norm), None) if norm.kind == "rms" else (None, self.norm(norm))

    def attention(self, cache: KVCache, tokens: NewTokens) -> CacheAttention:
        keys, _ = cache.layer(0)
        return CompiledAttention(cache, tokens) if self.attends(keys.shape[-1]) else super().attention(cache, tokens)

    def layers(self, layers: Sequence[LayerOps], *, n_kv_heads: int, head_dim: int) -> LayersOp | None:
        parts = [[op for op in (o.qkv, o.o, o.inner, o.down) if isinstance(op, TiledLinear)] for o in layers]
        if any(len(kernels) < 4 for kernels in parts) or not self.attends(head_dim):  # a norm is not within its product
            return None
        windows = [layer.window for layer in layers]
        return tiled_layers(parts, windows, n_kv_heads=n_kv_heads, head_dim=head_dim)

    def sampler(
        self,
        generation: GenerationConfig,
        stop_ids: Sequence[int],
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> SamplingOp:
        if keeps_all(generation, vocab_size) or generation.temperature == 0.0:
            return partial(_sample, generation.temperature, stop_ids)
        return super().sampler(generation, stop_ids, max_rows=max_rows, vocab_size=vocab_size, device=device)


class CompiledAttention(CacheAttention):
    """Attention in one pass."""

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        *,
        rope: Rope,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        assert terms is None, "the kernel has plain scores only"
        keys, values = self.cache.layer(layer_index)
        return attend(qkv, keys, values, self.tokens, rope=rope, window=window, scale=keys.shape[-1] ** -0.5)


def _sample(
    temperature: float,
    stop_ids: Sequence[int],
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    is_early: npt.NDArray[np.bool_],
) -> SampledTokens:
    """Sampling by the kernel, for generation without filters; see `SamplingOp`."""
    early = torch.from_numpy(is_early)
    sampled = SampledTokens(*sample(logits, uniforms, temperature=temperature, is_early=early, stop_ids=stop_ids))
    invalid = (sampled.tokens < 0).nonzero()
    if len(invalid):
        raise InvalidLogitsError(int(invalid[0]))
    return sampled


def _operand(norm: NormLayer) -> RMSNorm:
    return RMSNorm(norm.weight.detach().float() + float(norm.has_offset), norm.eps)

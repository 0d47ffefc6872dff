"""The decoder as generation runs it: fewer and larger operations, over weights prepared for one call.

Shapes: T tokens, H hidden, N heads, K KV heads, D head size, V vocabulary; N and K count this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import nn

from realrl.cpu import (
    CacheAttention,
    KVCache,
    LayerOps,
    LayersOp,
    LinearWeights,
    NewTokens,
    Rope,
    TorchKernels,
    has_flash,
    plain_attention,
    softcap,
)
from realrl.engine.groups import ALONE, Communicator
from realrl.model.decoder import MLP, Block, Decoder
from realrl.model.layers.heads import LMHead
from realrl.model.layers.linear import effective_weight
from realrl.model.layers.moe import MoE, has_grouped_product, mix_experts, route
from realrl.model.layers.norm import Norm, QKNorm, mean_square
from realrl.model.layers.rope import all_frequencies, make_ropes


class FusedNetwork:
    """The layers and the head of `decoder`, computed with fewer and larger operations.

    The weights are read when this is built: it belongs to one generate call and must not outlive a change of them.
    Every rank of `tp` has all tokens and the same hidden states: unlike in training with sequence parallelism, rows are
    never split.

    Args:
        decoder: a language model, or one rank's shard.
        kernels: kernels, which also say the dtype to compute in.
        tp: the ranks that hold the other slices of the same layers.
    """

    def __init__(self, decoder: Decoder, kernels: TorchKernels, *, tp: Communicator = ALONE) -> None:
        head = decoder.head
        assert isinstance(head, LMHead | None)
        self.config = decoder.config
        self.kernels = kernels
        self.dtype = kernels.dtype
        self._tp = tp
        self._frequencies = all_frequencies(decoder.config, decoder.device)
        self._embed = None if decoder.embedding is None else decoder.embed
        has_local_rope = decoder.config.has_local_rope
        self._blocks = [
            _FusedBlock(i, block, kernels, tp, rope_index=has_local_rope(block.layer_index))
            for i, block in enumerate(decoder.blocks)
        ]
        ends = [*accumulate(map(len, decoder.shard.chunks), initial=0)]
        self._chunks = [slice(*span) for span in pairwise(ends)]
        self._whole = [self._all_together(chunk) for chunk in self._chunks]
        self._head = (
            None if head is None else kernels.linear([LinearWeights(head.weight.to(self.dtype))], norm=decoder.norm)
        )
        self._gather_logits = decoder.parallel.gather_logits

    @property
    def fuses_attention(self) -> bool:
        """True if the kernels attend in one pass, which reads the filled part of the cache only."""
        return self.config.has_plain_attention and self.kernels.attends(self.config.head_dim)

    @property
    def attends_by_flash(self) -> bool:
        """True if decode steps attend by FlashAttention, to a token-major cache."""
        config = self.config
        is_free = not (config.keeps_scores or self.fuses_attention)
        return is_free and has_flash(self._frequencies[0].device, self.dtype, config.head_dim)

    @property
    def waits(self) -> bool:
        """True if the host waits for the device within a decode step, as it does for experts that no kernel groups."""
        return any(block.waits for block in self._blocks)

    def attention(self, cache: KVCache, tokens: NewTokens) -> CacheAttention:
        """Make the attention of new tokens in all layers; the cache has room for them."""
        make = self.kernels.attention if self.fuses_attention else plain_attention
        return make(cache, tokens)

    def has_head(self, chunk: int = 0) -> bool:
        """Return True if the head, and so logits, come behind a chunk."""
        return self._head is not None and chunk == self.n_chunks - 1

    @property
    def n_chunks(self) -> int:
        """The number of this rank's chunks of neighbouring blocks."""
        return len(self._chunks)

    @property
    def n_layers(self) -> int:
        """The number of this rank's blocks."""
        return len(self._blocks)

    @property
    def n_kv_heads(self) -> int:
        """The number of this rank's KV heads."""
        return self._blocks[0].n_kv_heads

    def _all_together(self, chunk: slice) -> LayersOp | None:
        """Make one operation of a chunk; None if the kernels have none, or blocks must exchange activations."""
        blocks = self._blocks[chunk]
        layers = [block.parts for block in blocks if block.parts is not None]
        config, is_alone = self.config, self._tp.n_ranks == 1
        if len(layers) < len(blocks) or not is_alone or not config.has_plain_attention or config.local_rope_theta:
            return None
        return self.kernels.layers(layers, n_kv_heads=self.n_kv_heads, head_dim=self.config.head_dim)

    def hidden(self, x: torch.Tensor, attention: CacheAttention, chunk: int = 0) -> torch.Tensor:
        """Compute hidden states [T, H] after the layers of one of this rank's chunks, not normalised.

        Args:
            x: int64 [T], the tokens, where the embedding is; elsewhere the hidden states of the chunk before.
            attention: attention that counts the layers of all chunks from 0 on every stage.
            chunk: place among this rank's chunks.
        """
        positions, blocks = attention.tokens.positions, self._chunks[chunk]
        if self._embed is not None and chunk == 0:
            x = self._tp.all_reduce_(self._embed(x, positions).to(self.dtype))
        ropes = make_ropes(self.config, self._frequencies, positions, x.dtype)
        whole = self._whole[chunk]
        if whole is not None:
            keys, values = attention.cache.layers
            return whole(x, keys[blocks], values[blocks], attention.tokens, ropes[0])
        for block in self._blocks[blocks]:
            x = block(x, ropes[block.rope_index], attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [T, V] of the whole vocabulary from the last layer's hidden states, on every rank of `tp`."""
        assert self._head is not None, "only the last pipeline stage has logits"
        logits = softcap(self._head(hidden, None), self.config.logit_softcap)
        return self._gather_logits(logits, self.config.vocab_size)


class _Reduced:
    """A layer cut by columns and summed over ranks; only the first rank adds the bias and the residual.

    A norm stands between the sum and the residual, which then is added on every rank.
    """

    def __init__(self, layer: nn.Linear, norm: Norm | None, kernels: TorchKernels, tp: Communicator) -> None:
        weights = _weights(layer, kernels.dtype)
        self.linear = kernels.linear([replace(weights, bias=None) if tp.rank else weights])
        self.norm = None if norm is None else kernels.norm(norm)
        self._tp = tp

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            return residual + self.norm(self._tp.all_reduce_(self.linear(x, None)))
        return self._tp.all_reduce_(self.linear(x, None if self._tp.rank else residual))


class _FusedMLP:
    """A dense MLP, the norms before and after it and the residual."""

    def __init__(
        self, mlp: MLP, norms: tuple[Norm | None, Norm | None], kernels: TorchKernels, tp: Communicator
    ) -> None:
        norm, after = norms
        up = _weights(mlp.up, kernels.dtype)
        if mlp.gate is None:
            self.inner = kernels.activated(up, mlp.activation, norm)
        else:
            self.inner = kernels.gated(_weights(mlp.gate, kernels.dtype), up, mlp.activation, norm)
        self.down = _Reduced(mlp.down, after, kernels, tp)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x), x)


class _FusedExperts:
    """Norm, router, experts and the residual, without packing: in a decode step an expert has a few rows at most.

    Args:
        moe: source of the weights, which are not copied if they have `dtype` already.
        norm: norm before router and experts, for activations of `dtype`.
        dtype: dtype to compute in.
        tp: the ranks that hold the other slices; all have the same rows and so route alike.
    """

    def __init__(
        self, moe: MoE, norm: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, tp: Communicator
    ) -> None:
        self._norm = norm
        self._config = moe.config
        self._router = moe.router.weight.to(dtype)
        self._router_bias = None if moe.router.bias is None else moe.router.bias.to(dtype)
        self._terms = moe.terms(tp.rank, dtype)
        self._gate, self._up, self._down = (w.to(dtype) for w in (moe.experts.gate, moe.experts.up, moe.experts.down))
        self._tp = tp

    @property
    def waits(self) -> bool:
        """True if the host reads how many tokens each expert has."""
        return not all(map(has_grouped_product, (self._gate, self._up, self._down)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x + experts(norm(x))``, [T, H]."""
        normed = self._norm(x)
        routing = route(normed, self._router, self._config, bias=self._router_bias)
        y = mix_experts(normed, routing, self._gate, self._up, self._down, terms=self._terms)
        if self._tp.rank == 0:
            y += x
        return self._tp.all_reduce_(y)


class _FusedBlock:
    def __init__(self, index: int, block: Block, kernels: TorchKernels, tp: Communicator, *, rope_index: bool) -> None:
        attention, dtype = block.attention, kernels.dtype
        self.rope_index = rope_index
        self._index = index
        self._head_dim, self._window, self._terms = attention.head_dim, attention.window, attention.terms
        self._query_factor = attention.query_factor
        self._n_heads = attention.q.out_features // attention.head_dim
        self.n_kv_heads = attention.k.out_features // attention.head_dim
        self._q_norm, self._k_norm = (
            None if norm is None else _HeadsNorm(norm, dtype, tp) for norm in (attention.q_norm, attention.k_norm)
        )
        self._qkv = kernels.linear(
            [_weights(layer, dtype) for layer in (attention.q, attention.k, attention.v)], norm=block.attention_norm
        )
        self._o = _Reduced(attention.o, block.attention_post_norm, kernels, tp)
        mlp, norm = block.mlp, block.mlp_norm
        self._mlp: _FusedMLP | _FusedExperts
        if isinstance(mlp, MoE):
            assert norm is not None, "a norm stands before experts, and none after them"
            self._mlp = _FusedExperts(mlp, kernels.norm(norm), dtype, tp)
        else:
            self._mlp = _FusedMLP(mlp, (norm, block.mlp_post_norm), kernels, tp)

    @property
    def waits(self) -> bool:
        """True if experts make the host wait."""
        return isinstance(self._mlp, _FusedExperts) and self._mlp.waits

    @property
    def parts(self) -> LayerOps | None:
        """The block's products and window; None if it has experts, or does more than norms, products and attention."""
        is_plain = self._q_norm is None and self._o.norm is None and self._query_factor == 1.0
        if not is_plain or not isinstance(self._mlp, _FusedMLP):
            return None
        return LayerOps(self._qkv, self._o.linear, self._mlp.inner, self._mlp.down.linear, self._window)

    def __call__(self, x: torch.Tensor, rope: Rope, attention: CacheAttention) -> torch.Tensor:
        qkv = self._qkv(x, None)
        if self._q_norm is not None and self._k_norm is not None:
            heads = qkv.unflatten(-1, (-1, self._head_dim))
            q, k, v = heads.split((self._n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
            qkv = torch.cat((self._q_norm(q), self._k_norm(k), v), dim=1).flatten(1)
        if self._query_factor != 1.0:
            qkv[:, : self._n_heads * self._head_dim] *= self._query_factor
        attended = attention.attend(self._index, qkv, rope=rope, window=self._window, terms=self._terms)
        return self._mlp(self._o(attended, x))


class _HeadsNorm:
    """Norm of queries or keys [T, heads, D]; see `QKNorm`."""

    def __init__(self, norm: QKNorm, dtype: torch.dtype, tp: Communicator) -> None:
        self._norm = norm.frozen(dtype)
        self._is_joint = norm.is_joint
        self._tp = tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_joint:
            return self._norm(x)
        flat = x.flatten(1)
        if self._tp.n_ranks == 1:
            return self._norm(flat).view_as(x)
        return self._norm.by(self._tp.all_reduce_(mean_square(flat) / self._tp.n_ranks), flat).view_as(x)


def _weights(layer: nn.Linear, dtype: torch.dtype) -> LinearWeights:
    return LinearWeights(effective_weight(layer, dtype), None if layer.bias is None else layer.bias.to(dtype))

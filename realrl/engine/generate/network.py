"""The decoder as generation runs it: fewer and larger operations, over weights prepared for one call.

Shapes: T tokens, H hidden, N heads, K KV heads, D head size, V vocabulary; N and K count this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from realrl.cpu import CacheAttention, LayerOps, LayersOp, LinearWeights, Rope, TorchKernels
from realrl.engine.groups import ALONE, Communicator
from realrl.model.decoder import MLP, Block, Decoder
from realrl.model.layers.heads import LMHead
from realrl.model.layers.linear import effective_weight
from realrl.model.layers.moe import MoE, mix_experts, route
from realrl.model.layers.norm import Norm
from realrl.model.layers.rope import inverse_frequencies, make_rope


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
        self._inv_freq = inverse_frequencies(decoder.config, decoder.device)
        self._embed = None if decoder.embedding is None else decoder.embed
        self._blocks = [_FusedBlock(i, block, kernels, tp) for i, block in enumerate(decoder.blocks)]
        self._whole = self._all_together()
        self._head = (
            None if head is None else kernels.linear([LinearWeights(head.weight.to(self.dtype))], norm=decoder.norm)
        )
        self._gather_logits = decoder.parallel.gather_logits

    @property
    def has_head(self) -> bool:
        """True if this stage has the head, and so logits."""
        return self._head is not None

    @property
    def n_layers(self) -> int:
        """The number of this rank's blocks."""
        return len(self._blocks)

    @property
    def n_kv_heads(self) -> int:
        """The number of this rank's KV heads."""
        return self._blocks[0].n_kv_heads

    def _all_together(self) -> LayersOp | None:
        """Make one operation of all blocks; None if the kernels have none, or blocks must exchange activations."""
        layers = [block.parts for block in self._blocks if block.parts is not None]
        if len(layers) < len(self._blocks) or self._tp.n_ranks > 1:
            return None
        return self.kernels.layers(layers, n_kv_heads=self.n_kv_heads, head_dim=self.config.head_dim)

    def hidden(self, x: torch.Tensor, attention: CacheAttention) -> torch.Tensor:
        """Compute hidden states [T, H] after this rank's layers, not normalised.

        Args:
            x: int64 [T], the tokens, where the embedding is; elsewhere the hidden states of the stage before.
            attention: attention that counts layers from 0 on every stage.
        """
        positions = attention.tokens.positions
        if self._embed is not None:
            x = self._tp.all_reduce_(self._embed(x, positions).to(self.dtype))
        rope = make_rope(self.config, self._inv_freq, positions, x.dtype)
        if self._whole is not None:
            return self._whole(x, *attention.cache.layers, attention.tokens, rope)
        for block in self._blocks:
            x = block(x, rope, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [T, V] of the whole vocabulary from the last layer's hidden states, on every rank of `tp`."""
        assert self._head is not None, "only the last pipeline stage has logits"
        return self._gather_logits(self._head(hidden, None), self.config.vocab_size)


class _Reduced:
    """A layer cut by columns and summed over ranks; only the first rank adds the bias and the residual."""

    def __init__(self, layer: nn.Linear, kernels: TorchKernels, tp: Communicator) -> None:
        weights = _weights(layer, kernels.dtype)
        self.linear = kernels.linear([replace(weights, bias=None) if tp.rank else weights])
        self._tp = tp

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce_(self.linear(x, None if self._tp.rank else residual))


class _FusedMLP:
    """A dense MLP, the norm before it and the residual."""

    def __init__(self, mlp: MLP, norm: Norm, kernels: TorchKernels, tp: Communicator) -> None:
        up = _weights(mlp.up, kernels.dtype)
        if mlp.gate is None:
            self.inner = kernels.activated(up, mlp.activation, norm)
        else:
            self.inner = kernels.gated(_weights(mlp.gate, kernels.dtype), up, mlp.activation, norm)
        self.down = _Reduced(mlp.down, kernels, tp)

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
        self._gate, self._up, self._down = (w.to(dtype) for w in (moe.experts.gate, moe.experts.up, moe.experts.down))
        self._tp = tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x + experts(norm(x))``, [T, H]."""
        normed = self._norm(x)
        y = mix_experts(normed, route(normed, self._router, self._config), self._gate, self._up, self._down)
        if self._tp.rank == 0:
            y += x
        return self._tp.all_reduce_(y)


class _FusedBlock:
    def __init__(self, index: int, block: Block, kernels: TorchKernels, tp: Communicator) -> None:
        attention, dtype = block.attention, kernels.dtype
        self._index = index
        self._head_dim, self._window = attention.head_dim, attention.window
        self._n_heads = attention.q.out_features // attention.head_dim
        self.n_kv_heads = attention.k.out_features // attention.head_dim
        self._q_norm, self._k_norm = (
            None if norm is None else norm.frozen(dtype) for norm in (attention.q_norm, attention.k_norm)
        )
        self._qkv = kernels.linear(
            [_weights(layer, dtype) for layer in (attention.q, attention.k, attention.v)], norm=block.attention_norm
        )
        self._o = _Reduced(attention.o, kernels, tp)
        mlp, norm = block.mlp, block.mlp_norm
        self._mlp: _FusedMLP | _FusedExperts = (
            _FusedExperts(mlp, kernels.norm(norm), dtype, tp)
            if isinstance(mlp, MoE)
            else _FusedMLP(mlp, norm, kernels, tp)
        )

    @property
    def parts(self) -> LayerOps | None:
        """The block's products and window; None if it has experts, or norms of queries and keys."""
        if self._q_norm is not None or not isinstance(self._mlp, _FusedMLP):
            return None
        return LayerOps(self._qkv, self._o.linear, self._mlp.inner, self._mlp.down.linear, self._window)

    def __call__(self, x: torch.Tensor, rope: Rope, attention: CacheAttention) -> torch.Tensor:
        qkv = self._qkv(x, None)
        if self._q_norm is not None and self._k_norm is not None:
            heads = qkv.unflatten(-1, (-1, self._head_dim))
            q, k, v = heads.split((self._n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
            qkv = torch.cat((self._q_norm(q), self._k_norm(k), v), dim=1).flatten(1)
        return self._mlp(self._o(attention.attend(self._index, qkv, rope=rope, window=self._window), x))


def _weights(layer: nn.Linear, dtype: torch.dtype) -> LinearWeights:
    return LinearWeights(effective_weight(layer, dtype), None if layer.bias is None else layer.bias.to(dtype))

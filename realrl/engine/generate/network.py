"""The decoder as generation runs it: fused projections over weights packed for one call.

Shapes: T tokens, H hidden, N heads, K KV heads, D head size, V vocabulary; N and K are those of this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from realrl.cpu import LayerParts, TiledLayers, TiledLinear, attend, can_attend
from realrl.cpu.fused_linear import (
    LinearOp,
    fuse_activated,
    fuse_gated,
    fuse_linears,
    fuse_norm,
    fuse_weight,
    packing_pays,
)
from realrl.engine.generate.attention import CacheAttention
from realrl.engine.generate.experts import FusedExperts
from realrl.engine.groups import ALONE, Communicator
from realrl.model.decoder import MLP, Block, Decoder
from realrl.model.layers.heads import LMHead
from realrl.model.layers.linear import product_dtype
from realrl.model.layers.lora import effective_weight
from realrl.model.layers.moe import MoE
from realrl.model.layers.norm import Norm
from realrl.model.layers.rope import Rope, inverse_frequencies, make_rope


class FusedNetwork:
    """Computes what `decoder` and `head` compute, with fewer and larger operations, for the layers that they hold.

    The weights are read when this is built: it belongs to one generate call and must not outlive a change of them.
    Where the CPU has no bfloat16 arithmetic, a bfloat16 model computes in float32, cache included, from its bfloat16
    weights.

    Every rank of `tp` has all tokens and the same hidden states: rows are never split, as they are in training with
    sequence parallelism.

    Args:
        decoder: a language model, or what one rank holds of it.
        head: its head; None on a pipeline stage that has none.
        tp: the ranks that hold the other slices of the same layers.
        n_rows: what a decode step computes at a time.
        pack: force packed kernels on or off; by default where they pay.
        dtype: of activations and cache; by default the one in which the device multiplies such weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: LMHead | None,
        *,
        tp: Communicator = ALONE,
        n_rows: int = 1,
        pack: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        device, stored = decoder.device, decoder.dtype
        self.config = decoder.config
        self.dtype = product_dtype(device, stored) if dtype is None else dtype
        self._tp = tp
        if pack is None:
            pack = packing_pays(device, self.dtype, n_rows)
        self._inv_freq = inverse_frequencies(decoder.config, device)
        self._embed = None if decoder.embedding is None else decoder.embed
        self._blocks = [_FusedBlock(i, block, self.dtype, tp, pack=pack) for i, block in enumerate(decoder.blocks)]
        self._whole = self._all_together()
        self._head = (
            None if head is None else fuse_weight(head.weight.to(self.dtype), None, pack=pack, norm=decoder.norm)
        )
        self._gather_logits = decoder.parallel.gather_logits

    @property
    def has_head(self) -> bool:
        """Whether there are logits here."""
        return self._head is not None

    @property
    def n_layers(self) -> int:
        """Blocks of this rank."""
        return len(self._blocks)

    @property
    def n_heads(self) -> int:
        """Query heads of this rank."""
        return self._blocks[0].n_heads

    @property
    def n_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self._blocks[0].n_kv_heads

    def _all_together(self) -> TiledLayers | None:
        """The blocks as one kernel, if there is one for each of the parts of all."""
        layers = [block.parts for block in self._blocks]
        whole = [parts for parts in layers if parts is not None]
        if len(whole) < len(layers) or self._tp.n_ranks > 1:
            return None
        return TiledLayers(whole, n_kv_heads=self.n_kv_heads, head_dim=self.config.head_dim)

    def hidden(self, x: torch.Tensor, attention: CacheAttention) -> torch.Tensor:
        """Hidden states [T, H] after this rank's layers, not normalised.

        Args:
            x: int64 [T], the tokens, where the embedding is; elsewhere what the stage before returned.
            attention: counts layers from 0 on every stage.
        """
        positions = attention.tokens.positions
        if self._embed is not None:
            x = self._tp.all_reduce_(self._embed(x, positions).to(self.dtype))
        rope = make_rope(self.config, self._inv_freq, positions, x.dtype)
        if self._whole is not None and attention.cache.fused:
            return self._whole(x, *attention.cache.layers, attention.tokens, rope)
        for block in self._blocks:
            x = block(x, rope, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the whole vocabulary from hidden states of the last layer, on every rank of `tp`."""
        assert self._head is not None, "only the last pipeline stage has logits"
        return self._gather_logits(self._head(hidden, None), self.config.vocab_size)


class _Reduced:
    """A layer cut by columns, and the residual: each rank has a summand, and the first adds what is there once."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, tp: Communicator, *, pack: bool) -> None:
        bias = None if layer.bias is None or tp.rank else layer.bias.to(dtype)
        self.linear: LinearOp = fuse_weight(effective_weight(layer, dtype), bias, pack=pack)
        self._tp = tp

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce_(self.linear(x, None if self._tp.rank else residual))


class _FusedMLP:
    """A dense MLP, the norm before it and the residual."""

    def __init__(self, mlp: MLP, norm: Norm, dtype: torch.dtype, tp: Communicator, *, pack: bool) -> None:
        if mlp.gate is None:
            self.inner = fuse_activated(mlp.up, dtype=dtype, pack=pack, activation=mlp.activation, norm=norm)
        else:
            self.inner = fuse_gated(mlp.gate, mlp.up, dtype=dtype, pack=pack, activation=mlp.activation, norm=norm)
        self.down = _Reduced(mlp.down, dtype, tp, pack=pack)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x), x)


class _FusedBlock:
    def __init__(self, index: int, block: Block, dtype: torch.dtype, tp: Communicator, *, pack: bool) -> None:
        attention = block.attention
        self._index = index
        self._head_dim, self._window = attention.head_dim, attention.window
        self.n_heads = attention.q.out_features // attention.head_dim
        self.n_kv_heads = attention.k.out_features // attention.head_dim
        self._q_norm, self._k_norm = (
            None if norm is None else norm.frozen(dtype) for norm in (attention.q_norm, attention.k_norm)
        )
        self._qkv = fuse_linears(
            [attention.q, attention.k, attention.v], dtype=dtype, pack=pack, norm=block.attention_norm
        )
        self._o = _Reduced(attention.o, dtype, tp, pack=pack)
        mlp, norm = block.mlp, block.mlp_norm
        self._mlp: _FusedMLP | FusedExperts = (
            FusedExperts(mlp, fuse_norm(norm, dtype, pack=pack), dtype, tp)
            if isinstance(mlp, MoE)
            else _FusedMLP(mlp, norm, dtype, tp, pack=pack)
        )

    @property
    def parts(self) -> LayerParts | None:
        """What there is a kernel for as a whole; None if there are other parts."""
        if self._q_norm is not None or not isinstance(self._mlp, _FusedMLP) or not can_attend(self._head_dim):
            return None
        products = self._qkv, self._o.linear, self._mlp.inner, self._mlp.down.linear
        tiled = [product for product in products if isinstance(product, TiledLinear)]
        return LayerParts(*tiled, window=self._window) if len(tiled) == len(products) else None

    def __call__(self, x: torch.Tensor, rope: Rope, attention: CacheAttention) -> torch.Tensor:
        qkv = self._qkv(x, None)
        if self._q_norm is not None and self._k_norm is not None:
            heads = qkv.unflatten(-1, (-1, self._head_dim))
            q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
            qkv = torch.cat((self._q_norm(q), self._k_norm(k), v), dim=1).flatten(1)
        return self._mlp(self._o(self._attend(qkv, rope, attention), x))

    def _attend(self, qkv: torch.Tensor, rope: Rope, attention: CacheAttention) -> torch.Tensor:
        if not attention.cache.fused:
            return attention.attend(self._index, qkv, rope=rope, window=self._window)
        keys, values = attention.cache.layer(self._index)
        scale = self._head_dim**-0.5
        return attend(qkv, keys, values, attention.tokens, rope=rope, window=self._window, scale=scale)

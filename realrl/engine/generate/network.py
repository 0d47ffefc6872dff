"""The decoder as generation runs it: fused projections over weights packed for one call.

Shapes: T tokens, H hidden, N heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from realrl.engine.linear import can_pack, fuse_gated, fuse_linears, fuse_weight
from realrl.model.decoder import AttentionOp, Block, Decoder
from realrl.model.heads import LMHead
from realrl.model.rope import inverse_frequencies, rope_table, rotate


class FusedNetwork:
    """Computes what `decoder` and `head` compute, with fewer and larger operations.

    The weights are read when this is built: it belongs to one generate call and must not outlive a change of them.

    Args:
        decoder: a language model.
        head: its head.
        pack: force packed kernels on or off; by default where they pay.
    """

    def __init__(self, decoder: Decoder, head: LMHead, *, pack: bool | None = None) -> None:
        weight = decoder.embedding.weight
        if pack is None:
            pack = can_pack(weight.device, weight.dtype)
        self.config = decoder.config
        self._embedding = weight
        self._inv_freq = inverse_frequencies(decoder.config, weight.device)
        self._blocks = [_FusedBlock(block, decoder.config.n_heads, pack=pack) for block in decoder.blocks]
        self._norm = decoder.norm
        self._head = fuse_weight(head.weight, None, pack=pack)

    def hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionOp) -> torch.Tensor:
        """Final hidden states [T, H] of tokens [T] at positions [T]."""
        x = F.embedding(input_ids, self._embedding)
        rope = rope_table(self._inv_freq, positions, x.dtype)
        for block in self._blocks:
            x = block(x, rope, attention)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] in the parameters' dtype."""
        return self._head(hidden, None)


class _FusedBlock:
    def __init__(self, block: Block, n_heads: int, *, pack: bool) -> None:
        attention, mlp = block.attention, block.mlp
        self._layer_index = block.layer_index
        self._n_heads, self._head_dim = n_heads, attention.head_dim
        self._n_kv_heads = attention.k.out_features // attention.head_dim
        self._attention_norm, self._mlp_norm = block.attention_norm, block.mlp_norm
        self._qkv = fuse_linears([attention.q, attention.k, attention.v], pack=pack)
        self._o = fuse_linears([attention.o], pack=pack)
        self._gated = fuse_gated(mlp.gate, mlp.up, pack=pack)
        self._down = fuse_linears([mlp.down], pack=pack)

    def __call__(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: AttentionOp
    ) -> torch.Tensor:
        n_heads, n_kv_heads = self._n_heads, self._n_kv_heads
        qkv = self._qkv(self._attention_norm(x), None).unflatten(-1, (-1, self._head_dim))  # [T, N + 2 K, D]
        q, k = rotate(qkv[:, :-n_kv_heads], *rope).split((n_heads, n_kv_heads), dim=1)
        attended = attention.attend(self._layer_index, q, k, qkv[:, -n_kv_heads:])
        x = self._o(attended.flatten(-2), x)
        return self._down(self._gated(self._mlp_norm(x)), x)

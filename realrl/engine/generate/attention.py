"""Attention with the KV cache: whole prompts at once, or one new token per row.

Shapes: B rows, T tokens, N heads, K KV heads, D head size, L tokens of the longest row. Both store the new keys and
values in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from realrl.engine.generate.cache import KVCache


class PrefillAttention:
    """Packed prompts into consecutive rows of the cache.

    Only attention sees padding, on the right, where causality hides it from every real token.

    Args:
        cache: with room for the longest prompt.
        first_slot: of the first prompt.
        seqlens: tokens of each prompt, in packing order.
    """

    def __init__(self, cache: KVCache, first_slot: int, seqlens: Sequence[int], device: torch.device) -> None:
        self._cache = cache
        self._n_rows, self._longest = len(seqlens), max(seqlens)
        self._is_even = min(seqlens) == self._longest
        lengths = torch.tensor(seqlens, device=device)
        rows = torch.repeat_interleave(torch.arange(len(seqlens), device=device), lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        self.positions = torch.arange(len(rows), device=device) - starts
        self._padded = rows * self._longest + self.positions
        self._slots = rows + first_slot

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [T, N, D] over k, v [T, K, D]; returns [T, N, D]."""
        self._cache.write(layer_index, self._slots, self.positions, k, v)
        out = F.scaled_dot_product_attention(
            self._pad(q), self._pad(k), self._pad(v), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.transpose(1, 2).reshape(-1, *q.shape[1:])
        return out if self._is_even else out[self._padded]

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] -> [B, heads, L, D]."""
        if not self._is_even:
            x = x.new_zeros(self._n_rows * self._longest, *x.shape[1:]).index_copy_(0, self._padded, x)
        return x.unflatten(0, (self._n_rows, self._longest)).transpose(1, 2)


class DecodeAttention:
    """One token for each of the first rows of the cache.

    Args:
        cache: with room for one more token in every row.
        lengths: int64 [B], tokens that each row holds already.
        n_heads: N.
        dtype: of queries, keys and values.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor, *, n_heads: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._n_rows = len(lengths)
        self._slots = torch.arange(len(lengths), device=lengths.device)
        self._positions = lengths
        beyond = torch.arange(cache.capacity, device=lengths.device) > lengths[:, None]
        mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device).masked_fill_(beyond, -torch.inf)
        n_groups = cache.shape.n_kv_heads
        self._mask = mask.repeat_interleave(n_groups, 0)[:, None].expand(-1, n_heads // n_groups, -1).contiguous()
        self._scale = cache.shape.head_dim**-0.5

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [B, N, D] over the cache and k, v [B, K, D]; returns [B, N, D]."""
        self._cache.write(layer_index, self._slots, self._positions, k, v)
        keys, values = self._cache.view(layer_index, self._n_rows)
        # the heads that share a KV head stand where query positions would: nothing is repeated
        queries = q.reshape(len(keys), -1, q.shape[-1])  # [B * K, N / K, D]
        scores = torch.baddbmm(self._mask, queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)

"""Attention over the KV cache: whole prompts at once, or one new token per row.

Shapes: B rows, T tokens, N heads, K KV heads, D head size, L tokens of the longest row. Both store the new keys and
values in the cache before they attend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from realrl.engine.generate.cache import KVCache


class PrefillAttention:
    """Packed prompts into consecutive, empty rows of the cache.

    Only attention sees padding, on the right, where causality hides it from every real token.

    Args:
        cache: with room for the longest prompt.
        first_slot: of the first prompt.
        seqlens: tokens of each prompt, in packing order.
    """

    def __init__(self, cache: KVCache, first_slot: int, seqlens: Sequence[int], device: torch.device) -> None:
        self._cache = cache
        self._rows = slice(first_slot, first_slot + len(seqlens))
        self._n_rows, self._longest = len(seqlens), max(seqlens)
        self._is_even = min(seqlens) == self._longest
        lengths = torch.tensor(seqlens, device=device)
        rows = torch.repeat_interleave(torch.arange(len(seqlens), device=device), lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        self.positions = torch.arange(len(rows), device=device) - starts
        self._padded = rows * self._longest + self.positions
        self._indices = cache.flat_indices(rows + first_slot, self.positions)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [T, N, D] over k, v [T, K, D]; returns [T, N, D]."""
        self._cache.write(layer_index, self._indices, k, v)
        keys, values = self._cache.view(layer_index, self._rows, self._longest)
        n_heads, head_dim = q.shape[1:]
        if not self._is_even:
            q = q.new_zeros(self._n_rows * self._longest, n_heads, head_dim).index_copy_(0, self._padded, q)
        queries = q.reshape(self._n_rows, self._longest, n_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).reshape(-1, n_heads, head_dim)
        return out if self._is_even else out[self._padded]


class DecodeAttention:
    """One token for each of the first rows of the cache.

    Args:
        cache: with room for one more token in every row.
        lengths: int64 [B], tokens that each row holds already.
        longest: the largest of `lengths`.
        dtype: of queries, keys and values.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor, longest: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._n_rows, self._n_tokens = len(lengths), longest + 1
        self.positions = lengths
        self._indices = cache.flat_indices(torch.arange(len(lengths), device=lengths.device), lengths)
        beyond = torch.arange(self._n_tokens, device=lengths.device) > lengths[:, None]
        self._mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device).masked_fill_(beyond, -torch.inf)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [B, N, D] over the cache and k, v [B, K, D]; returns [B, N, D]."""
        self._cache.write(layer_index, self._indices, k, v)
        keys, values = self._cache.view(layer_index, slice(0, self._n_rows), self._n_tokens)
        # the heads that share a KV head stand where query positions would: nothing is repeated
        queries = q.reshape(self._n_rows, keys.shape[1], -1, q.shape[-1])
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask[:, None, None, :])
        return out.reshape(q.shape)

"""Attention with the KV cache: whole prompts at once, or one new token per row.

Shapes: B rows, T tokens, N heads, K KV heads, D head size, L tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional as F

from realrl.cpu import NewTokens
from realrl.engine.generate.cache import CacheShape, KVCache
from realrl.model.layers.attention import window_mask
from realrl.model.layers.rope import Rope, rotate


class CacheAttention(Protocol):
    """Puts the keys and values of new tokens into the cache and lets the tokens see what is there for their row.

    Attributes:
        cache: of all layers.
        tokens: where they stand in it.
    """

    cache: KVCache
    tokens: NewTokens

    def attend(self, layer_index: int, qkv: torch.Tensor, *, rope: Rope, window: int | None = None) -> torch.Tensor:
        """Attention [T, N D] of tokens with queries, keys and values qkv [T, (N + 2 K) D], not rotated yet.

        The twin of `kernels.attend`, which is to be used where the cache is for it.

        Args:
            window: how many tokens, itself included, each one sees; None for all earlier ones.
        """


class PrefillAttention:
    """Packed prompts into consecutive rows of the cache.

    Only attention sees padding, on the right, where causality hides it from every real token.

    Args:
        cache: with room for the longest prompt.
        first_slot: of the first prompt.
        seqlens: tokens of each prompt, in packing order.
    """

    def __init__(self, cache: KVCache, first_slot: int, seqlens: Sequence[int], device: torch.device) -> None:
        self.cache = cache
        self._n_rows, self._longest = len(seqlens), max(seqlens)
        self._is_even = min(seqlens) == self._longest
        lengths = torch.tensor(seqlens, device=device)
        rows = torch.repeat_interleave(torch.arange(len(seqlens), device=device), lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        positions = torch.arange(len(rows), device=device) - starts
        self._padded = rows * self._longest + positions
        self.tokens = NewTokens(positions, rows + first_slot)
        self._masks: dict[int, torch.Tensor] = {}  # by window

    def attend(self, layer_index: int, qkv: torch.Tensor, *, rope: Rope, window: int | None = None) -> torch.Tensor:
        """See `CacheAttention`."""
        q, k, v = _rotated(qkv, rope, self.cache.shape)
        self.cache.write(layer_index, self.tokens, k, v)
        mask = None
        if window is not None and window < self._longest:
            if window not in self._masks:
                self._masks[window] = window_mask(self._longest, window, q.device)
            mask = self._masks[window]
        out = F.scaled_dot_product_attention(
            self._pad(q), self._pad(k), self._pad(v),
            attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out = out.transpose(1, 2).reshape(self._n_rows * self._longest, -1)
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
        self.cache = cache
        self.tokens = NewTokens(lengths)
        self._n_rows = len(lengths)
        self._n_heads, self._dtype = n_heads, dtype
        self._masks: dict[int | None, torch.Tensor] = {}  # by window
        self._scale = cache.shape.head_dim**-0.5

    def attend(self, layer_index: int, qkv: torch.Tensor, *, rope: Rope, window: int | None = None) -> torch.Tensor:
        """See `CacheAttention`."""
        q, k, v = _rotated(qkv, rope, self.cache.shape)
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        self.cache.write(layer_index, self.tokens, k, v)
        keys, values = self.cache.view(layer_index, self._n_rows)
        # the heads that share a KV head stand where query positions would: nothing is repeated
        queries = q.reshape(len(keys), -1, q.shape[-1])  # [B * K, N / K, D]
        scores = torch.baddbmm(self._masks[window], queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(len(q), -1)

    def _mask(self, window: int | None) -> torch.Tensor:
        """[B * K, N / K, C]: -inf where a row's new token does not see."""
        lengths, n_groups = self.tokens.positions[:, None], self.cache.shape.n_kv_heads
        columns = torch.arange(self.cache.capacity, device=lengths.device)
        is_hidden = columns > lengths
        if window is not None:
            is_hidden |= columns <= lengths - window
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=lengths.device).masked_fill_(
            is_hidden, -torch.inf
        )
        return mask.repeat_interleave(n_groups, 0)[:, None].expand(-1, self._n_heads // n_groups, -1).contiguous()


def _rotated(qkv: torch.Tensor, rope: Rope, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, N, D], k and v [T, K, D]."""
    heads, n_kv_heads = qkv.unflatten(-1, (-1, shape.head_dim)), shape.n_kv_heads
    qk, v = heads[:, :-n_kv_heads], heads[:, -n_kv_heads:]
    if rope is not None:
        qk = rotate(qk, *rope)
    return qk[:, :-n_kv_heads], qk[:, -n_kv_heads:], v

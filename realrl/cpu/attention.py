"""Attention with the KV cache: whole prompts at once, or one new token per row.

Shapes: B rows, T tokens, N heads, K KV heads, D head size, C capacity of the cache, L tokens of the longest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from realrl.cpu.cache import KVCache, NewTokens
from realrl.cpu.reference import Rope, ScoreTerms, attend_by_scores, rotate, window_mask

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class CacheAttention:
    """Puts the keys and values of new tokens into the cache and attends to the tokens of their rows there.

    Args:
        cache: a cache with room for the tokens.
        tokens: places of the new tokens.
    """

    def __init__(self, cache: KVCache, tokens: NewTokens) -> None:
        self.cache, self.tokens = cache, tokens

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        *,
        rope: Rope,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attention [T, N D] of tokens with queries, keys and values qkv [T, (N + 2 K) D], not rotated yet.

        Args:
            window: number of tokens, itself included, that each one sees; None for all earlier ones.
            terms: treatment of the scores; None for plain ones.
        """
        raise NotImplementedError


class PrefillAttention(CacheAttention):
    """Attention of whole prompts, with places from `NewTokens.of_prompts`.

    Padding exists inside of attention only, on the right, where causality hides it from every real token.
    """

    def __init__(self, cache: KVCache, tokens: NewTokens) -> None:
        super().__init__(cache, tokens)
        self._n_rows, self._longest = len(tokens.seqlens), max(tokens.seqlens)
        self._is_even = min(tokens.seqlens) == self._longest
        self._padded = (tokens.slots - tokens.slots[0]) * self._longest + tokens.positions
        self._masks: dict[int, torch.Tensor] = {}  # by window

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        *,
        rope: Rope,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        q, k, v = _rotated(qkv, rope, self.cache.layer(layer_index)[0])
        self.cache.write(layer_index, self.tokens, k, v)
        mask, n = None, self._longest
        if terms is not None or (window is not None and window < n):
            window = n if window is None else window
            if window not in self._masks:
                self._masks[window] = window_mask(n, window, q.device)
            mask = self._masks[window]
        q, k, v = (self._pad(x) for x in (q, k, v))
        if terms is None or mask is None:
            out = attend_grouped(q, k, v, mask, repeats=repeats_heads(q.device))
        else:
            out = attend_by_scores(q, k, v, ~mask, terms)
        out = out.transpose(1, 2).reshape(self._n_rows * self._longest, -1)
        return out if self._is_even else out[self._padded]

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad [T, heads, D] to [B, heads, L, D]."""
        if not self._is_even:
            x = x.new_zeros(self._n_rows * self._longest, *x.shape[1:]).index_copy_(0, self._padded, x)
        return x.unflatten(0, (self._n_rows, self._longest)).transpose(1, 2)


class DecodeAttention(CacheAttention):
    """Attention of one token for each of the first rows of the cache, at the ends of the rows."""

    def __init__(self, cache: KVCache, tokens: NewTokens) -> None:
        super().__init__(cache, tokens)
        self._n_rows = len(tokens.positions)
        self._masks: dict[int | None, torch.Tensor] = {}  # by window

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        *,
        rope: Rope,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        q, k, v = _rotated(qkv, rope, self.cache.layer(layer_index)[0])
        self.cache.write(layer_index, self.tokens, k, v)
        keys, values = self.cache.view(layer_index, self._n_rows)
        # the heads that share a KV head stand where query positions would: nothing is repeated
        queries = q.reshape(len(keys), -1, q.shape[-1])  # [B * K, N / K, D]
        if window not in self._masks:
            self._masks[window] = self._mask(window, queries, capacity=keys.shape[1])
        mask = self._masks[window]
        if terms is None:
            weights = torch.softmax(decode_scores(queries, keys, mask), dim=-1)
        else:
            sinks = None if terms.sinks is None else terms.sinks.repeat(len(q)).view(len(queries), -1, 1)
            weights = terms.weights(decode_scores(queries, keys, torch.zeros_like(mask)), mask < 0, sinks)
        return torch.bmm(weights.to(values.dtype), values).view(len(q), -1)

    def _mask(self, window: int | None, queries: torch.Tensor, *, capacity: int) -> torch.Tensor:
        """The mask [B * K, N / K, C]: 0 where a row's new token sees, -inf elsewhere."""
        lengths = self.tokens.positions[:, None]
        columns = torch.arange(capacity, device=lengths.device)
        is_hidden = columns > lengths
        if window is not None:
            is_hidden |= columns <= lengths - window
        dtype = torch.promote_types(queries.dtype, torch.float32)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=lengths.device).masked_fill_(is_hidden, -torch.inf)
        n_groups = len(queries) // self._n_rows
        return mask.repeat_interleave(n_groups, 0)[:, None].expand(-1, queries.shape[1], -1).contiguous()


@dataclass(frozen=True)
class FilledRows:
    """The filled parts of the first B rows of a token-major cache, as FlashAttention reads them.

    Attributes:
        queries: int32 [B + 1], 0 to B: one query for each row.
        starts: int32 [B + 1], the first token of each row among those of all rows, and their end.
        n_tokens: int32 [B], tokens of each row, the query's own included.
        capacity: C.
    """

    queries: torch.Tensor
    starts: torch.Tensor
    n_tokens: torch.Tensor
    capacity: int

    @classmethod
    def of(cls, positions: torch.Tensor, capacity: int) -> FilledRows:
        """Make the rows that end with tokens at `positions` [B]."""
        queries = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return cls(queries, queries * capacity, (positions + 1).int(), capacity)


def flash_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: FilledRows, window: int | None
) -> torch.Tensor:
    """Attention of one query per row by FlashAttention-2 (Dao 2023), on CUDA; returns [B, N, D].

    Args:
        q: [B, N, D].
        k, v: [B * C, K, D].
        window: number of last tokens that the query sees; None for all.
    """
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        rows.queries,
        rows.starts,
        1,
        rows.capacity,
        0.0,
        False,
        False,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        seqused_k=rows.n_tokens,
    )[0]
    return out


class FlashDecodeAttention(CacheAttention):
    """Attention of one token for each of the first rows, which reads only the filled part of a token-major cache."""

    def __init__(self, cache: KVCache, tokens: NewTokens) -> None:
        super().__init__(cache, tokens)
        self._rows = FilledRows.of(tokens.positions, cache.capacity)

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        *,
        rope: Rope,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        assert terms is None, "a model with terms of scores has another cache"
        keys, values = self.cache.layer(layer_index)
        q, k, v = _rotated(qkv, rope, keys)
        self.cache.write(layer_index, self.tokens, k, v)
        keys, values = (x.transpose(1, 2)[: len(q)].flatten(0, 1) for x in (keys, values))
        return flash_decode(q, keys, values, self._rows, window).reshape(len(q), -1)


def plain_attention(cache: KVCache, tokens: NewTokens) -> CacheAttention:
    """Make the attention of new tokens by torch's operations; the cache has room for them, and no garbage."""
    if tokens.seqlens:
        return PrefillAttention(cache, tokens)
    return FlashDecodeAttention(cache, tokens) if cache.token_major else DecodeAttention(cache, tokens)


def fits_flash(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> bool:
    """True if FlashAttention-2 attends to queries of this dtype and head size on a device of this capability."""
    return dtype in _FLASH_DTYPES and head_dim <= 256 and head_dim % 8 == 0 and capability >= (8, 0)


def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the device is one that `fits_flash`."""
    if device.type == "cpu" or dtype not in _FLASH_DTYPES:  # only then is there a capability to ask for
        return False
    return fits_flash(dtype, head_dim, torch.get_device_module(device).get_device_capability(device))


def repeats_heads(device: torch.device) -> bool:
    """True if attention to grouped heads repeats keys and values here.

    On CUDA only FlashAttention groups heads, without a mask and in half precision. Any other call with grouped heads
    goes to the kernel that keeps all scores.
    """
    return device.type != "cpu"


def attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, repeats: bool
) -> torch.Tensor:
    """Attention of q [G, N, L, D] over k, v [G, K, L, D], N a multiple of K; returns [G, N, L, D].

    Args:
        mask: bool [L, L], True where a row sees a column; None for causal attention.
        repeats: repeat keys and values for the heads that share them, instead of leaving it to the kernel.
    """
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and repeats:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped and not repeats
    )


def decode_scores(queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores [B * K, N / K, C] of queries [B * K, N / K, D] and keys [B * K, C, D], float32 also in half precision.

    Rounded to half precision, scores would have ten times the error. FlashAttention, which trains, keeps float32.

    Args:
        mask: float32 [B * K, N / K, C], added to the scores.
    """
    scale, keys = queries.shape[-1] ** -0.5, keys.transpose(1, 2)
    if queries.dtype == mask.dtype:
        return torch.baddbmm(mask, queries, keys, alpha=scale)
    if queries.device.type == "cpu":  # only CUDA multiplies into another dtype
        return torch.baddbmm(mask, queries.to(mask.dtype), keys.to(mask.dtype), alpha=scale)
    return torch.bmm(queries, keys, out_dtype=mask.dtype).mul_(scale).add_(mask)


def _rotated(qkv: torch.Tensor, rope: Rope, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv into q [T, N, D], k and v [T, K, D] as `keys` [rows, K, C, D] are shaped, and rotate q and k."""
    _, n_kv_heads, _, head_dim = keys.shape
    heads = qkv.unflatten(-1, (-1, head_dim))
    qk, v = heads[:, :-n_kv_heads], heads[:, -n_kv_heads:]
    if rope is not None:
        qk = rotate(qk, *rope)
    return qk[:, :-n_kv_heads], qk[:, -n_kv_heads:], v

"""Keys and values of the tokens seen so far, one row per response in the making.

Shapes: B rows, T tokens, K KV heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

# Attention by batched products reads rows to their capacity, because these are fastest on whole buffers.
# Capacity then stays close to the longest row: it grows by an eighth, and by this many tokens at least.
MIN_GROWTH = 32

SavedRow = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [K, tokens, D] per layer."""


@dataclass(frozen=True)
class NewTokens:
    """Places of new tokens in the KV cache.

    Attributes:
        positions: int64 [T], positions in the rows; contiguous.
        rows: int64 [T], contiguous; None for the first T rows, one token each.
        seqlens: length of each prompt if the tokens are whole prompts in consecutive rows; else empty.
    """

    positions: torch.Tensor
    rows: torch.Tensor | None = None
    seqlens: tuple[int, ...] = ()

    @classmethod
    def of_prompts(cls, seqlens: Sequence[int], *, first_row: int, device: torch.device) -> NewTokens:
        """Make the places of packed prompts in consecutive rows from `first_row` on."""
        lengths = torch.tensor(seqlens, device=device)
        rows = torch.repeat_interleave(torch.arange(len(seqlens), device=device), lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return cls(torch.arange(len(rows), device=device) - starts, rows + first_row, tuple(seqlens))

    @cached_property
    def slots(self) -> torch.Tensor:
        """`rows` as a tensor, also where it is None."""
        return torch.arange(len(self.positions), device=self.positions.device) if self.rows is None else self.rows


@dataclass(frozen=True)
class CacheShape:
    """Bounds of a cache; `max_tokens` bounds the growth of every row."""

    n_layers: int
    max_rows: int
    n_kv_heads: int
    head_dim: int
    max_tokens: int


class KVCache:
    """Rows of keys and values, with capacity up to a bound.

    Where capacity grows with the longest row, it does so layer by layer, so that at most one layer exists twice. Where
    attention reads only filled places, rows have all their capacity from the start: the system gives memory only to
    pages that are written.

    Args:
        shape: bounds; memory never exceeds `shape` x 2 x the size of `dtype`, plus one layer while growing.
        dtype: dtype of keys and values.
        device: device of keys and values.
        grows: True if capacity grows with the longest row.
        growth: least number of tokens by which it grows.
        token_major: True if a token's keys of all heads lie together, and not a head's keys of all tokens.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        grows: bool,
        growth: int = MIN_GROWTH,
        token_major: bool = False,
    ) -> None:
        self.shape = shape
        self.token_major = token_major
        self._grows, self._growth = grows, growth
        self.capacity = 0
        # zeros, not garbage: masked values are multiplied by a weight of 0, and 0 x NaN is NaN
        empty = self._empty(torch.zeros(0, dtype=dtype, device=device), 0)
        self._keys = [empty] * shape.n_layers
        self._values = [empty] * shape.n_layers

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._keys + self._values)

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in every row.

        Raises:
            ValueError: `n_tokens` is more than `shape.max_tokens`.
        """
        if n_tokens > self.shape.max_tokens:
            raise ValueError(f"{n_tokens} tokens asked of a KV cache bounded at {self.shape.max_tokens}")
        if n_tokens <= self.capacity:
            return
        if not self._grows:
            self.capacity = self.shape.max_tokens
            for layers in (self._keys, self._values):
                layers[:] = [self._empty(old, self.capacity) for old in layers]
            return
        grown = self.capacity + max(self._growth, self.capacity // 8)
        self.capacity = min(self.shape.max_tokens, max(n_tokens, grown))
        for layers in (self._keys, self._values):
            for i, old in enumerate(layers):
                layers[i] = self._empty(old, self.capacity).zero_()
                layers[i][:, :, : old.shape[2]] = old

    def _empty(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        """Make room [rows, K, capacity, D] for keys or values of one layer, with garbage."""
        n_rows, n_heads, head_dim = self.shape.max_rows, self.shape.n_kv_heads, self.shape.head_dim
        if self.token_major:
            return like.new_empty(n_rows, capacity, n_heads, head_dim).transpose(1, 2)
        return like.new_empty(n_rows, n_heads, capacity, head_dim)

    def write(self, layer_index: int, tokens: NewTokens, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the tokens' k and v [T, K, D]; the room must have been reserved."""
        self._keys[layer_index][tokens.slots, :, tokens.positions] = k
        self._values[layer_index][tokens.slots, :, tokens.positions] = v

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, K, C, D] of one layer, without copying."""
        return self._keys[layer_index], self._values[layer_index]

    @property
    def layers(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Keys and values of every layer, in the form of `layer`."""
        return self._keys, self._values

    def view(self, layer_index: int, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B * K, C, D] of the first rows, without copying."""
        return self._keys[layer_index][:n_rows].flatten(0, 1), self._values[layer_index][:n_rows].flatten(0, 1)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` of row `source` over those of row `target`."""
        for tensor in self._keys + self._values:
            tensor[target, :, :n_tokens] = tensor[source, :, :n_tokens]

    def save(self, slot: int, n_tokens: int) -> SavedRow:
        """Copy a row's first `n_tokens` out, for `load`."""
        layers = zip(self._keys, self._values, strict=True)
        return [(k[slot, :, :n_tokens].clone(), v[slot, :, :n_tokens].clone()) for k, v in layers]

    def load(self, slot: int, saved: SavedRow) -> None:
        """Put a saved row into a slot."""
        for k, v, (saved_k, saved_v) in zip(self._keys, self._values, saved, strict=True):
            k[slot, :, : saved_k.shape[1]] = saved_k
            v[slot, :, : saved_v.shape[1]] = saved_v

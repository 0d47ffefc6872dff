"""Keys and values of the tokens seen so far, one row per response in the making.

Shapes: B rows, K KV heads, C capacity in tokens, D head size. Keys are stored transposed, [B, K, D, C], values as
[B, K, C, D]: both products of a decode step then read along their last dimension, which halves its time on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_CAPACITY = 64

SavedRow = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys [K, D, tokens] and values [K, tokens, D] per layer."""


@dataclass(frozen=True)
class CacheShape:
    """What one cache holds; `max_tokens` bounds the growth of every row."""

    n_layers: int
    max_rows: int
    n_kv_heads: int
    head_dim: int
    max_tokens: int


class KVCache:
    """Rows of keys and values whose capacity grows, by doubling, up to a bound.

    Growth goes layer by layer, so that at most one layer exists twice.

    Args:
        shape: bounds; memory never exceeds `shape` x 2 x the size of `dtype`, plus one layer while growing.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.capacity = 0
        self._dtype, self._device = dtype, device
        self._keys = [self._zeros_k(0) for _ in range(shape.n_layers)]
        self._values = [self._zeros_v(0) for _ in range(shape.n_layers)]

    # zeros, not garbage: padded positions are multiplied by a weight of 0, and 0 x NaN is NaN
    def _zeros_k(self, capacity: int) -> torch.Tensor:
        shape = self.shape
        size = (shape.max_rows, shape.n_kv_heads, shape.head_dim, capacity)
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def _zeros_v(self, capacity: int) -> torch.Tensor:
        shape = self.shape
        size = (shape.max_rows, shape.n_kv_heads, capacity, shape.head_dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._keys + self._values)

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in every row.

        Raises:
            ValueError: more than `shape.max_tokens`.
        """
        if n_tokens > self.shape.max_tokens:
            raise ValueError(f"{n_tokens} tokens asked of a KV cache bounded at {self.shape.max_tokens}")
        if n_tokens <= self.capacity:
            return
        used = self.capacity
        self.capacity = min(self.shape.max_tokens, max(n_tokens, 2 * used, _FIRST_CAPACITY))
        for i, (old_k, old_v) in enumerate(zip(self._keys, self._values, strict=True)):
            self._keys[i] = self._zeros_k(self.capacity)
            self._keys[i][..., :used] = old_k
            self._values[i] = self._zeros_v(self.capacity)
            self._values[i][:, :, :used] = old_v

    def write(
        self, layer_index: int, slots: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store k, v [N, K, D] of token n at (slots[n], positions[n]); the room must have been reserved."""
        self._keys[layer_index][slots, :, :, positions] = k
        self._values[layer_index][slots, :, positions] = v

    def view(self, layer_index: int, n_rows: int, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B * K, D, n_tokens] and values [B * K, n_tokens, D] of the first rows, without copying."""
        k, v = self._keys[layer_index][:n_rows].flatten(0, 1), self._values[layer_index][:n_rows].flatten(0, 1)
        return k[:, :, :n_tokens], v[:, :n_tokens]

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` of one row over another's."""
        for k, v in zip(self._keys, self._values, strict=True):
            k[target, :, :, :n_tokens] = k[source, :, :, :n_tokens]
            v[target, :, :n_tokens] = v[source, :, :n_tokens]

    def save(self, slot: int, n_tokens: int) -> SavedRow:
        """A copy of a row's first `n_tokens`, for `load`."""
        layers = zip(self._keys, self._values, strict=True)
        return [(k[slot, :, :, :n_tokens].clone(), v[slot, :, :n_tokens].clone()) for k, v in layers]

    def load(self, slot: int, saved: SavedRow) -> None:
        """Put a saved row into a slot."""
        for k, v, (saved_k, saved_v) in zip(self._keys, self._values, saved, strict=True):
            k[slot, :, :, : saved_k.shape[-1]] = saved_k
            v[slot, :, : saved_v.shape[-2]] = saved_v

"""Keys and values of the tokens seen so far, one row per response in the making.

Shapes: B rows, K KV heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realrl.engine.generate.schedule import Move

_FIRST_CAPACITY = 64


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
        # zeros, not garbage: padded positions are multiplied by a weight of 0, and 0 x NaN is NaN
        self._layers = [
            torch.zeros(2, shape.max_rows, shape.n_kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
            for _ in range(shape.n_layers)
        ]

    @property
    def size_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in every row.

        Raises:
            ValueError: more than `shape.max_tokens`.
        """
        if n_tokens > self.shape.max_tokens:
            raise ValueError(f"{n_tokens} tokens asked of a KV cache bounded at {self.shape.max_tokens}")
        if n_tokens <= self.capacity:
            return
        grown = min(self.shape.max_tokens, max(n_tokens, 2 * self.capacity, _FIRST_CAPACITY))
        for i, old in enumerate(self._layers):
            new = old.new_zeros(*old.shape[:3], grown, old.shape[4])
            new[..., : self.capacity, :] = old
            self._layers[i] = new
        self.capacity = grown

    def flat_indices(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [N * K]: where `write` puts token n of the N tokens at (slots[n], positions[n]), head by head."""
        heads = torch.arange(self.shape.n_kv_heads, device=slots.device)
        rows = slots[:, None] * self.shape.n_kv_heads + heads
        return (rows * self.capacity + positions[:, None]).flatten()

    def write(self, layer_index: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [N, K, D] at `indices` of `flat_indices`, made after the last `reserve`."""
        layer = self._layers[layer_index]
        for target, values in zip(layer, (k, v), strict=True):
            target.view(-1, self.shape.head_dim).index_copy_(0, indices, values.reshape(-1, self.shape.head_dim))

    def view(self, layer_index: int, rows: slice, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some rows, [B, K, n_tokens, D] each, without copying."""
        k, v = self._layers[layer_index][:, rows, :, :n_tokens]
        return k, v

    def move(self, move: Move, n_tokens: int) -> None:
        """Copy the first `n_tokens` of one row over another's."""
        for layer in self._layers:
            layer[:, move.target, :, :n_tokens] = layer[:, move.source, :, :n_tokens]

    def save(self, slot: int, n_tokens: int) -> list[torch.Tensor]:
        """A copy of a row's first `n_tokens`, per layer, for `load`."""
        return [layer[:, slot, :, :n_tokens].clone() for layer in self._layers]

    def load(self, slot: int, saved: list[torch.Tensor]) -> None:
        """Put a saved row into a slot."""
        for layer, values in zip(self._layers, saved, strict=True):
            layer[:, slot, :, : values.shape[-2]] = values

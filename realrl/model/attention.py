"""Causal attention over packed sequences of different lengths, for passes without a KV cache.

T tokens in S sequences, N heads, K KV heads, D head size, L the longest sequence of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_MAX_WASTE = 1.25  # padded over real score entries of a group of sequences


class PackedAttention:
    """Each token sees itself and the earlier tokens of its own sequence.

    Sequences of similar length are padded together inside this operation only: a causal mask keeps the padding, which
    stands at the end, out of every real row, and padded rows are dropped.

    Args:
        seqlens: tokens of each sequence, in packing order; zero-length sequences are allowed.
        device: where the tokens are.
    """

    def __init__(self, seqlens: Sequence[int], device: torch.device | None = None) -> None:
        starts = [0]
        for n in seqlens:
            starts.append(starts[-1] + n)
        self._groups = [_Group([(starts[i], seqlens[i]) for i in group], device) for group in _group(seqlens)]
        self._order: torch.Tensor | None = None
        if len(self._groups) > 1 and self._groups:
            taken = torch.cat([group.tokens for group in self._groups])
            self._order = torch.empty_like(taken)
            self._order[taken] = torch.arange(len(taken), device=device)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [T, N, D] over k, v [T, K, D]; returns [T, N, D]."""
        if not self._groups:
            return q
        outputs = [group.attend(q, k, v) for group in self._groups]
        return outputs[0] if self._order is None else torch.cat(outputs).index_select(0, self._order)

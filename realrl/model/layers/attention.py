"""Causal attention over packed sequences of different lengths, for passes without a KV cache.

T tokens in S sequences, N heads, K KV heads, D head size; a group is G sequences padded to the longest of them, L.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from realrl.cpu import (
    ScoreTerms,
    attend_by_scores,
    attend_grouped,
    attention_dtype,
    has_flash,
    repeats_heads,
    window_mask,
)
from realrl.plan.samples.prefixes import CALL_COST


class PackedAttention:
    """Attention of each token to itself and the earlier tokens of its own sequence, or those of them in a window.

    On CUDA in half precision, the variable-length kernel reads the packed tokens as they are, where it supports device
    and head size. Elsewhere, sequences of similar length are padded together inside this operation only: the padding
    stands at the end, where the causal mask keeps it out of every real row, and its own rows are dropped.

    Args:
        seqlens: tokens of each sequence, in packing order; zero-length sequences are allowed.
    """

    def __init__(self, seqlens: Sequence[int]) -> None:
        self._seqlens = list(seqlens)
        self._attend: Callable[..., torch.Tensor] | None = None

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attention of q [T, N, D] over k, v [T, K, D]; returns [T, N, D].

        Args:
            window: number of tokens, itself included, that each one sees; None for all earlier ones.
            terms: treatment of the scores, the same kind in all layers; None for plain ones.
        """
        if q.shape[0] == 0:
            return q
        if self._attend is None:  # decided once, for all layers alike
            if terms is None and _has_varlen_kernel(q):
                self._attend = _VarlenKernel(self._seqlens, q.device)
            else:
                self._attend = _PaddedGroups(self._seqlens, q.shape[1] * q.shape[2], q.device)
        return self._attend(q, k, v, window, terms)


def _has_varlen_kernel(q: torch.Tensor) -> bool:
    if not has_flash(q.device, q.dtype, q.shape[-1]):
        return False
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


class _VarlenKernel:
    """`torch.nn.attention.varlen` (FlashAttention-2, Dao 2023)."""

    def __init__(self, seqlens: Sequence[int], device: torch.device) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._kernel = varlen_attn
        self._asks_for_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 needs no leave
        self._cu_seqlens = torch.tensor([0, *accumulate(seqlens)], dtype=torch.int32, device=device)
        self._longest = max(seqlens)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, terms: None
    ) -> torch.Tensor:
        n_before = -1 if window is None else window - 1
        groups = {"enable_gqa": q.shape[1] != k.shape[1]} if self._asks_for_groups else {}
        out: torch.Tensor = self._kernel(
            q,
            k,
            v,
            self._cu_seqlens,
            self._cu_seqlens,
            self._longest,
            self._longest,
            window_size=(n_before, 0),
            **groups,
        )
        return out


class _PaddedGroups:
    """`scaled_dot_product_attention` once per group of similar lengths."""

    def __init__(self, seqlens: Sequence[int], width: int, device: torch.device) -> None:
        starts = [0, *accumulate(seqlens)]
        slots, tokens = [], []  # by row of the padded layout: 1 for a real token and 0 for padding; the token to read
        self._shapes: list[tuple[int, int]] = []
        for group in group_by_length(seqlens, width):
            longest = seqlens[group[-1]]
            self._shapes.append((len(group), longest))
            for i in group:
                n = seqlens[i]
                slots += [1] * n + [0] * (longest - n)
                tokens += [*range(starts[i], starts[i] + n), *([starts[i]] * (longest - n))]
        self._is_real = torch.tensor(slots, dtype=torch.bool, device=device)
        self._token_of = torch.tensor(tokens, dtype=torch.int64, device=device)
        real_rows = self._is_real.nonzero()[:, 0]
        self._row_of = torch.empty_like(real_rows)
        self._row_of[self._token_of[real_rows]] = real_rows
        self._is_packed = torch.equal(self._row_of, torch.arange(len(tokens), device=device))
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, terms: ScoreTerms | None
    ) -> torch.Tensor:
        out = self._attend_groups((q, k, v), window, terms)
        return self._unpad(out).to(q.dtype)

    def _attend_groups(self, qkv: Sequence[torch.Tensor], window: int | None, terms: ScoreTerms | None) -> torch.Tensor:
        """Return padded rows of all groups; copies of queries, keys, values end with it, before rows are unpadded."""
        computed = attention_dtype(qkv[0].device, qkv[0].dtype)
        sizes = [n * longest for n, longest in self._shapes]
        parts = zip(self._shapes, *(self._pad(x.to(computed)).split(sizes) for x in qkv), strict=True)
        outputs = [self._attend_group(shape, part, window, terms) for shape, *part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(
        self, shape: tuple[int, int], qkv: Sequence[torch.Tensor], window: int | None, terms: ScoreTerms | None
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)  # [G, heads, L, D]
        if terms is not None:
            mask = window_mask(shape[1], min(window or shape[1], shape[1]), q.device)
            return attend_by_scores(q, k, v, ~mask, terms).transpose(1, 2).flatten(0, 1)
        mask = self._mask(shape[1], window)
        return attend_grouped(q, k, v, mask, repeats=repeats_heads(q.device)).transpose(1, 2).flatten(0, 1)

    def _mask(self, longest: int, window: int | None) -> torch.Tensor | None:
        """The bool mask [L, L] of a group, the same for all layers; None where the window hides nothing."""
        if window is None or window >= longest:
            return None
        key = (longest, window)
        if key not in self._masks:
            self._masks[key] = window_mask(longest, window, self._is_real.device)
        return self._masks[key]

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._is_packed else PadRows.apply(x, self._token_of, self._row_of)

    def _unpad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._is_packed else UnpadRows.apply(x, self._row_of)


class PadRows(torch.autograd.Function):
    """Gathers rows by index; backward reads each token's one real row, since no gradient reaches padding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of)
        return x.index_select(0, token_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return grad.index_select(0, row_of), None, None


class UnpadRows(torch.autograd.Function):
    """Gathers the real rows in packing order; backward leaves zeros in the padding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of)
        ctx.n_rows = x.shape[0]
        return x.index_select(0, row_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row_of,) = ctx.saved_tensors
        return grad.new_zeros(ctx.n_rows, *grad.shape[1:]).index_copy_(0, row_of, grad), None


def group_by_length(seqlens: Sequence[int], width: int) -> list[list[int]]:
    """Group the indices of non-empty sequences by similar length, shortest first.

    A group grows while the score entries that padding wastes cost less than a call of its own.

    Args:
        width: heads times head size.
    """
    groups: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(seqlens) if n > 0), key=lambda i: seqlens[i]):
        if groups:
            group = groups[-1]
            previous = seqlens[group[-1]]
            wasted = len(group) * (seqlens[i] ** 2 - previous**2)
            if wasted * width * 7 <= CALL_COST:
                group.append(i)
                continue
        groups.append([i])
    return groups

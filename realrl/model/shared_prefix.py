"""Sequences of one sample that begin alike: their common prefix is computed once, in training as in inference.

The responses to a prompt, or the two answers of a pair, differ from each other only after the prompt. The hidden states
of the prompt are the same in all of them, so one copy is kept, and every response attends to it:

    sequences    p p p a a   p p p b b b        T tokens
    kept         p p p  |  a a  b b b           heads, then tails; a sequence that shares nothing is a head
    hidden[row]  0 1 2 3 4   0 1 2 5 6 7        `expand` gives each of the T tokens its row

Gradients of a shared token add up over the sequences that it stands for, as they would over its copies.

N heads, K KV heads, D head size; a fork is n sequences with P tokens in common, their tails padded to the longest, R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional as F

from realrl.cpu import ScoreTerms, attend_by_scores
from realrl.model.layers.attention import PackedAttention, PadRows, UnpadRows
from realrl.plan.samples.prefixes import is_worth_sharing


@dataclass(frozen=True)
class Fork:
    """Sequences that begin alike.

    Attributes:
        n_shared: length of the common prefix.
        start: index of the first shared token among the kept ones.
        tails: length of each sequence after the prefix; may be 0.
    """

    n_shared: int
    start: int
    tails: tuple[int, ...]


class SharedPrefixes:
    """Selection of the tokens of a packed batch to compute, and the way back to all of them.

    Args:
        input_ids: int64 [T].
        seqlens: lengths of the sequences, by sample.
        hidden_size: the model's; the larger, the shorter a prefix is worth sharing.

    Attributes:
        tokens: int64 [kept], indices of the computed tokens among the T.
        positions: int64 [kept], their positions in their sequences.
        expand: int64 [T], the row of each token's hidden state among the computed ones.
    """

    def __init__(self, input_ids: torch.Tensor, seqlens: Sequence[Sequence[int]], hidden_size: int) -> None:
        starts, n_shared = _sequence_starts(seqlens), _shared_lengths(input_ids, seqlens, hidden_size)
        self._forks: list[Fork] = []
        heads: list[range] = []
        tails: list[range] = []
        n_kept = 0
        for begins, lengths, n in zip(starts, seqlens, n_shared, strict=True):
            whole = [range(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
            if n:
                self._forks.append(Fork(n, n_kept, tuple(length - n for length in lengths)))
                tails += [sequence[n:] for sequence in whole]
                whole = [whole[0][:n]]
            heads += whole
            n_kept += sum(map(len, whole))
        self._heads = [len(head) for head in heads]
        kept = torch.tensor([token for part in (*heads, *tails) for token in part], dtype=torch.int64)
        positions = torch.tensor([i for lens in seqlens for n in lens for i in range(n)], dtype=torch.int64)
        rows = torch.empty(len(positions), dtype=torch.int64)
        rows[kept] = torch.arange(len(kept))
        for begins, n in zip(starts, n_shared, strict=True):
            for begin in begins[1:] if n else ():
                rows[begin : begin + n] = rows[begins[0] : begins[0] + n]
        self.tokens, self.positions, self.expand = (x.to(input_ids.device) for x in (kept, positions[kept], rows))

    @property
    def is_trivial(self) -> bool:
        """True if nothing is shared."""
        return not self._forks

    def attention(self) -> PrefixAttention:
        """Make the attention of one forward pass over the kept tokens, and its backward pass."""
        return PrefixAttention(self._heads, self._forks)


class _Padding:
    """Conversion between packed tails and tails padded on the right to the longest."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        longest = max(lengths)
        sizes = torch.tensor(lengths, device=device)[:, None]
        columns = torch.arange(longest, device=device)
        self._is_even = min(lengths) == longest
        self._row_of = (columns < sizes).flatten().nonzero()[:, 0]
        self._token_of = torch.zeros(len(lengths) * longest, dtype=torch.int64, device=device)
        self._token_of[self._row_of] = torch.arange(len(self._row_of), device=device)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._is_even else PadRows.apply(x, self._token_of, self._row_of)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._is_even else UnpadRows.apply(x, self._row_of)


class PrefixAttention:
    """`realrl.model.decoder.AttentionOp` for heads and tails.

    Heads attend like any packed sequences. Queries of a tail attend to the shared tokens and to the tail itself.

    Args:
        heads: length of each head, in the order of the kept tokens; tails follow, fork by fork.
        forks: forks in the same order.
    """

    def __init__(self, heads: Sequence[int], forks: Sequence[Fork]) -> None:
        self._n_head_tokens = sum(heads)
        self._heads = PackedAttention(heads)
        self._forks = list(forks)
        self._sizes = [sum(fork.tails) for fork in forks]
        self._paddings: list[_Padding] = []
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

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
        """Attention of q [kept, N, D] over k, v [kept, K, D]; returns [kept, N, D].

        Args:
            window: number of tokens, itself included, that each one sees; None for all earlier ones.
            terms: treatment of the scores; None for plain ones.
        """
        if not self._paddings:
            self._paddings = [_Padding(fork.tails, q.device) for fork in self._forks]
        n, dtype = self._n_head_tokens, q.dtype
        outputs = [self._heads.attend(layer_index, q[:n], k[:n], v[:n], window=window, terms=terms)]
        if dtype == torch.bfloat16:  # as in `PackedAttention`: the CPU kernel's bf16 backward is slow
            q, k, v = q.float(), k.float(), v.float()
        tails = zip(*(x[n:].split(self._sizes) for x in (q, k, v)), strict=True)
        for fork, padding, qkv in zip(self._forks, self._paddings, tails, strict=True):
            if max(fork.tails):
                shared = slice(fork.start, fork.start + fork.n_shared)
                prefix = k[shared], v[shared]
                outputs.append(self._attend_fork(fork, padding, qkv, prefix, window, terms).to(dtype))
        return torch.cat(outputs)

    def _attend_fork(
        self,
        fork: Fork,
        padding: _Padding,
        tails: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        window: int | None,
        terms: ScoreTerms | None,
    ) -> torch.Tensor:
        """Return [tokens of the tails, N, D]; query heads of one KV head are computed as further rows."""
        n, longest = len(fork.tails), max(fork.tails)
        q, k, v = (padding.pad(x).unflatten(0, (n, longest)) for x in tails)  # [n, R, heads, D]
        k, v = (
            torch.cat((prefix.expand(n, *prefix.shape), tail), dim=1).transpose(1, 2)
            for prefix, tail in zip(shared, (k, v), strict=True)
        )  # [n, K, P + R, D]
        n_kv_heads = k.shape[1]
        n_groups = q.shape[2] // n_kv_heads
        mask = self._mask(fork, n_groups, window, q)
        if terms is not None:
            out = attend_by_scores(q.transpose(1, 2), k, v, mask[:longest] < 0, terms).transpose(1, 2)
            return padding.unpad(out.flatten(0, 1))
        q = q.unflatten(2, (n_kv_heads, n_groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [n, K, N / K * R, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.unflatten(2, (n_groups, longest)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [n, R, N, D]
        return padding.unpad(out.flatten(0, 1))

    def _mask(self, fork: Fork, n_groups: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """The mask [N / K * R, P + R] of all tails in all layers: 0 where a tail's token sees, -inf elsewhere."""
        longest = max(fork.tails)
        key = (fork.n_shared, longest, n_groups, window)
        if key not in self._masks:
            rows = torch.arange(fork.n_shared, fork.n_shared + longest, device=like.device)[:, None]
            columns = torch.arange(fork.n_shared + longest, device=like.device)
            is_hidden = columns > rows
            if window is not None:
                is_hidden |= columns <= rows - window
            mask = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(is_hidden, -torch.inf).repeat(n_groups, 1)
        return self._masks[key]


def _sequence_starts(seqlens: Sequence[Sequence[int]]) -> list[list[int]]:
    flat = [length for lengths in seqlens for length in lengths]
    starts = iter([0, *accumulate(flat)])
    return [[next(starts) for _ in lengths] for lengths in seqlens]


def _shared_lengths(input_ids: torch.Tensor, seqlens: Sequence[Sequence[int]], hidden_size: int) -> list[int]:
    """The length of each sample's common prefix; 0 where computing it once is not worth the trouble."""
    found = []
    parts = input_ids.split([sum(lengths) for lengths in seqlens]) if len(seqlens) else ()
    for lengths, part in zip(seqlens, parts, strict=True):
        n = 0
        if len(lengths) > 1 and min(lengths) > 0:
            begins = torch.stack([sequence[: min(lengths)] for sequence in part.split(list(lengths))])
            n = int((begins == begins[0]).all(0).long().cumprod(0).sum())
        found.append(n if n and is_worth_sharing(n, lengths, hidden_size) else 0)
    return found

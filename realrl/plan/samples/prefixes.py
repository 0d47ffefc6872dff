"""Prefixes that the sequences of a sample share: which of them are computed once."""

from __future__ import annotations

from collections.abc import Sequence

CALL_COST = 4_000_000  # multiply-adds of attention, forward and backward, that one more operation per layer is worth
_PARAMETERS = 12  # of a layer, in squares of the hidden size: about 4 in attention and 8 in the MLP
_MOST_SCORES = 1 << 24  # a fork's mask has no more elements


def is_worth_sharing(n_shared: int, lengths: Sequence[int], hidden_size: int) -> bool:
    """True if the tokens saved outweigh the cost of padded tails, dense masks and more attention calls.

    Args:
        n_shared: length of the common prefix.
        lengths: lengths of the sequences, prefix included.
        hidden_size: the model's.
    """
    longest = max(lengths)
    n_scores = (longest - n_shared) * longest
    more_scores = len(lengths) * n_scores - (sum(n * n for n in lengths) - n_shared * n_shared) // 2
    # forward and backward: 3 multiply-adds for each parameter and token, 7 for each score and channel
    saved = 3 * n_shared * (len(lengths) - 1) * _PARAMETERS * hidden_size**2
    return n_scores <= _MOST_SCORES and saved > 7 * hidden_size * more_scores + 2 * CALL_COST

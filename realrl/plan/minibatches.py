"""Random minibatches of a train_step, and which samples of them each rank gets.

Samples sorted by tokens form rounds of `n_minibatches`, each of samples of similar length. Every pass over the batch
deals each round to the minibatches in a new random order, one sample to each:

    rounds      [a b c] [d e f] [g h]
    pass 1      a f h | c d | b e g          minibatches
    pass 2      b e | a d g | c f h

A whole round belongs to one data-parallel rank in all passes, so a rank holds each of its samples once.

Invariants of `draw_minibatches`:
    - the minibatches of a pass are disjoint and cover all samples, and their sizes differ by at most one;
    - the tokens of two minibatches of a pass differ by at most those of the longest sample;
    - they depend on token counts, seed, step and the batch's number in the step alone: not on the call's mesh, strategy
      or protocol.
Invariants of `share_minibatches`:
    - the shares of a minibatch are disjoint and cover it, if the protocol gives each sample to one group of ranks;
    - a group of ranks has the same samples in every pass;
    - no share of a minibatch is empty if there are as many samples as minibatches times shares, and the protocol leaves
      no share empty that could have a sample;
    - with one minibatch, ranks get what the protocol gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from realrl.graph.mfc import MFCDef
from realrl.plan.protocols import EQUAL_COUNT_PROTOCOLS, CallLayout, divide
from realrl.plan.samples.shuffle import keyed_draw, permutation

Ranks = tuple[int, ...]


def draw_minibatches(
    token_counts: Sequence[int], n_minibatches: int, *, n_passes: int = 1, seed: int, step: int, batch: int = 0
) -> list[list[int]]:
    """Return the samples of every minibatch, pass after pass, as ascending indices; `batch` counts within the step."""
    return [list(members) for members in _drawn(tuple(token_counts), n_minibatches, n_passes, (seed, step, batch))]


@lru_cache(maxsize=2)  # calls that train on the same samples in a step draw the same minibatches
def _drawn(
    token_counts: tuple[int, ...], n_minibatches: int, n_passes: int, key: tuple[int, int, int]
) -> tuple[tuple[int, ...], ...]:
    seed, step, batch = key
    rounds = _rounds(token_counts, n_minibatches)
    minibatches: list[tuple[int, ...]] = []
    for number in range(1, n_passes + 1):
        draw = keyed_draw(seed, "minibatches", step, number, *([batch] if batch else []))
        dealt: list[list[int]] = [[] for _ in range(n_minibatches)]
        for members in rounds:
            for i, minibatch in zip(members, permutation(n_minibatches, draw)):
                dealt[minibatch].append(i)
        minibatches += [tuple(sorted(members)) for members in dealt]
    return tuple(minibatches)


def share_minibatches(
    mfc: MFCDef,
    ids: Sequence[str],
    token_counts: Sequence[int],
    layout: CallLayout,
    *,
    seed: int,
    step: int,
    batch: int = 0,
) -> dict[Ranks, tuple[tuple[str, ...], ...]]:
    """Draw the minibatches of a train_step and divide each over the ranks of its mesh.

    Args:
        mfc: the call.
        ids: samples, oldest first.
        token_counts: tokens of each sample.
        layout: where the call runs.
        seed: of the run.
        step: of the batch.
        batch: number of the batch among those of the step, from 0.

    Returns:
        Ranks that work on the same samples -> those samples of every minibatch, pass after pass.
    """
    owners = _divide_rounds(mfc, ids, token_counts, layout)
    minibatches = _drawn(tuple(token_counts), mfc.n_minibatches, mfc.n_passes, (seed, step, batch))
    shares: dict[Ranks, list[list[str]]] = {ranks: [[] for _ in minibatches] for ranks in owners}
    shares_of: list[list[list[list[str]]]] = [[] for _ in ids]  # sample -> the shares that have it
    for ranks, members in owners.items():
        share = shares[ranks]
        for i in members:
            shares_of[i].append(share)
    for number, minibatch in enumerate(minibatches):
        for i in minibatch:
            for share in shares_of[i]:
                share[number].append(ids[i])
    return {ranks: tuple(map(tuple, share)) for ranks, share in shares.items()}


@lru_cache(maxsize=2)
def _rounds(token_counts: tuple[int, ...], n_minibatches: int) -> list[list[int]]:
    """Samples in rounds of `n_minibatches`, longest first; the last round may be incomplete."""
    longest_first = sorted(range(len(token_counts)), key=token_counts.__getitem__, reverse=True)  # stable
    return [longest_first[start : start + n_minibatches] for start in range(0, len(longest_first), n_minibatches)]


def _divide_rounds(
    mfc: MFCDef, ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout
) -> dict[Ranks, list[int]]:
    """Ranks -> the samples of their rounds, by the call's protocol.

    The protocol sees a round as its oldest sample with the tokens of all of them. An incomplete round is no part of
    that, since a rank with no other round would have an empty share in some minibatch; it joins the lightest share.
    """
    rounds = _rounds(tuple(token_counts), mfc.n_minibatches)
    incomplete = [members for members in rounds if len(members) < mfc.n_minibatches]
    full = {min(members): members for members in rounds if len(members) == mfc.n_minibatches}
    weights = {first: sum([token_counts[i] for i in members]) for first, members in full.items()}
    oldest = sorted(full)
    shares, _ = divide(mfc.protocol, [ids[i] for i in oldest], [weights[i] for i in oldest], layout, call=mfc.name)
    index = {ids[i]: i for i in oldest}
    owned = {share.ranks: [index[sample_id] for sample_id in share.ids] for share in shares}

    def load(ranks: Ranks) -> tuple[int, int]:
        tokens, count = sum([weights[first] for first in owned[ranks]]), len(owned[ranks])
        return (count, tokens) if layout.equal_count or mfc.protocol in EQUAL_COUNT_PROTOCOLS else (tokens, count)

    lightest = min(owned, key=load)
    alike = [ranks for ranks, firsts in owned.items() if firsts and firsts == owned[lightest]]
    joined, rest = {lightest, *alike}, [i for members in incomplete for i in members]
    return {
        ranks: [i for first in firsts for i in full[first]] + (rest if rest and ranks in joined else [])
        for ranks, firsts in owned.items()
    }

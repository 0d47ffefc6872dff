"""Assignment of senders and relays: which rank sends which items of which portion to whom.

A portion that no rank of a node holds crosses to the node once, to ranks that need it themselves. Each of these relays
passes what it got to the others of its node.

Invariants of `flows_of`:
- every item of a portion reaches each rank that lacks it in exactly one flow;
- an item crosses to a node once if a rank there lacks it and no rank there holds it, and never otherwise;
- a relay needs the items that it passes on, and passes them on inside its node only;
- senders of one node share what the node's other ranks lack, senders of all nodes what crosses, and the relays of a
  node what crosses to it, so that the most loaded of them has as little as possible, up to one item;
- equal input gives equal flows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc_portions import Matrix, Portion

HELD = -1  # origin of a flow whose source holds the items in the source layout
_Run = tuple[int, int, int, int]  # a rank or a node, portion, first item, end of items


def flows_of(
    portions: Sequence[Portion],
    source_layout: ParameterLayout,
    target_layout: ParameterLayout,
    node: Mapping[int, int],
) -> Matrix:
    """Return the flows that bring the ranks of the target layout what they lack.

    Args:
        portions: portions of the two layouts.
        node: global rank -> node, of the ranks of both layouts.

    Returns:
        int64 [n, 6]: source, target, portion, first item, end of items, origin. The origin is the rank from which a
        relay, the source of the flow, has the items; `HELD` if the source holds them from the beginning.
    """
    loads, loads_across = (dict.fromkeys(source_layout.ranks, 0) for _ in range(2))
    inside: list[tuple[int, int, int, int, int, int]] = []
    crossing: dict[tuple[int, ...], list[_Run]] = {}  # ranks of a node that lack them -> runs from their holders
    for number in sorted(range(len(portions)), key=lambda number: -portions[number].num_bytes):
        portion = portions[number]
        holders = _ranks_at(source_layout, portion.source_stages, portion.source_tps)
        held = set(holders)
        lacking = [r for r in _ranks_at(target_layout, portion.target_stages, portion.target_tps) if r not in held]
        if not lacking:
            continue
        holders_on, lacking_on = _by_node(holders, node), _by_node(lacking, node)
        for place in sorted(lacking_on.keys() & holders_on.keys()):
            runs = [(rank, number, 0, len(portion.items)) for rank in lacking_on[place]]
            for holder, rank, _, first, end in _share(runs, portions, holders_on[place], loads):
                inside.append((holder, rank, number, first, end, HELD))
        far = {place: tuple(ranks) for place, ranks in lacking_on.items() if place not in holders_on}
        runs = [(place, number, 0, len(portion.items)) for place in far]
        for holder, place, _, first, end in _share(runs, portions, holders, loads_across):
            crossing.setdefault(far[place], []).append((holder, number, first, end))
    relayed = _relayed(portions, crossing)
    return np.concatenate([np.array(inside, dtype=np.int64).reshape(-1, 6), *relayed])


def _relayed(portions: Sequence[Portion], crossing: Mapping[tuple[int, ...], list[_Run]]) -> Iterator[Matrix]:
    """Yield the flows between nodes, and behind them those inside nodes that pass them on.

    The fewer ranks can be relays of some runs, the earlier they choose.
    """
    loads = dict.fromkeys((rank for ranks in crossing for rank in ranks), 0)
    for ranks in sorted(crossing, key=lambda ranks: (len(ranks), ranks)):
        shared = _share(crossing[ranks], portions, ranks, loads)
        found = np.array(list(shared), dtype=np.int64)  # [n, 5]: relay, source, portion, first item, end of items
        yield np.column_stack([found[:, 1], found[:, 0], found[:, 2:], np.full(len(found), HELD)])
        others = {relay: [rank for rank in ranks if rank != relay] for relay in ranks}
        targets = [rank for relay in found[:, 0].tolist() for rank in others[relay]]
        found = found.repeat(len(ranks) - 1, axis=0)
        yield np.column_stack([found[:, 0], np.array(targets, dtype=np.int64), found[:, 2:], found[:, 1]])


def _share(
    runs: Sequence[_Run], portions: Sequence[Portion], ranks: Sequence[int], loads: dict[int, int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Share the items of runs out over ranks, in long pieces, so that few pairs of ranks communicate.

    Args:
        runs: what is shared out.
        ranks: the ranks that share it.
        loads: rank -> bytes that it has already, which this adds to.

    Yields:
        A rank, and the part of a run that it takes.
    """
    sizes = [portions[number].ends[end] - portions[number].ends[first] for _, number, first, end in runs]
    bounds = list(accumulate(_level([loads[rank] for rank in ranks], sum(sizes))))
    taker, start = 0, 0  # the rank whose turn it is; bytes of the runs before this one
    for (tag, number, first, end), size in zip(runs, sizes, strict=True):
        ends = portions[number].ends
        at = start - ends[first]
        while first < end:
            stop = end
            if taker < len(ranks) - 1 and bounds[taker] < start + size:
                stop = max(min(_nearest(ends, bounds[taker] - at), end), first)
            if stop > first:
                loads[ranks[taker]] += ends[stop] - ends[first]
                yield ranks[taker], tag, number, first, stop
            if stop < end:
                taker += 1
            first = stop
        start += size


def _nearest(ends: Sequence[int], position: int) -> int:
    """Return the number of items whose bytes come nearest to `position`."""
    above = bisect_left(ends, position)
    if above == len(ends) or (above and position - ends[above - 1] < ends[above] - position):
        return above - 1
    return above


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """Return how much of `amount` each bin gets so that the fullest ends as low as possible."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    total = amount
    n_bins = 0
    for n_bins, i in enumerate(order, 1):
        total += loads[i]
        if n_bins == len(order) or total <= n_bins * loads[order[n_bins]]:
            break
    level, extra = divmod(total, n_bins)
    shares = [0] * len(loads)
    for turn, i in enumerate(order[:n_bins]):
        shares[i] = level + (turn < extra) - loads[i]
    return shares


def _ranks_at(layout: ParameterLayout, stages: Iterable[int], tps: Sequence[int]) -> list[int]:
    """Return the global ranks of some stages and tensor ranks, replica by replica."""
    return [
        layout.rank_at(pp_rank=stage, dp_rank=dp_rank, tp_rank=tp_rank)
        for dp_rank in range(layout.strategy.dp)
        for stage in stages
        for tp_rank in tps
    ]


def _by_node(ranks: Iterable[int], node: Mapping[int, int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(node[rank], []).append(rank)
    return groups

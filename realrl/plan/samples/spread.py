"""Rows inside the replicas of a call: ranks that need the same samples get one copy from outside, and share it.

    routes of every rank ──► pulls: one rank of a replica fetches a row ──► spreads: the others get it from that one

Invariants of `plan_spreads`:
    - a rank receives the same rows as by the routes, by a pull or a spread, and a row once;
    - on each node a replica pulls a row once, and never one that a member of it on that node holds;
    - a spread stays within its replica and its node, and its source holds the row, or pulls it;
    - a rank from which rows are passed on pulls them itself, so pulls wait for pulls from other nodes only;
    - pulls come before spreads, which wait for nothing else.
Equal input gives equal plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from realrl.plan.samples.placements import Placement, lying
from realrl.plan.samples.transfer import RowTransfer, Share


def plan_spreads(
    shares: Sequence[Share],
    routes: Sequence[RowTransfer],
    placements: Mapping[str, Mapping[str, Placement]],
    *,
    node_of: Callable[[int], int],
) -> tuple[tuple[RowTransfer, ...], tuple[RowTransfer, ...]]:
    """Divide the routes of `plan_transfers` into pulls and spreads.

    Args:
        shares: samples that the ranks of each replica need; a rank occurs in one share only.
        routes: rows that each rank lacks.
        placements: key -> sample id -> placement, as the routes were planned with.
        node_of: global rank -> node.

    Returns:
        Pulls and spreads.
    """
    members_of = {rank: share.ranks for share in shares if len(share.ranks) > 1 for rank in share.ranks}
    if not members_of:
        return tuple(routes), ()
    holder_of: dict[tuple[int, int, str], dict[str, int]] = defaultdict(dict)  # (replica, node, key) -> sample -> rank
    near_of: dict[tuple[int, int, frozenset[int]], int | None] = {}  # (replica, node, holders) -> one there
    known_placements = _placements_of(shares, placements)
    pulls: list[RowTransfer] = []
    ids_of_spread: dict[tuple[int, int, str], list[str]] = defaultdict(list)  # (source, target, key) -> ids
    for route in sorted(routes, key=lambda route: route.is_passed_on):  # a relay is the one that pulls for its replica
        target, key, ids = route.target, route.key, route.ids
        members = members_of.get(target)
        if members is None:
            pulls.append(route)
            continue
        node = node_of(target)
        holders = holder_of[members[0], node, key]
        known = [*map(holders.get, ids)]
        if None in known:
            placement_of = known_placements[key]
            for i, sample_id in enumerate(ids):
                if known[i] is None:
                    where = members[0], node, placement_of[sample_id].held
                    if where not in near_of:
                        near_of[where] = next((r for r in members if r in where[2] and node_of(r) == node), None)
                    near = near_of[where]
                    known[i] = holders[sample_id] = target if near is None else near
        if (holder := known[0]) is not None and known.count(holder) == len(ids):
            if holder == target:
                pulls.append(route)
            else:
                ids_of_spread[holder, target, key].extend(ids)
            continue
        found = defaultdict[int | None, list[str]](list)
        for one, sample_id in zip(known, ids):
            found[one].append(sample_id)
        for one, own in found.items():
            if one == target:
                pulls.append(RowTransfer(route.source, target, key, tuple(own), route.is_passed_on))
            else:
                assert one is not None
                ids_of_spread[one, target, key].extend(own)
    spreads = tuple([RowTransfer(*where, tuple(ids)) for where, ids in ids_of_spread.items()])
    return tuple(pulls), spreads


def _placements_of(
    shares: Sequence[Share], placements: Mapping[str, Mapping[str, Placement]]
) -> dict[str, dict[str, Placement]]:
    """Return the placements of the samples of all shares: one dictionary for keys that lie alike."""
    ids = list(chain.from_iterable([share.ids for share in shares]))
    found: dict[str, dict[str, Placement]] = {}
    for keys, lie in lying(placements, ids):
        of_these = dict(zip(ids, lie))
        found |= dict.fromkeys(keys, of_these)
    return found

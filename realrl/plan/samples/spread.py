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

from realrl.plan.samples.transfer import Placement, RowTransfer, Share


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
    by_holder: dict[tuple[int, int, str, tuple[str, ...]], dict[int, list[str]]] = {}  # rows that come alike to many
    pulls: list[RowTransfer] = []
    ids_of_spread: dict[tuple[int, int, str], list[str]] = defaultdict(list)  # (source, target, key) -> ids
    for route in sorted(routes, key=lambda route: route.is_passed_on):  # a relay is the one that pulls for its replica
        target, key = route.target, route.key
        members = members_of.get(target)
        if members is None:
            pulls.append(route)
            continue
        node = node_of(target)
        rows = members[0], node, key, route.ids
        alike = by_holder.get(rows)  # asked once: hashing the ids of a route takes longer than all else here
        if alike is None:
            holders, found = holder_of[rows[:3]], defaultdict[int, list[str]](list)
            for sample_id in route.ids:
                holder = holders.get(sample_id)
                if holder is None:
                    held = placements[key][sample_id].held
                    where = members[0], node, held
                    if where not in near_of:
                        near_of[where] = next(
                            (rank for rank in members if rank in held and node_of(rank) == node), None
                        )
                    near = near_of[where]
                    holder = holders[sample_id] = target if near is None else near
                found[holder].append(sample_id)
            alike = by_holder[rows] = found
        for holder, ids in alike.items():
            if holder == target:
                pulls.append(RowTransfer(route.source, target, key, tuple(ids), route.is_passed_on))
            else:
                ids_of_spread[holder, target, key].extend(ids)
    spreads = tuple([RowTransfer(*where, tuple(ids)) for where, ids in ids_of_spread.items()])
    return tuple(pulls), spreads

"""Routes of rows between ranks before a call starts.

Invariants of `plan_transfers`:
    - after the routes are performed, every rank of a share holds every key of every sample of the share;
    - a rank never receives rows that it holds, or that an earlier call is already bringing to it;
    - a (sample, key, rank) occurs at most once;
    - rows are fetched only from ranks that hold them for certain, never from one to which they are still on their way;
    - a source on the target's own node is preferred; among equals, the one that has the fewest rows to send so far;
    - routes are merged: at most one per (source, target, key).
Equal input gives equal routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Placement:
    """Global ranks that have, or will have, the rows of one (sample, key).

    Ranks of `held` have them. Ranks of `incoming` fetch them before a call that is dispatched but not finished.
    """

    held: frozenset[int]
    incoming: frozenset[int] = frozenset()

    @property
    def present(self) -> frozenset[int]:
        """Ranks that have the rows, or will before anything dispatched later can run there."""
        return self.held | self.incoming if self.incoming else self.held


@dataclass(frozen=True)
class Share:
    """The part of a batch that several ranks need alike: all (pp, tp) coordinates of one data-parallel rank."""

    ranks: tuple[int, ...]
    ids: tuple[str, ...]


class RowTransfer(msgspec.Struct, frozen=True):
    """Rows of one key that `target` lacks and fetches from `source` (global ranks) before its call starts."""

    source: int
    target: int
    key: str
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Arrival:
    """Effect of routes: `targets` will have the rows of `key` of the samples `ids`."""

    key: str
    ids: tuple[str, ...]
    targets: tuple[int, ...]


def plan_transfers(
    shares: Sequence[Share],
    placements: Mapping[str, Mapping[str, Placement]],
    *,
    node_of: Callable[[int], int],
) -> tuple[tuple[RowTransfer, ...], tuple[Arrival, ...]]:
    """Plan the rows that the ranks of one dispatch must fetch.

    Args:
        shares: samples that ranks need; a rank occurs in one share only.
        placements: key -> sample id -> placement, for exactly the keys that the call reads.
        node_of: global rank -> node.

    Returns:
        Routes, those to one target in the order of the keys; and their effect.

    Raises:
        KeyError: a needed sample has no placement: it was not produced, or is already freed.
    """
    n_sent: dict[int, int] = {}
    nearest: dict[tuple[frozenset[int], int], tuple[int, ...]] = {}
    ids_of_route: dict[tuple[int, str, int], tuple[str, ...]] = {}  # (target, key, source) -> ids
    arrivals: list[Arrival] = []
    for share in shares:
        for key, placement_of in placements.items():
            for placement, ids in _group_by_placement(share.ids, placement_of).items():
                present = placement.present
                targets = tuple([rank for rank in share.ranks if rank not in present])
                if not targets:
                    continue
                arrivals.append(Arrival(key, ids, targets))
                for target in targets:
                    node = node_of(target)
                    sources = nearest.get((placement.held, node))
                    if sources is None:
                        sources = nearest[placement.held, node] = _nearest_sources(placement.held, node, node_of)
                    source = sources[0] if len(sources) == 1 else min(sources, key=lambda rank: n_sent.get(rank, 0))
                    n_sent[source] = n_sent.get(source, 0) + len(ids)
                    route = (target, key, source)
                    ids_of_route[route] = ids_of_route[route] + ids if route in ids_of_route else ids
    routes = tuple(RowTransfer(source, target, key, ids) for (target, key, source), ids in ids_of_route.items())
    return routes, tuple(arrivals)


def _group_by_placement(ids: Sequence[str], placement_of: Mapping[str, Placement]) -> dict[Placement, tuple[str, ...]]:
    """Group samples that lie on the same ranks: the choice of a source is made once for each group."""
    groups: dict[Placement, list[str]] = {}
    for sample_id in ids:
        groups.setdefault(placement_of[sample_id], []).append(sample_id)
    return {placement: tuple(members) for placement, members in groups.items()}


def _nearest_sources(held: frozenset[int], node: int, node_of: Callable[[int], int]) -> tuple[int, ...]:
    """Return the holders on `node`, or all holders if there is none; ascending."""
    return tuple(sorted(rank for rank in held if node_of(rank) == node)) or tuple(sorted(held))

"""Routes of rows between ranks before a call starts.

Invariants of `plan_transfers`:
    - after the routes are performed, every rank of a share holds every key of every sample of the share;
    - a rank never receives rows that it holds, or that an earlier call is already bringing to it;
    - a (sample, key, rank) occurs at most once;
    - rows are fetched from a rank of the target's node if one there holds them for certain: the one that has the fewest
      rows to send so far;
    - the rows of a (sample, key) cross to a node that lacks them once, from the holder with the fewest rows to send, to
      a relay: the rank that needs them and has had the fewest to fetch from other nodes. The others there fetch them
      from the relay;
    - otherwise no rows are fetched from a rank to which they are still on their way;
    - routes are merged: at most one per (source, target, key, passed on or not).
Equal input gives equal routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from realrl.plan.samples.placements import Placement, lying


class Share(msgspec.Struct, frozen=True, gc=False):
    """The part of a batch that several ranks need alike: all (pp, tp) coordinates of one data-parallel rank."""

    ranks: tuple[int, ...]
    ids: tuple[str, ...]


class RowTransfer(msgspec.Struct, frozen=True, gc=False):
    """Rows of one key that `target` lacks and fetches from `source` (global ranks) before its call starts.

    Attributes:
        is_passed_on: the source is a relay, which fetches the rows for the same call.
    """

    source: int
    target: int
    key: str
    ids: tuple[str, ...]
    is_passed_on: bool = False


class Pull(NamedTuple):
    """Rows of one source that a rank fetches with one message: those of some keys, which it lacks of the same samples.

    Attributes:
        is_passed_on: see `RowTransfer`.
    """

    is_passed_on: bool
    source: int
    ids: tuple[str, ...]
    keys: tuple[str, ...]


def pulls_of(transfers: Iterable[RowTransfer]) -> list[Pull]:
    """Return the messages of the transfers to one rank, by source; what relays pass on comes last."""
    keys: dict[tuple[bool, int, tuple[str, ...]], list[str]] = {}
    for transfer in transfers:
        keys.setdefault((transfer.is_passed_on, transfer.source, transfer.ids), []).append(transfer.key)
    return sorted((Pull(*where, tuple(some)) for where, some in keys.items()), key=lambda pull: pull[:2])


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Effect of routes: `targets` will have the rows of some keys, which lie alike, of the samples `ids`."""

    keys: tuple[str, ...]
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
    needed = list(chain.from_iterable([share.ids for share in shares]))
    n_needed = sum(len(share.ranks) * len(share.ids) for share in shares)
    routes = _Routes(node_of, is_shared=n_needed > len(set(needed)))
    alike = lying(placements, needed)
    arrivals: list[Arrival] = []
    start = 0
    for share in shares:
        stop = start + len(share.ids)
        for keys, found in _of_share(alike, start, stop):
            lacking = _lacking(share, found)
            if lacking:
                arrivals += [Arrival(keys, ids, targets) for ids, _, targets in lacking]
                routes.add(keys, lacking)
        routes.close()
        start = stop
    return tuple(routes.found), tuple(arrivals)


_Alike = list[tuple[tuple[str, ...], Sequence[Placement]]]
"""Keys, one after another, whose samples lie alike, and the placement of each sample."""


def _of_share(alike: _Alike, start: int, stop: int) -> _Alike:
    """Return the same of the samples from `start` to `stop`, where more keys may lie alike."""
    found: _Alike = []
    for keys, every in alike:
        part = every[start:stop]
        if found and found[-1][1] == part:
            found[-1] = found[-1][0] + keys, part
        else:
            found.append((keys, part))
    return found


class _Routes:
    """Routes so far, and how many rows each rank sends in them.

    Args:
        is_shared: some sample is needed by two ranks, so that one may pass its rows on to the other.

    Attributes:
        found: routes to the shares that are closed, in the order in which the first of their rows was routed.
    """

    def __init__(self, node_of: Callable[[int], int], *, is_shared: bool) -> None:
        self.found: list[RowTransfer] = []
        self._node_of = node_of
        self._is_shared = is_shared
        self._n_sent: dict[int, int] = {}
        self._n_crossed: dict[int, int] = {}  # relay -> rows from other nodes
        self._sources: dict[tuple[frozenset[int], int], tuple[tuple[int, ...], bool]] = {}
        self._relays: dict[tuple[str, int], dict[str, int]] = {}  # (key, node) -> sample id -> relay
        # Of the share that is open: (target, key, source, is passed on) -> sample ids.
        self._ids_of: dict[tuple[int, str, int, bool], list[str]] = {}

    def add(self, keys: Sequence[str], lacking: Sequence[_Lacking]) -> None:
        """Route rows of keys that lie alike to targets of one share, which lack them."""
        pairs = None if self._ids_of else self._pairs(lacking)
        if pairs is None:
            for key in keys:
                for ids, held, targets in lacking:
                    self._choose(key, ids, held, targets)
            return
        for (source, _), ids in pairs.items():
            self._n_sent[source] = self._n_sent.get(source, 0) + len(keys) * len(ids)
        self.found += [RowTransfer(*pair, key, ids) for key in keys for pair, ids in pairs.items()]

    def close(self) -> None:
        """Note that no further rows go to the share."""
        if not self._ids_of:
            return
        for (target, key, source, is_passed_on), ids in self._ids_of.items():
            self.found.append(RowTransfer(source, target, key, tuple(ids), is_passed_on))
        self._ids_of.clear()

    def _pairs(self, lacking: Sequence[_Lacking]) -> dict[tuple[int, int], tuple[str, ...]] | None:
        """Return (source, target) -> samples where nothing is to be chosen, whatever the key; None where it is."""
        pairs: dict[tuple[int, int], tuple[str, ...]] = {}
        for ids, held, targets in lacking:
            for target in targets:
                if len(held) == 1 and not self._is_shared:
                    (source,) = held
                else:
                    sources, is_near = self._nearest(held, self._node_of(target))
                    if len(sources) > 1 or (self._is_shared and not is_near):
                        return None
                    source = sources[0]
                pair = source, target
                pairs[pair] = pairs[pair] + ids if pair in pairs else ids
        return pairs

    def _choose(self, key: str, ids: tuple[str, ...], held: frozenset[int], targets: Sequence[int]) -> None:
        """Route rows, which the ranks `held` hold, to targets that lack them."""
        if len(targets) == 1:
            sources, is_near = self._nearest(held, node := self._node_of(targets[0]))
            if is_near or not self._is_shared:
                self._fetch(key, ids, sources, targets[0])
            else:
                self._cross(key, ids, sources, node, targets)
            return
        far: dict[int, list[int]] = {}  # node -> targets
        for target in targets:
            node = self._node_of(target)
            sources, is_near = self._nearest(held, node)
            if is_near:
                self._fetch(key, ids, sources, target)
            else:
                far.setdefault(node, []).append(target)
        for node, ranks in far.items():
            self._cross(key, ids, self._nearest(held, node)[0], node, ranks)

    def _cross(self, key: str, ids: tuple[str, ...], sources: Sequence[int], node: int, targets: Sequence[int]) -> None:
        relays = self._relays.setdefault((key, node), {})
        new = tuple([sample_id for sample_id in ids if sample_id not in relays])
        order = sorted(targets, key=lambda rank: self._n_crossed.get(rank, 0))
        of_relay_ids: dict[int, Sequence[str]] = {}
        for place, relay in enumerate(order):  # the first get one more of what does not divide
            of_relay = new[place :: len(order)]
            if of_relay:
                of_relay_ids[relay] = of_relay
                self._fetch(key, of_relay, sources, relay)
                self._n_crossed[relay] = self._n_crossed.get(relay, 0) + len(of_relay)
                relays.update(dict.fromkeys(of_relay, relay))
        if len(targets) == 1 and len(new) == len(ids):
            return
        if len(new) < len(ids):  # others crossed for another share
            ids_by_relay: dict[int, list[str]] = {}
            for sample_id in ids:
                ids_by_relay.setdefault(relays[sample_id], []).append(sample_id)
            of_relay_ids = {**ids_by_relay}
        ids_of = self._ids_of
        for target in targets:
            for relay, own in of_relay_ids.items():
                if relay != target:
                    route = (target, key, relay, True)
                    if route in ids_of:
                        ids_of[route] += own
                    else:
                        ids_of[route] = [*own]
        for relay, own in of_relay_ids.items():
            n_others = len(targets) - (relay in targets)
            self._n_sent[relay] = self._n_sent.get(relay, 0) + n_others * len(own)

    def _fetch(self, key: str, ids: tuple[str, ...], sources: Sequence[int], target: int) -> None:
        n_sent = self._n_sent
        source = sources[0] if len(sources) == 1 else min(sources, key=lambda rank: n_sent.get(rank, 0))
        n_sent[source] = n_sent.get(source, 0) + len(ids)
        self._ids_of.setdefault((target, key, source, False), []).extend(ids)

    def _nearest(self, held: frozenset[int], node: int) -> tuple[tuple[int, ...], bool]:
        """Return the holders on `node`, ascending, and True; all holders and False if there is none."""
        found = self._sources.get((held, node))
        if found is None:
            near = tuple(sorted(rank for rank in held if self._node_of(rank) == node))
            found = self._sources[held, node] = (near or tuple(sorted(held)), bool(near))
        return found


_Lacking = tuple[tuple[str, ...], frozenset[int], tuple[int, ...]]
"""Samples that lie alike, the ranks that hold their rows, and those that lack them."""


def _lacking(share: Share, found: Sequence[Placement]) -> list[_Lacking]:
    """Group the samples of a share that lie on the same ranks: the choice of a source is made once for each group.

    Args:
        found: placement of each sample.
    """
    groups: dict[Placement, Sequence[str]] = {}
    if found and found.count(found[0]) == len(found):  # as a rule rows that were made together
        if found[0].held.issuperset(share.ranks):
            return []
        groups[found[0]] = share.ids
    else:
        lists: dict[Placement, list[str]] = {}
        for sample_id, placement in zip(share.ids, found):
            lists.setdefault(placement, []).append(sample_id)
        groups.update(lists)
    lacking: list[_Lacking] = []
    for placement, ids in groups.items():
        present = placement.present if placement.incoming else placement.held
        targets = tuple([rank for rank in share.ranks if rank not in present])
        if targets:
            lacking.append((tuple(ids), placement.held, targets))
    return lacking

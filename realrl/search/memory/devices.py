"""Bytes that a plan needs on every device: what roles keep there, what each call uses beside it, and connections.

Roles keep different bytes on different stages, and what fills one device may lie beside little on another: so bytes are
added device by device. A call whose parameters come from its role's home gets on each device what that lacks.

Invariant of `DeviceMemory.need`: it is at most what the fullest device of a run needs, whatever order the ranks of
calls away from home have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.search.flow import Flow, Move
from realrl.search.memory.links import Links, connected, links_of, node_links, unordered_links
from realrl.search.space import Choice, Placed, Placement, Span, segments_of

_MOST_KEPT = 1 << 22  # devices of calls whose bytes are kept, under all choices together


Plan = Mapping[int, Placed]
"""Calls and where they run."""

Here = tuple[Placement | None, ...]
"""Placements of the calls on a device, None for each call that runs elsewhere."""


@dataclass(frozen=True, eq=False)
class OnDevices:
    """Bytes of a call on each device of its mesh, int64 [devices].

    Attributes:
        kept: of its role's state, if the role lives there.
        used: that it takes while it runs, without parameters that come from another layout, and without connections.
        begun: of its role's state that leave the devices after the role's last call, but are there when the run begins,
            and while a move of another call reads or changes them.
    """

    kept: Matrix
    used: Matrix
    begun: Matrix | None = None


class BytesOf(Protocol):
    """Bytes of all calls under all choices; equal questions get equal answers."""

    @property
    def connects(self) -> bool:
        """True if devices have connections to each other, which take memory."""

    @property
    def any_rows(self) -> bool:
        """True if rows move between any two devices of a node, which are connected then."""

    def is_trained(self, call: str) -> bool:
        """Return True if a call trains."""

    def on_devices(self, call: str, choice: Choice) -> OnDevices:
        """Return the bytes of a call on each device of its mesh."""

    def parts(self, call: str, choice: Choice) -> Matrix:
        """Return int64 [devices], numbers for what each device of a call's mesh has of its model.

        Devices with the same number keep, use and get equally many bytes, whatever lies there.
        """

    def arriving(
        self,
        calls: tuple[str, str],
        source: Choice,
        target: Choice,
        start: int | None,
        parts: tuple[int, ...] | None = None,
    ) -> Matrix:
        """Return what the second call takes on each device at least, whose parameters live where the first one runs.

        Args:
            source: of it, strategy and stage of ZeRO matter.
            start: first device of the first call's mesh, seen from that of the second one's; None if none is shared.
            parts: part of the model that each device of the second call's mesh gets; None if any device may get any.
        """


@dataclass(frozen=True)
class Ordered:
    """A call away from its role's home, whose ranks have the order that a run gives them.

    Attributes:
        links: its connections, and those over which its parameters move.
        parts: part of the model that each device of its mesh gets.
    """

    links: Links
    parts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Shown:
    """Memory and orders of ranks of a plan by a run's own count.

    Attributes:
        n_bytes: that the fullest device needs.
        device: the fullest one.
        ordered: calls away from their roles' homes.
    """

    n_bytes: int
    device: int
    ordered: Mapping[int, Ordered] = field(default_factory=dict)


@dataclass
class Learned:
    """Orders of ranks and lacking memory of the plans that a search has asked about.

    Attributes:
        ordered: (call, its placement, that of its role's home) -> order of its ranks; the same in all plans.
        lacking: placements of the calls on a device, None for others -> bytes by which a run needs more than was
            counted on a device with these calls.
    """

    ordered: dict[tuple[int, Placement, Placement], Ordered] = field(default_factory=dict)
    lacking: dict[Here, int] = field(default_factory=dict)


class DeviceMemory:
    """Bytes of plans, call by call and device by device.

    Attributes:
        sources: of each call, that from whose layout its parameters come; -1 if they are there.
        on_devices: returns the bytes of a call under a choice.
        arriving: returns what a call takes whose parameters come: the strategy that they have, whether ZeRO's stage 3
            has divided them, the call's choice, the first device that has them, seen from the call's first, or None
            if the two meshes share no device, and the parts that its devices get, if these are known.
    """

    def __init__(self, flow: Flow, prices: BytesOf, cluster: Cluster) -> None:
        self._flow, self._prices, self._cluster = flow, prices, cluster
        self._is_trained = [prices.is_trained(name) for name in flow.names]
        n_calls = max(256, _MOST_KEPT // cluster.n_devices)
        self.on_devices = lru_cache(maxsize=n_calls)(self._priced)
        self.arriving = lru_cache(maxsize=n_calls)(self._moved)
        self.sources = [
            home if home != call and Move(call, home, call) in flow.moves_of[call] else -1
            for call, home in enumerate(flow.homes)
        ]

    def need(
        self, plan: Plan, learned: Learned | None = None, *, is_least: bool = True, limit: float = math.inf
    ) -> int:
        """Return the bytes that the fullest device needs.

        Args:
            plan: calls that have a place, all of them or some.
            is_least: take the least connections that a call may have whose order of ranks is not known, and the least
                bytes where its role's home has no place, instead of those in the plain order; then more calls never
                need less.
            limit: of a plan that needs more, some of the bytes may be returned that are more, too.
        """
        return int(self._level(plan, learned, is_least=is_least, limit=limit).max())

    def _level(self, plan: Plan, learned: Learned | None, *, is_least: bool, limit: float = math.inf) -> Matrix:
        """Return the bytes that each device needs, as `need` does those of the fullest one."""
        level = np.zeros(self._cluster.n_devices, dtype=np.int64)
        most, homes, begun = np.zeros_like(level), self._flow.homes, list[tuple[int, int, Matrix]]()
        for call, placed in plan.items():  # first what stays
            if homes[call] == call:
                own, (first, end) = self.on_devices(call, placed.choice), placed.span
                level[first:end] += own.kept
                if own.begun is not None:
                    begun.append((call, first, own.begun))
        for call, placed in plan.items():
            used, (first, end) = self._used(call, plan, learned, is_least=is_least), placed.span
            for other, begin, n_bytes in begun:
                if call in self._flow.before[other] or self.sources[call] == other:
                    used = _added(used, n_bytes, begin - first)
            there = most[first:end]
            np.maximum(there, used, out=there)
        level += most
        if not self.connects or level.max() > limit:
            return level
        return level + self._connections(plan, learned, is_least=is_least)

    def likely(self, plan: Sequence[Placed], learned: Learned, limit: float = math.inf) -> int:
        """Return the bytes that the fullest device needs, as far as is known; it may be more than a run needs.

        Args:
            limit: as for `need`.
        """
        return int(self._likely(plan, learned, limit).max())

    def _likely(self, plan: Sequence[Placed], learned: Learned, limit: float = math.inf) -> Matrix:
        level = self._level(dict(enumerate(plan)), learned, is_least=False, limit=limit)
        if learned.lacking:
            for first, end, here in stretches(plan):
                level[first:end] += learned.lacking.get(here, 0)
        return level

    def learn(self, plan: Sequence[Placed], shown: Shown, learned: Learned) -> None:
        """Note what a run's count shows of a plan, so that its bytes and those of others are known better."""
        placements = tuple([placed.placement for placed in plan])
        for call, ordered in shown.ordered.items():
            learned.ordered[call, placements[call], placements[self.sources[call]]] = ordered
        level = self._likely(plan, learned)
        first, end, here = next(one for one in stretches(plan) if one[0] <= shown.device < one[1])
        more = shown.n_bytes - int(level[first:end].max())
        if more > 0:
            learned.lacking[here] = learned.lacking.get(here, 0) + more

    def _used(self, call: int, plan: Plan, learned: Learned | None, *, is_least: bool) -> Matrix:
        """Return what a call takes on each device of its mesh while it runs."""
        source, target = self.sources[call], plan[call]
        home = plan.get(source)
        if home is None or home.placement == target.placement:
            used = self.on_devices(call, target.choice).used
            is_open = home is None and source >= 0 and is_least  # away from home, any rank may have any part
            return np.full_like(used, used.min()) if is_open else used
        known, start = _known(call, target, home, learned), seen_from(target.span, home.span)
        parts = None if known is None else known.parts
        return self.arriving(call, home.choice.strategy, home.choice.zero_stage == 3, target.choice, start, parts)

    def _priced(self, call: int, choice: Choice) -> OnDevices:
        return self._prices.on_devices(self._flow.names[call], choice)

    def _moved(
        self,
        call: int,
        source: ParallelStrategy,
        is_gathered: bool,
        target: Choice,
        start: int | None,
        parts: tuple[int, ...] | None = None,
    ) -> Matrix:
        names = self._flow.names[self.sources[call]], self._flow.names[call]
        return self._prices.arriving(names, Choice(source, zero_stage=3 if is_gathered else 0), target, start, parts)

    # ------------------------------------------------------------ connections

    @property
    def connects(self) -> bool:
        """True if devices have connections to each other, which take memory."""
        return self._prices.connects

    @property
    def any_rows(self) -> bool:
        """True if rows move between any two devices of a node, which are connected then."""
        return self._prices.any_rows

    def plain_links(self, call: int, strategy: ParallelStrategy, first: int) -> Links:
        """Return the connections of a call on a mesh that begins at rank `first`, in the plain order of ranks."""
        return links_of(strategy, first, self._cluster, is_trained=self._is_trained[call])

    def _connections(self, plan: Plan, learned: Learned | None, *, is_least: bool) -> Matrix:
        cluster = self._cluster
        links = [self._links(call, plan, learned, is_least=is_least) for call in plan]
        links += [node_links(cluster)] * self.any_rows
        return connected(dict.fromkeys(links), cluster.n_devices, cluster.n_devices_per_node)

    def _links(self, call: int, plan: Plan, learned: Learned | None, *, is_least: bool) -> Links:
        placed, source = plan[call], self.sources[call]
        home, strategy, first = plan.get(source), placed.choice.strategy, placed.span[0]
        if home is None and source >= 0 and is_least:
            return unordered_links(strategy, first)
        if home is not None and home.placement != placed.placement:
            known = _known(call, placed, home, learned)
            if known is not None:
                return known.links
            if is_least:
                return unordered_links(strategy, first)
        return self.plain_links(call, strategy, first)


def stretches(plan: Sequence[Placed]) -> Iterator[tuple[int, int, Here]]:
    """Yield stretches of devices that have the same calls: the first device, the one behind the last, and the calls."""
    bounds, own = segments_of([placed.span for placed in plan])
    for i, (first, end) in enumerate(pairwise(bounds)):
        here = [placed.placement if i in found else None for placed, found in zip(plan, own, strict=True)]
        yield first, end, tuple(here)


def seen_from(span: Span, other: Span) -> int | None:
    """Return the first device of another mesh, seen from that of a mesh; None if they share no device."""
    is_shared = other[0] < span[1] and span[0] < other[1]
    return other[0] - span[0] if is_shared else None


def _known(call: int, placed: Placed, home: Placed, learned: Learned | None) -> Ordered | None:
    """Return the order of the ranks of a call away from home, if a refusal has shown it."""
    if learned is None or not learned.ordered:
        return None
    return learned.ordered.get((call, placed.placement, home.placement))


def _added(n_bytes: Matrix, more: Matrix, start: int) -> Matrix:
    """Add the bytes of a stretch of devices that begins at `start`, as far as they are here."""
    first, end = max(start, 0), min(start + len(more), len(n_bytes))
    if first >= end:
        return n_bytes
    n_bytes = n_bytes.copy()
    n_bytes[first:end] += more[first - start : end - start]
    return n_bytes

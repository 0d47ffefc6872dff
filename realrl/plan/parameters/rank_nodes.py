"""Shares of nodes in a target layout: how many ranks of each node take each part, so that few bytes cross to nodes.

A part is a (pp_rank, tp_rank), which as many ranks take as there are replicas. What crosses to a node does not grow
with the number of its ranks that take a part: it comes once. So a node should take few parts, and those that it has.

Invariants of `NodeShares.choose`:
- every part is taken by as many ranks as there are replicas, and every rank takes one part;
- if a search of all shares is short (at most `_MOST_STEPS` steps), no others let fewer bytes cross, and of those that
  let as few cross none let ranks keep more. The linear relaxation of Balinski (1961) takes its place where it is long,
  and shares are not chosen at all where that is large as well;
- equal input gives equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc_assignment import transport
from realrl.plan.parameters.realloc_overlap import part_of
from realrl.plan.parameters.realloc_portions import Matrix, Portion

_MOST_STEPS = 20_000
_MOST_ENTRIES = 1 << 14  # nodes times columns of the relaxation
Counts = tuple[int, ...]
Column = tuple[int, ...]  # parts that ranks of one node take together


class NodeShares:
    """Nodes, what they hold of a source layout, and what they would lack of a target layout.

    Args:
        portions: portions of the two layouts.
        plain: the target layout in plain order.
        held: bytes of each target part that each source part contains, from `Overlap`.
        node_of: global rank -> node.
    """

    def __init__(
        self,
        portions: Sequence[Portion],
        source: ParameterLayout,
        plain: ParameterLayout,
        held: Matrix,
        node_of: Callable[[int], int],
    ) -> None:
        self._source, self._plain, self._held, self._node_of = source, plain, held, node_of
        self._nodes = {node: place for place, node in enumerate(sorted({node_of(rank) for rank in plain.ranks}))}
        self._ranks: list[list[int]] = [[] for _ in self._nodes]
        for rank in plain.ranks:
            self._ranks[self._nodes[node_of(rank)]].append(rank)
        self._sizes = np.array([portion.num_bytes for portion in portions], dtype=np.int64)
        self._needed = np.zeros((plain.strategy.pp * plain.strategy.tp, len(portions)), dtype=bool)
        has = np.zeros((source.strategy.pp * source.strategy.tp, len(portions)), dtype=bool)
        for number, portion in enumerate(portions):
            for stages, tps, tp, flags in (
                (portion.target_stages, portion.target_tps, plain.strategy.tp, self._needed),
                (portion.source_stages, portion.source_tps, source.strategy.tp, has),
            ):
                flags[[stage * tp + tp_rank for stage in stages for tp_rank in tps], number] = True
        self._lacks = np.ones((len(self._nodes), len(portions)), dtype=bool)
        for rank in source.ranks:
            if node_of(rank) in self._nodes:
                self._lacks[self._nodes[node_of(rank)]] &= ~has[part_of(source, rank)]

    @property
    def n_nodes(self) -> int:
        return len(self._nodes)

    def bytes_across(self, layout: ParameterLayout) -> int:
        """Return the bytes that cross to nodes if the target layout is this one, on the same ranks."""
        taken: list[set[int]] = [set() for _ in self._nodes]
        for rank in layout.ranks:
            taken[self._nodes[self._node_of(rank)]].add(part_of(layout, rank))
        return sum(self._crossing(place, parts) for place, parts in enumerate(taken))

    def choose(self, columns: Sequence[Column]) -> list[list[int]] | None:
        """Return, for each part, the ranks that take it, node by node; None on one node, or where that takes long.

        Args:
            columns: all parts, in groups of equal size. The ranks of a node take whole groups, whose n-th ranks are
                then on one node. The number of a node's ranks must be a multiple of the size.
        """
        if self.n_nodes == 1 or self.n_nodes * len(columns) > _MOST_ENTRIES:
            return None
        rooms = [len(ranks) // len(columns[0]) for ranks in self._ranks]
        counts = self._searched(columns, rooms)
        if counts is None:
            counts = self._relaxed(columns, rooms)
        taken: list[list[int]] = [[] for _ in self._needed]
        for place, of_node in enumerate(counts):
            for part, ranks in self._best_inside(place, columns, of_node)[1].items():
                taken[part] += ranks
        return taken

    def _searched(self, columns: Sequence[Column], rooms: Sequence[int]) -> list[Counts] | None:
        """Return counts [node][column] of the fewest bytes across, then of the most kept; None if that takes long.

        Goes through the nodes, and keeps the best way to each state: how often each column is still to be taken.
        """
        ways: dict[Counts, tuple[int, int, list[Counts]]] = {(self._plain.strategy.dp,) * len(columns): (0, 0, [])}
        if self._n_steps(len(columns), rooms) > _MOST_STEPS:
            return None
        for place, room in enumerate(rooms):
            reached: dict[Counts, tuple[int, int, list[Counts]]] = {}
            known: dict[Counts, tuple[int, int]] = {}
            for left, (across, lost, path) in ways.items():
                for counts in _choices(room, left):
                    if counts not in known:
                        known[counts] = (
                            self._across(place, columns, counts),
                            -self._best_inside(place, columns, counts)[0],
                        )
                    state = tuple(a - b for a, b in zip(left, counts, strict=True))
                    cost = (across + known[counts][0], lost + known[counts][1])
                    if state not in reached or cost < reached[state][:2]:
                        reached[state] = (*cost, [*path, counts])
            ways = reached
        ((_, _, found),) = ways.values()
        return found

    def _n_steps(self, n_columns: int, rooms: Sequence[int]) -> int:
        """Return a bound of the choices of all nodes, for all states before each of them."""
        one = np.ones(self._plain.strategy.dp + 1)  # as polynomials: the n-th coefficient counts ways to take n ranks
        ways = np.ones(1)
        for _ in range(n_columns):
            ways = np.convolve(ways, one)[: sum(rooms) + 1]
        before, n_steps = 0, 0.0
        for room in rooms:
            n_steps += float(ways[before]) * float(ways[room])
            before += room
        return math.ceil(min(n_steps, 1e18))

    def _relaxed(self, columns: Sequence[Column], rooms: Sequence[int]) -> list[Counts]:
        """Return counts for which each rank that takes a column pays its share of what crosses at the most."""
        dp = self._plain.strategy.dp
        gains = np.zeros((self.n_nodes, len(columns)), dtype=np.int64)
        for place, room in enumerate(rooms):
            for number, column in enumerate(columns):
                gains[place, number] = -self._crossing(place, column) // min(max(room, 1), dp)
        amounts, _ = transport(gains, rooms, [dp] * len(columns))
        return [tuple(row) for row in amounts.tolist()]

    def _across(self, place: int, columns: Sequence[Column], counts: Counts) -> int:
        taken = (column for column, count in zip(columns, counts, strict=True) if count)
        return self._crossing(place, [part for column in taken for part in column])

    def _crossing(self, place: int, parts: Iterable[int]) -> int:
        """Return the bytes that cross to a node whose ranks take these parts."""
        return int(self._sizes[self._needed[list(parts)].any(axis=0) & self._lacks[place]].sum())

    def _best_inside(
        self, place: int, columns: Sequence[Column], counts: Counts
    ) -> tuple[int, Mapping[int, Sequence[int]]]:
        """Return the most bytes that a node's ranks keep if they take these columns, and part -> ranks."""
        parts = [(part, count) for column, count in zip(columns, counts, strict=True) if count for part in column]
        alike: dict[int, list[int]] = {}
        for rank in self._ranks[place]:
            alike.setdefault(part_of(self._source, rank) if rank in self._source else -1, []).append(rank)
        rows = np.vstack([self._held, np.zeros_like(self._held[:1])])[list(alike)]
        gains = rows[:, [part for part, _ in parts]]
        amounts, _ = transport(gains, [len(ranks) for ranks in alike.values()], [count for _, count in parts])
        taken: dict[int, list[int]] = {part: [] for part, _ in parts}
        for ranks, row in zip(alike.values(), amounts.tolist(), strict=True):
            start = 0
            for (part, _), amount in zip(parts, row, strict=True):
                taken[part] += ranks[start : start + amount]
                start += amount
        return int((gains * amounts).sum()), taken


def _choices(room: int, left: Counts) -> Iterator[Counts]:
    """Yield all ways to take `room` in total, of no column more than is left."""
    if len(left) == 1:
        if room <= left[0]:
            yield (room,)
        return
    for first in range(max(room - sum(left[1:]), 0), min(room, left[0]) + 1):
        for rest in _choices(room - first, left[1:]):
            yield first, *rest

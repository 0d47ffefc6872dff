"""Assignment of ranks to the coordinates of a target layout, so that the fewest bytes move.

This generalises the grouping of HybridFlow's 3D-HybridEngine (Sheng et al. 2024, section 5) to any two strategies: a
rank gets the target slices that overlap the most with its own. Between nodes a slice counts once for all ranks of a
node.

Invariants of `best_rank_order`:
- on one node no order of the ranks moves fewer bytes. On several nodes no order lets fewer bytes cross between them,
  and none of those that let as few cross moves fewer, as far as `NodeShares` can search all orders; where it cannot,
  this holds of the plain order (position = mesh rank) and of the order that is best without regard to nodes;
- if the plain order is as good, each rank holds the same slices as in the plain order;
- on one node, where every source replica has the same number of ranks for each target part, the target replicas made of
  one source replica have consecutive dp_ranks; otherwise dp_ranks follow the order of `ranks`;
- equal input gives an equal order.

Of the orders that move as few bytes, one is taken in which ranks stay near their tensor groups of the plain order, so
that the groups are made of neighbours: a tensor group that spans nodes would cost more than it saves. `order_for` keeps
tensor groups inside nodes, and gives the plain order where next to nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.rank_nodes import Column, NodeShares
from realrl.plan.parameters.realloc_assignment import Flags, transport
from realrl.plan.parameters.realloc_overlap import overlap_of_layouts, part_of
from realrl.plan.parameters.realloc_portions import Matrix, portions_of

_LEAST_SAVED = 0.01  # of the bytes of the plain order; a few vectors are no reason to mix up groups
_MOST_PLACES = 128  # of tensor groups; of more, neighbours count as one place, so that ranks there are alike


def best_rank_order(
    source_layout: ParameterLayout,
    strategy: ParallelStrategy,
    ranks: Sequence[int],
    *,
    node_of: Callable[[int], int] | None = None,
) -> ParameterLayout:
    """Return the layout of a strategy on some ranks that is reached with the fewest bytes across nodes, then in total.

    Args:
        source_layout: layout of the parameters now.
        strategy: strategy of the target layout.
        ranks: the ranks of the target layout in the plain order, which decides among equally good ones. They need not
            be in the source layout.
        node_of: global rank -> node; without it all ranks are on one node.

    Raises:
        AllocationError: the number of ranks is not the strategy's, a rank occurs twice, or tp or pp does not fit.
    """
    orders = _Orders(source_layout, strategy, ranks, node_of or (lambda rank: 0))
    return min(orders.candidates([(part,) for part in range(strategy.pp * strategy.tp)]), key=orders.cost)


def order_for(
    source_layout: ParameterLayout, strategy: ParallelStrategy, ranks: Sequence[int], *, node_of: Callable[[int], int]
) -> tuple[int, ...]:
    """Return the best order of `ranks` for a call whose parameters come from the source layout.

    It is that of `best_rank_order`, with two exceptions. No tensor group spans more nodes than the one of the plain
    order that spans the most: parameters move once a call, but the messages of a tensor group are many and urgent. And
    it is the plain one, `ranks`, unless the best saves more than a hundredth of all bytes or of those between nodes.

    Args:
        source_layout, strategy, ranks: as for `best_rank_order`.
        node_of: global rank -> node.

    Raises:
        AllocationError: as `best_rank_order`.
    """
    orders = _Orders(source_layout, strategy, ranks, node_of)

    def most_nodes(layout: ParameterLayout) -> int:
        return max(len(set(map(node_of, group))) for group in layout.tp_groups())

    columns: list[Column] = [(part,) for part in range(strategy.pp * strategy.tp)]
    if most_nodes(orders.plain) == 1:  # the tensor groups of a stage move as one
        columns = [tuple(range(first, first + strategy.tp)) for first in range(0, len(columns), strategy.tp)]
    allowed = [layout for layout in orders.candidates(columns) if most_nodes(layout) <= most_nodes(orders.plain)]
    best = min(allowed, key=orders.cost)
    (across, moved), (plain_across, plain_moved) = orders.cost(best), orders.cost(orders.plain)
    saves_across = plain_across - across > _LEAST_SAVED * plain_across
    is_worth_it = saves_across or plain_moved - moved > _LEAST_SAVED * plain_moved
    return best.ranks if is_worth_it else orders.plain.ranks


class _Orders:
    """Orders of the ranks of a target layout, and what they cost."""

    def __init__(
        self,
        source: ParameterLayout,
        strategy: ParallelStrategy,
        ranks: Sequence[int],
        node_of: Callable[[int], int],
    ) -> None:
        self.plain = parameter_layout(source.specs, strategy, ranks)
        self._source = source
        portions = portions_of(source, self.plain)
        overlap = overlap_of_layouts(source, self.plain)
        self._held, self._needed_bytes = overlap.held, int(overlap.needed.sum()) * strategy.dp
        self._nodes = NodeShares(portions, source, self.plain, self._held, node_of)

    def candidates(self, columns: Sequence[Column]) -> Iterator[ParameterLayout]:
        """Yield the best order without regard to nodes, the plain one, and the best for nodes that take the columns."""
        yield self._layout(_by_replica(self._source, _choose_parts(self._source, self.plain, self._held)))
        yield self.plain
        chosen = self._nodes.choose(columns)
        if chosen is not None:
            yield self._layout(chosen)

    def cost(self, layout: ParameterLayout) -> tuple[int, int]:
        """Return the bytes that cross between nodes, and all bytes that move."""
        source = self._source
        kept = (int(self._held[part_of(source, r), part_of(layout, r)]) for r in layout.ranks if r in source)
        return self._nodes.bytes_across(layout), self._needed_bytes - sum(kept)

    def _layout(self, members_of_part: Sequence[Sequence[int]]) -> ParameterLayout:
        s = self.plain.strategy
        ordered = [
            members_of_part[pp_rank * s.tp + tp_rank][dp_rank]
            for pp_rank, dp_rank, tp_rank in map(s.coordinates, range(s.n_devices))
        ]
        return parameter_layout(self._source.specs, s, ordered)


def _choose_parts(source: ParameterLayout, plain: ParameterLayout, held: Matrix) -> list[list[int]]:
    """Return, for each target part, the ranks that take it, in plain order."""
    source_part = {rank: part_of(source, rank) for rank in plain.ranks if rank in source}
    part_taken = {rank: part_of(plain, rank) for rank in plain.ranks}
    alike: dict[int, list[int]] = {}  # source part, or -1 -> ranks
    for rank in plain.ranks:
        alike.setdefault(source_part.get(rank, -1), []).append(rank)
    gains = np.vstack([held, np.zeros_like(held[:1])])[list(alike)]
    amounts, is_free = transport(gains, [len(ranks) for ranks in alike.values()], [plain.strategy.dp] * held.shape[1])
    kept_by_plain = sum(int(held[source_part[rank], part_taken[rank]]) for rank in source_part)
    if kept_by_plain < int((gains * amounts).sum()):
        for rows, parts in _components(is_free):
            free = {source: is_free[row, parts] for row, source in enumerate(alike) if row in rows}
            part_taken.update(_nearest_groups(plain, {source: alike[source] for source in free}, free, parts))
    taken: list[list[int]] = [[] for _ in range(held.shape[1])]
    for rank in plain.ranks:
        taken[part_taken[rank]].append(rank)
    return taken


def _components(is_free: Flags) -> Iterator[tuple[set[int], list[int]]]:
    """Yield rows and columns that are connected through free entries; exchanges among them cost nothing."""
    unseen = set(range(is_free.shape[1]))
    while unseen:
        columns, rows = {min(unseen)}, set[int]()
        while True:
            reached = set(np.flatnonzero(is_free[:, sorted(columns)].any(axis=1)).tolist())
            if reached == rows:
                break
            rows = reached
            columns = set(np.flatnonzero(is_free[sorted(rows)].any(axis=0)).tolist())
        unseen -= columns
        yield rows, sorted(columns)


def _nearest_groups(
    plain: ParameterLayout, alike: Mapping[int, Sequence[int]], free: Mapping[int, Flags], parts: Sequence[int]
) -> dict[int, int]:
    """Give ranks to parts of one component so that they move little between the tensor groups of the plain order.

    Args:
        plain: the target layout in plain order.
        alike: source part -> ranks that hold it.
        free: source part -> flags of `parts` that these ranks may take at no cost.
        parts: target parts, each for dp ranks.
    """
    s = plain.strategy
    place = {rank: mesh_rank // s.tp for mesh_rank, rank in enumerate(plain.ranks)}
    # One column for each rank that a part is for; its tensor group is the one with that dp_rank in the plain order.
    columns = sorted((part // s.tp * s.dp + dp_rank, part) for part in parts for dp_rank in range(s.dp))
    kinds: dict[tuple[int, int], list[int]] = {}  # (tensor group in the plain order, source part) -> ranks
    for source, ranks in alike.items():
        for rank in ranks:
            kinds.setdefault((place[rank], source), []).append(rank)
    kinds = dict(sorted(kinds.items()))
    if all(flags.all() for flags in free.values()):
        # On a line, first to first and last to last is the nearest.
        ends = np.cumsum([0, *map(len, kinds.values())]).tolist()
        chosen = [[part for _, part in columns[first:end]] for first, end in pairwise(ends)]
    else:
        n_near = -(-s.pp * s.dp // _MOST_PLACES)
        at, to = (np.array([group // n_near for group, _ in known]) for known in (kinds, columns))
        distances = np.abs(at[:, None] - to)
        index_of = {part: index for index, part in enumerate(parts)}
        flags_of = np.array([free[source] for _, source in kinds])[:, [index_of[part] for _, part in columns]]
        gains = np.where(flags_of, -distances, -1 - len(plain.ranks) ** 2)
        amounts, _ = transport(gains, [len(ranks) for ranks in kinds.values()], [1] * len(columns))
        chosen = [[columns[i][1] for i in np.flatnonzero(amount)] for amount in amounts]
    taken: dict[int, int] = {}
    for ranks, parts_of_kind in zip(kinds.values(), chosen, strict=True):
        taken.update(zip(ranks, sorted(parts_of_kind), strict=True))
    return taken


def _by_replica(source: ParameterLayout, taken: list[list[int]]) -> list[list[int]]:
    """Sort the ranks of every target part by source replica, if each has the same number from each replica."""
    n_each = len(taken[0]) // source.strategy.dp
    replicas = list(range(source.strategy.dp)) * n_each
    for part_members in taken:
        of_members = [source.coordinates_of(rank)[1] for rank in part_members if rank in source]
        if sorted(of_members) != sorted(replicas) or len(part_members) != len(replicas):
            return taken
    return [sorted(part_members, key=lambda rank: source.coordinates_of(rank)[1]) for part_members in taken]

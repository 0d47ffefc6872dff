"""Assignment of ranks to the coordinates of a target layout, so that the fewest bytes move.

This generalises the grouping of HybridFlow's 3D-HybridEngine (Sheng et al. 2024, section 5) to any two strategies: a
rank gets the target slices that overlap the most with its own.

Invariants of `best_rank_order`:
- no order of the ranks moves fewer bytes; in particular the plain order (position = mesh rank) does not;
- if the plain order moves as few bytes, each rank holds the same slices as in the plain order;
- where every source replica has the same number of ranks for each target part, the target replicas made of one source
  replica have consecutive dp_ranks; otherwise dp_ranks follow the order of `ranks`;
- equal input gives an equal order.

Of the orders that move as few bytes, one is taken in which ranks stay near their tensor groups of the plain order, so
that the groups are made of neighbours: a tensor group that spans nodes would cost more than it saves. `order_for` gives
the plain order where that could not be avoided, or next to nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.realloc_assignment import Flags, transport
from realrl.plan.parameters.realloc_portions import Matrix, overlap_of, part_of, portions_of

_LEAST_SAVED = 0.01  # of the bytes of the plain order; a few vectors are no reason to mix up groups


def best_rank_order(
    source_layout: ParameterLayout, strategy: ParallelStrategy, ranks: Sequence[int]
) -> ParameterLayout:
    """Return the layout of a strategy on some ranks that is reached from the source layout with the fewest bytes.

    Args:
        source_layout: layout of the parameters now.
        strategy: strategy of the target layout.
        ranks: the ranks of the target layout in the plain order, which decides among equally good ones. They need not
            be in the source layout.

    Raises:
        AllocationError: the number of ranks is not the strategy's, a rank occurs twice, or tp or pp does not fit.
    """
    plain = parameter_layout(source_layout.specs, strategy, ranks)
    held, _ = overlap_of(portions_of(source_layout, plain), source_layout, plain)
    members_of_part = _by_replica(source_layout, _choose_parts(source_layout, plain, held))
    ordered = [
        members_of_part[pp_rank * strategy.tp + tp_rank][dp_rank]
        for pp_rank, dp_rank, tp_rank in map(strategy.coordinates, range(strategy.n_devices))
    ]
    return parameter_layout(source_layout.specs, strategy, ordered)


def order_for(
    source_layout: ParameterLayout, strategy: ParallelStrategy, ranks: Sequence[int], *, node_of: Callable[[int], int]
) -> tuple[int, ...]:
    """Return the best order of `ranks` for a call whose parameters come from the source layout.

    It is that of `best_rank_order`, with two exceptions that give the plain one, `ranks`: the best saves at most a
    hundredth of the bytes that the plain one moves, or a tensor group of the best spans more nodes than any of the
    plain one. Parameters move once a call, but the messages of a tensor group are many and urgent.

    Args:
        source_layout, strategy, ranks: as for `best_rank_order`.
        node_of: global rank -> node.

    Raises:
        AllocationError: as `best_rank_order`.
    """
    best = best_rank_order(source_layout, strategy, ranks)
    plain = parameter_layout(source_layout.specs, strategy, ranks)
    held, _ = overlap_of(portions_of(source_layout, plain), source_layout, plain)

    def moved(layout: ParameterLayout) -> int:
        kept = (int(held[part_of(source_layout, r), part_of(layout, r)]) for r in layout.ranks if r in source_layout)
        return sum(map(layout.num_bytes_of, layout.ranks)) - sum(kept)

    def most_nodes(layout: ParameterLayout) -> int:
        return max(len(set(map(node_of, group))) for group in layout.tp_groups())

    saved = moved(plain) - moved(best)
    is_worth_it = saved > _LEAST_SAVED * moved(plain) and most_nodes(best) <= most_nodes(plain)
    return best.ranks if is_worth_it else plain.ranks


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
        distances = np.abs(np.array([[group] for group, _ in kinds]) - np.array([group for group, _ in columns]))
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

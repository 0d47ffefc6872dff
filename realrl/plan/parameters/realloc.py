"""Transfers of parameters between ranks that turn one layout into another.

The source layout stays: its ranks keep their slices. A target rank that is also a source rank uses the bytes that it
holds already, and receives the rest.

Invariants of `plan_realloc`:
- every element that a target rank's slices contain is either kept (the rank holds it in the source layout) or arrives
  in exactly one transfer;
- a target rank receives no element that it holds, and none outside of its target slices;
- a transfer's source holds the sent elements in the source layout;
- if a rank on the target's node holds the bytes, a rank on that node sends them;
- senders that could equally well send a portion share it so that the most loaded of them sends as little as
  possible, up to one layer;
- equal input gives an equal plan; the transfers between two ranks are in the same order on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.rank_order import best_rank_order as best_rank_order
from realrl.plan.parameters.realloc_portions import (
    Matrix,
    Portion,
    UnitRange,
    check_same_model,
    overlap_of,
    part_of,
    portions_of,
)
from realrl.plan.parameters.specs import ParameterSpec, Slice, slice_of, units_of


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """One rectangular part of a parameter on its way.

    Attributes:
        source, target: global ranks, never the same.
        parameter: name of the parameter.
        source_slice: its place in the source rank's own tensor, (start, stop) for each dim.
        target_slice: its place in the target rank's own tensor.
    """

    source: int
    target: int
    parameter: str
    source_slice: Slice
    target_slice: Slice
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Keep:
    """One part of a parameter that a target rank holds already.

    Attributes:
        parameter: name of the parameter.
        source_slice: its place in the rank's tensor of the source layout, (start, stop) for each dim.
        target_slice: its place in the rank's tensor of the target layout.
        shape: shape of the union of both tensors. The union is a tensor, since a parameter is cut along one dim only.
        source_place, target_place: places of the two tensors in their union.
    """

    parameter: str
    source_slice: Slice
    target_slice: Slice
    num_bytes: int
    shape: tuple[int, ...]
    source_place: Slice
    target_place: Slice

    @property
    def is_whole_target(self) -> bool:
        """True if the source tensor contains the target tensor, for which nothing has to be allocated then."""
        return self.source_place == tuple((0, size) for size in self.shape)


def plan_realloc(
    source_layout: ParameterLayout,
    target_layout: ParameterLayout,
    *,
    node_of: Callable[[int], int] | None = None,
) -> ReallocPlan:
    """Plan the transfers that bring the ranks of the target layout their parameters.

    The ranks of the two layouts may be the same, nested, overlapping or disjoint.

    Args:
        source_layout, target_layout: layouts of one model, made from equal specs.
        node_of: global rank -> node; without it all ranks are on one node.

    Raises:
        AllocationError: the layouts are of different models.
    """
    check_same_model(source_layout, target_layout)
    portions = portions_of(source_layout, target_layout)
    flows = _flows(portions, source_layout, target_layout, node_of or (lambda rank: 0))
    return ReallocPlan(source_layout, target_layout, portions, np.array(flows, dtype=np.int64).reshape(-1, 5))


class ReallocPlan:
    """A reallocation, made by `plan_realloc`. Byte counts are known at once, transfers are spelled out on demand."""

    def __init__(
        self, source_layout: ParameterLayout, target_layout: ParameterLayout, portions: Sequence[Portion], flows: Matrix
    ) -> None:
        self.source_layout = source_layout
        self.target_layout = target_layout
        self._portions = portions
        self._held_bytes, self._needed_bytes = overlap_of(portions, source_layout, target_layout)
        self._flows = flows  # [n, 5]: source, target, portion, first item, end of items
        self._local_slice_cache: dict[tuple[int, int, int, int, int], Slice] = {}

    # ------------------------------------------------------------ bytes

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that other ranks send to `rank`; 0 for a rank that is not in the target layout."""
        if rank not in self.target_layout:
            return 0
        part = part_of(self.target_layout, rank)
        return int(self._needed_bytes[part]) - self._held(rank, part)

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that `rank` sends to others."""
        return self._sent.get(rank, 0)

    def peak_bytes(self, rank: int) -> int:
        """Return the most parameter bytes that `rank` holds: its source slices and the bytes that it receives.

        Bytes common to both layouts count once, since the two tensors of a parameter lie in one memory, their union.
        An executor that may not move the source's tensors into it has a copy of them, unless they contain the target's.
        Its buckets come on top.
        """
        held = self.source_layout.num_bytes_of(rank) if rank in self.source_layout else 0
        return held + self.bytes_received(rank)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks."""
        return sum(self.bytes_received(rank) for rank in self.target_layout.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part, ascending: all of both layouts."""
        return tuple(sorted({*self.source_layout.ranks, *self.target_layout.ranks}))

    def _held(self, rank: int, target_part: int) -> int:
        if rank not in self.source_layout:
            return 0
        return int(self._held_bytes[part_of(self.source_layout, rank), target_part])

    @cached_property
    def _sent(self) -> Mapping[int, int]:
        sent: dict[int, int] = {}
        for source, _, number, first, end in self._flows.tolist():
            ends = self._portions[number].ends
            sent[source] = sent.get(source, 0) + ends[end] - ends[first]
        return sent

    # ------------------------------------------------------------ transfers

    @cached_property
    def transfers(self) -> tuple[SliceTransfer, ...]:
        """All transfers, by parameter, place in the parameter and target."""
        return self._spell_out(self._flows)

    def transfers_from(self, rank: int) -> tuple[SliceTransfer, ...]:
        """Return the transfers from `rank`, in the order of `transfers`."""
        return self._spell_out(self._flows[self._flows_by_source.get(rank, slice(0, 0))])

    def transfers_to(self, rank: int) -> tuple[SliceTransfer, ...]:
        """Return the transfers to `rank`, in the order of `transfers`."""
        return self._spell_out(self._flows[self._flows_by_target.get(rank, slice(0, 0))])

    def keeps(self, rank: int) -> tuple[Keep, ...]:
        """Return the parts of its target slices that `rank` holds already; none for a rank of one layout only."""
        if rank not in self.source_layout or rank not in self.target_layout:
            return ()
        ours, theirs = self.source_layout.slices_of(rank), self.target_layout.slices_of(rank)
        kept = (_keep(spec, ours[spec.name], theirs[spec.name]) for spec in _common(self.source_layout, ours, theirs))
        return tuple(keep for keep in kept if keep is not None)

    @cached_property
    def _flows_by_source(self) -> Mapping[int, Matrix]:
        return _positions(self._flows[:, 0])

    @cached_property
    def _flows_by_target(self) -> Mapping[int, Matrix]:
        return _positions(self._flows[:, 1])

    def _spell_out(self, flows: Matrix) -> tuple[SliceTransfer, ...]:
        found: list[tuple[int, int, int, SliceTransfer]] = []
        for source, target, number, first, end in flows.tolist():
            source_tp, target_tp = (
                layout.coordinates_of(rank)[2]
                for layout, rank in ((self.source_layout, source), (self.target_layout, target))
            )
            for item in self._portions[number].items[first:end]:
                for piece in item:
                    transfer = SliceTransfer(
                        source,
                        target,
                        self.source_layout.specs[piece.spec_index].name,
                        self._local_slice(piece, source_tp, self.source_layout.strategy.tp),
                        self._local_slice(piece, target_tp, self.target_layout.strategy.tp),
                        piece.num_bytes,
                    )
                    found.append((piece.spec_index, piece.start, target, transfer))
        found.sort(key=lambda entry: entry[:3])
        return tuple(entry[3] for entry in found)

    def _local_slice(self, piece: UnitRange, tp_rank: int, tp_size: int) -> Slice:
        key = (piece.spec_index, piece.start, piece.stop, tp_rank, tp_size)
        found = self._local_slice_cache.get(key)
        if found is None:
            found = self._local_slice_cache[key] = _local_slice(
                self.source_layout.specs[piece.spec_index], piece, tp_rank, tp_size
            )
        return found


# ---------------------------------------------------------------- assignment of senders


def _flows(
    portions: Sequence[Portion],
    source_layout: ParameterLayout,
    target_layout: ParameterLayout,
    node_of: Callable[[int], int],
) -> list[tuple[int, int, int, int, int]]:
    """Return (source, target, portion, first item, end of items): first flows inside nodes, then the others."""
    node = {rank: node_of(rank) for rank in {*source_layout.ranks, *target_layout.ranks}}
    sent = dict.fromkeys(source_layout.ranks, 0)
    flows: list[tuple[int, int, int, int, int]] = []
    remote: list[tuple[int, list[int], list[int]]] = []
    for number in sorted(range(len(portions)), key=lambda number: -portions[number].num_bytes):
        portion = portions[number]
        holders = _ranks_at(source_layout, portion.source_stages, portion.source_tps)
        held = set(holders)
        lacking = [r for r in _ranks_at(target_layout, portion.target_stages, portion.target_tps) if r not in held]
        if not lacking:
            continue
        holders_on, lacking_on = _by_node(holders, node), _by_node(lacking, node)
        for place, receivers in lacking_on.items():
            if place in holders_on:
                flows += _deal(number, portion, holders_on[place], receivers, sent)
        far = [rank for place, receivers in lacking_on.items() if place not in holders_on for rank in receivers]
        if far:
            remote.append((number, holders, far))
    for number, holders, receivers in remote:
        flows += _deal(number, portions[number], holders, receivers, sent)
    return flows


def _deal(
    number: int, portion: Portion, holders: Sequence[int], receivers: Sequence[int], sent: dict[int, int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Share the items for all receivers over the holders, in long runs, so that few pairs of ranks communicate."""
    n_items = len(portion.items)
    item_bytes = max(portion.num_bytes // n_items, 1)
    counts = _fill([sent[rank] for rank in holders], len(receivers) * n_items, item_bytes)
    first_item, place = 0, 0
    for holder, count in zip(holders, counts, strict=True):
        while count:
            end = min(first_item + count, n_items)
            yield holder, receivers[place], number, first_item, end
            sent[holder] += portion.ends[end] - portion.ends[first_item]
            count -= end - first_item
            first_item = end
            if end == n_items:
                first_item, place = 0, place + 1


def _fill(loads: Sequence[int], n_items: int, item_bytes: int) -> list[int]:
    """Return how many of equal items each bin gets so that the fullest ends as low as possible."""
    if len(loads) == 1:
        return [n_items]
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    counts = [0] * len(loads)
    # The level that the fullest bin may reach before items are handed out one by one: rounding down leaves fewer
    # items than bins.
    total, n_bins = n_items * item_bytes, 0
    for n_bins, i in enumerate(order, 1):
        total += loads[i]
        if n_bins == len(order) or total <= n_bins * loads[order[n_bins]]:
            break
    left = n_items
    for i in order[:n_bins]:
        counts[i] = max(total // n_bins - loads[i], 0) // item_bytes
        left -= counts[i]
    neediest = sorted(order[:n_bins], key=lambda i: (loads[i] + counts[i] * item_bytes, i))
    for turn in range(left):
        counts[neediest[turn % n_bins]] += 1
    return counts


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


def _positions(ranks: Matrix) -> dict[int, Matrix]:
    """Return rank -> positions where it occurs, ascending."""
    order = np.argsort(ranks, kind="stable")
    values, starts = np.unique(ranks[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, starts[1:]), strict=True)) if len(ranks) else {}


# ---------------------------------------------------------------- slices


def _local_slice(spec: ParameterSpec, piece: UnitRange, tp_rank: int, tp_size: int) -> Slice:
    """Return the place of a piece in a tensor rank's own tensor."""
    if spec.sharded_dim is None:
        return slice_of(spec, tp_rank, tp_size)
    first, _ = units_of(spec.n_units, tp_rank, tp_size)
    span = ((piece.start - first) * spec.unit_length, (piece.stop - first) * spec.unit_length)
    whole = tuple((0, size) for size in spec.shape)
    return (*whole[: spec.sharded_dim], span, *whole[spec.sharded_dim + 1 :])


def _common(layout: ParameterLayout, ours: Mapping[str, Slice], theirs: Mapping[str, Slice]) -> Iterator[ParameterSpec]:
    return (spec for spec in layout.specs if spec.name in ours and spec.name in theirs)


def _keep(spec: ParameterSpec, ours: Slice, theirs: Slice) -> Keep | None:
    """Return the part of `theirs` that `ours` contains; both are slices of the whole parameter."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(ours, theirs, strict=True))
    lengths = [stop - start for start, stop in common]
    if min(lengths) <= 0:
        return None
    union = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(ours, theirs, strict=True))
    return Keep(
        spec.name,
        tuple((start - a, stop - a) for (start, stop), (a, _) in zip(common, ours, strict=True)),
        tuple((start - a, stop - a) for (start, stop), (a, _) in zip(common, theirs, strict=True)),
        math.prod(lengths) * (spec.num_bytes // spec.n_elements),
        tuple(stop - start for start, stop in union),
        tuple((start - first, stop - first) for (start, stop), (first, _) in zip(ours, union, strict=True)),
        tuple((start - first, stop - first) for (start, stop), (first, _) in zip(theirs, union, strict=True)),
    )

"""Transfers of parameters between ranks that turn one layout into another.

The source layout stays: its ranks keep their slices. A target rank that is also a source rank uses the bytes that it
holds already, and receives the rest.

Invariants of `plan_realloc`:
- every element that a target rank's slices contain is either kept (the rank holds it in the source layout) or arrives
  in exactly one transfer;
- a target rank receives no element that it holds, and none outside of its target slices;
- a transfer's source holds the sent elements in the source layout, or it is a relay: it needs them itself, gets them
  from another node, and passes them on inside its own;
- an element crosses to a node once if the node lacks it (a rank there needs it and none there holds it), else never;
- ranks that could equally well send, or relay, a portion share it so that the most loaded of them has as little as
  possible, up to one layer. What crosses between nodes is shared apart from what stays inside them;
- equal input gives an equal plan; the transfers between two ranks are in the same order on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.rank_order import best_rank_order as best_rank_order
from realrl.plan.parameters.realloc_flows import HELD, flows_of
from realrl.plan.parameters.realloc_overlap import Overlap, overlap_of_layouts, part_of
from realrl.plan.parameters.realloc_portions import (
    Matrix,
    Portion,
    UnitRange,
    check_same_model,
    portions_of,
)
from realrl.plan.parameters.specs import ParameterSpec, Slice, slice_of, units_of

_LEAST_ITEMS = 256  # into which a model is cut between nodes, so that relays can share out even its embedding


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """One rectangular part of a parameter on its way.

    Attributes:
        source, target: global ranks, never the same.
        parameter: name of the parameter.
        source_slice: its place in the source rank's own tensor, (start, stop) for each dim; in that of the target
            layout if the source is a relay.
        target_slice: its place in the target rank's own tensor of the target layout.
        origin: rank from which the source, a relay, has it; None if the source holds it in the source layout.
    """

    source: int
    target: int
    parameter: str
    source_slice: Slice
    target_slice: Slice
    num_bytes: int
    origin: int | None = None


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
    portions: Sequence[Portion] | None = None,
) -> ReallocPlan:
    """Plan the transfers that bring the ranks of the target layout their parameters.

    The ranks of the two layouts may be the same, nested, overlapping or disjoint.

    Args:
        source_layout, target_layout: layouts of one model, made from equal specs.
        node_of: global rank -> node; without it all ranks are on one node.
        portions: those of an earlier plan between these strategies, which was on one node if and only if this one is.

    Raises:
        AllocationError: the layouts are of different models.
    """
    check_same_model(source_layout, target_layout)
    nodes = dict.fromkeys((*source_layout.ranks, *target_layout.ranks), 0)
    if node_of is not None:
        nodes = {rank: node_of(rank) for rank in nodes}
    item_bytes = source_layout.model_bytes // _LEAST_ITEMS if len(set(nodes.values())) > 1 else None
    if portions is None:
        portions = portions_of(source_layout, target_layout, item_bytes=item_bytes)
    flows = flows_of(portions, source_layout, target_layout, nodes)
    return ReallocPlan(source_layout, target_layout, portions, flows, nodes)


class ReallocPlan:
    """A reallocation, made by `plan_realloc`. Byte counts are known at once, transfers are spelled out on demand."""

    def __init__(
        self,
        source_layout: ParameterLayout,
        target_layout: ParameterLayout,
        portions: Sequence[Portion],
        flows: Matrix,
        nodes: Mapping[int, int],
    ) -> None:
        self.source_layout = source_layout
        self.target_layout = target_layout
        self.portions = portions
        self._flows = flows  # [n, 6], see `flows_of`
        self._nodes = nodes
        self._local_slice_cache: dict[tuple[int, int, int, int, int], Slice] = {}

    # ------------------------------------------------------------ bytes

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that other ranks send to `rank`; 0 for a rank that is not in the target layout."""
        if rank not in self.target_layout:
            return 0
        return self.new_bytes(rank, moves_source=True)

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

    def new_bytes(self, rank: int, *, moves_source: bool) -> int:
        """Return the parameter bytes that a rank of the target layout holds beside its source slices.

        Args:
            moves_source: True if source tensors may move into their union with the target's; else only a source tensor
                that contains the target's is shared.
        """
        part = part_of(self.target_layout, rank)
        needed = int(self._overlap.needed[part])
        if rank not in self.source_layout:
            return needed
        shared = self._overlap.held if moves_source else self._overlap.whole
        return needed - int(shared[part_of(self.source_layout, rank), part])

    @cached_property
    def _overlap(self) -> Overlap:
        return overlap_of_layouts(self.source_layout, self.target_layout)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move between ranks."""
        return sum(self.bytes_received(rank) for rank in self.target_layout.ranks)

    @cached_property
    def bytes_between_nodes(self) -> int:
        """Bytes that move between nodes: for each node, what its ranks need and none of them holds, once."""
        return sum(self._from_other_nodes.values())

    def bytes_from_other_nodes(self, rank: int) -> int:
        """Return those of `bytes_received` that ranks of other nodes send."""
        return self._from_other_nodes.get(rank, 0)

    def bytes_to_other_nodes(self, rank: int) -> int:
        """Return those of `bytes_sent` that go to ranks of other nodes."""
        return self._to_other_nodes.get(rank, 0)

    @property
    def has_relays(self) -> bool:
        """True if a rank passes on what it gets from another node."""
        return bool((self._flows[:, 5] != HELD).any())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part, ascending: all of both layouts."""
        return tuple(sorted({*self.source_layout.ranks, *self.target_layout.ranks}))

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Ranks of which one sends to the other, the smaller first."""
        return frozenset((min(ends), max(ends)) for ends in self._flows[:, :2].tolist())

    @cached_property
    def _sent(self) -> Mapping[int, int]:
        return {rank: int(self._flow_bytes[at].sum()) for rank, at in self._flows_by_source.items()}

    @cached_property
    def _from_other_nodes(self) -> Mapping[int, int]:
        return {rank: int(self._crossing_bytes[at].sum()) for rank, at in self._flows_by_target.items()}

    @cached_property
    def _to_other_nodes(self) -> Mapping[int, int]:
        return {rank: int(self._crossing_bytes[at].sum()) for rank, at in self._flows_by_source.items()}

    @cached_property
    def _crossing_bytes(self) -> Matrix:
        """Bytes of each flow between nodes; 0 of one inside a node."""
        nodes = np.array([self._nodes[rank] for rank in self.ranks])
        source, target = nodes[np.searchsorted(self.ranks, self._flows[:, :2])].T
        return np.where(source == target, 0, self._flow_bytes)

    @cached_property
    def _flow_bytes(self) -> Matrix:
        """Bytes of each flow."""
        all_ends = np.array([end for portion in self.portions for end in portion.ends], dtype=np.int64)
        starts = np.cumsum([0, *(len(portion.ends) for portion in self.portions)])[self._flows[:, 2]]
        return all_ends[starts + self._flows[:, 4]] - all_ends[starts + self._flows[:, 3]]

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

    def direct_transfers_to(self, rank: int) -> tuple[SliceTransfer, ...]:
        """Return those of `transfers_to` that do not come through a relay."""
        flows = self._flows[self._flows_by_target.get(rank, slice(0, 0))]
        return self._spell_out(flows[flows[:, 5] == HELD])

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
        for source, target, number, first, end, origin in flows.tolist():
            layout_there = self.source_layout if origin == HELD else self.target_layout
            source_tp, target_tp = (
                layout.coordinates_of(rank)[2]
                for layout, rank in ((layout_there, source), (self.target_layout, target))
            )
            for item in self.portions[number].items[first:end]:
                for piece in item:
                    transfer = SliceTransfer(
                        source,
                        target,
                        self.source_layout.specs[piece.spec_index].name,
                        self._local_slice(piece, source_tp, layout_there.strategy.tp),
                        self._local_slice(piece, target_tp, self.target_layout.strategy.tp),
                        piece.num_bytes,
                        None if origin == HELD else origin,
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

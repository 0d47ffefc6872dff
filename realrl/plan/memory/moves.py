"""Bytes of a reallocation on each rank: new parameters, and messages.

What a rank lacks follows from the overlap of its two parts alone. What it sends depends on how senders share the work,
which only a plan of all transfers tells. Such plans are made when asked for, and kept: two reallocations are alike if
one is the other on ranks some nodes further on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from realrl.mesh.device_mesh import Allocation
from realrl.plan.memory.buffers import REALLOC_BUCKET, REALLOC_LARGE, REALLOC_ROUNDS
from realrl.plan.memory.cuts import CutModel, parts_of
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.parameters.realloc import ReallocPlan, SliceTransfer, plan_realloc
from realrl.plan.parameters.realloc_portions import Matrix, Portion

MESSAGES = REALLOC_ROUNDS * REALLOC_BUCKET  # bytes a direction that a reallocation has under way


@dataclass(frozen=True)
class Lacking:
    """Bytes that the ranks of a target layout lack, by mesh rank.

    Attributes:
        received: bytes that other ranks send.
        copied: those received, and those of tensors that the rank holds in part, where source tensors may not move.
        needed: all bytes of the layout.
        buffered: bytes of messages at a time that do not arrive in their place, where tensors are new.
    """

    received: Matrix
    copied: Matrix
    needed: Matrix
    buffered: Matrix


@dataclass(frozen=True)
class Sent:
    """Bytes of messages of every rank, counted from rank `first` on.

    Attributes:
        buffered: those that go out and are copied for it.
        from_other_nodes: those that come from other nodes.
    """

    first: int
    buffered: Matrix
    from_other_nodes: Matrix

    def messages(self, ranks: slice | Matrix, *, is_average: bool) -> Matrix:
        """Return the bytes of messages that go out, and that a relay keeps while it averages, under way at a time."""
        n_bytes = np.minimum(self._at(self.buffered, ranks), MESSAGES)
        if is_average:  # a relay keeps a round that it averages until it has passed it on
            n_bytes += np.minimum(self._at(self.from_other_nodes, ranks), REALLOC_BUCKET)
        return n_bytes

    def _at(self, n_bytes: Matrix, ranks: slice | Matrix) -> Matrix:
        places = (np.arange(ranks.start, ranks.stop) if isinstance(ranks, slice) else ranks) - self.first
        return np.where((places >= 0) & (places < len(n_bytes)), n_bytes.take(places, mode="clip"), 0)


class Moves:
    """Reallocations whose transfers were planned."""

    def __init__(self) -> None:
        self._sent: dict[tuple[object, ...], Sent] = {}
        self._portions: dict[tuple[object, ...], Sequence[Portion]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, model: CutModel, source: Allocation, target: Allocation) -> Sent:
        """Return what ranks send, from a plan of all transfers."""
        size, ends = source.mesh.cluster.n_devices_per_node, (source, target)
        first = min(end.mesh.ranks[0] for end in ends) // size * size
        key = model.model, size, *((end.mesh.ranks[0] - first, end.strategy, _order(end, first)) for end in ends)
        if key not in self._sent:
            stop = max(end.mesh.ranks[-1] for end in ends) + 1 - first
            layouts = (
                parameter_layout(model.specs, end.strategy, [rank - first for rank in end.ranks]) for end in ends
            )
            of_portions = (
                model.model,
                stop > size,
                *((end.strategy.tp, end.strategy.pp, end.strategy.vpp) for end in ends),
            )
            plan = plan_realloc(*layouts, node_of=lambda rank: rank // size, portions=self._portions.get(of_portions))
            self._portions[of_portions] = plan.portions
            copied = plan.bytes_sent
            if stop <= size and plan.total_bytes <= REALLOC_BUCKET:
                copied = partial(_packed_bytes_sent, plan)
            found = [(copied(rank), plan.bytes_from_other_nodes(rank)) for rank in range(stop)]
            self._sent[key] = Sent(0, *np.array(found, dtype=np.int64).T)
        return replace(self._sent[key], first=first)


def _packed_bytes_sent(plan: ReallocPlan, rank: int) -> int:
    """Return the bytes that a rank copies into messages; a large slice without gaps leaves from its place.

    Tensors that the rank has in both layouts may have moved into their union by then.
    """
    held = plan.source_layout.slices_of(rank) if rank in plan.source_layout else {}
    lengths = {name: [stop - start for start, stop in slices] for name, slices in held.items()}
    lengths |= {keep.parameter: list(keep.shape) for keep in plan.keeps(rank)}

    def has_gaps(transfer: SliceTransfer) -> bool:
        pairs = zip(transfer.source_slice[1:], lengths[transfer.parameter][1:], strict=True)
        return any(stop - start < length for (start, stop), length in pairs)

    transfers = plan.transfers_from(rank)
    return sum(one.num_bytes for one in transfers if one.num_bytes < REALLOC_LARGE or has_gaps(one))


def _order(allocation: Allocation, first: int) -> tuple[int, ...] | None:
    return allocation.order and tuple(rank - first for rank in allocation.order)


def ranks_of(allocation: Allocation) -> slice | Matrix:
    """Return the global ranks by mesh rank, as an index into arrays over all ranks."""
    if allocation.order is not None:
        return np.array(allocation.order)
    return slice(allocation.mesh.ranks[0], allocation.mesh.ranks[-1] + 1)


def lacking(model: CutModel, source: Allocation, target: Allocation) -> Lacking:
    """Return what the ranks of the target layout lack."""
    overlap = model.overlap(source.strategy, target.strategy)
    n_ranks = max(source.mesh.ranks[-1], target.mesh.ranks[-1]) + 1
    source_parts, parts = np.full(n_ranks, -1), parts_of(target.strategy)
    source_parts[ranks_of(source)] = parts_of(source.strategy)
    here = source_parts[ranks_of(target)]
    needed = overlap.needed[parts]
    received, copied = (needed - np.where(here < 0, 0, held[here, parts]) for held in (overlap.held, overlap.whole))
    buffered, cluster = np.minimum(received, MESSAGES), source.mesh.cluster
    is_one_node = len({cluster.node_of(end.mesh.ranks[i]) for end in (source, target) for i in (0, -1)}) == 1
    if is_one_node and received.sum() <= REALLOC_BUCKET:
        tp, kinds = source.strategy.tp, model.cut(target.strategy).kinds
        buffered = np.minimum(received, np.array([kind.packed_bytes(tp) for kind in kinds])[parts])
    return Lacking(received, copied, needed, buffered)

"""NCCL's connections that the calls of a plan have, device by device: those of `connection_bytes`.

A ring is known by its stride, its number of members, and where such rings begin: calls on other meshes may have the
same ones, which count once. Of a call whose ranks have an order that is not known, it is only known how many there are.

Invariant of `connected`: it is at most what a run has, and exactly that where all orders and moves are known or plain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.plan.memory.connections import CONNECTION, MESSAGE_CHANNELS, RING_CHANNELS
from realrl.plan.parameters.realloc_portions import Matrix

Ring = tuple[int, int, int]
"""Distance between two members, their number, and the first rank of a ring, modulo the ranks that rings lie among. A
distance of 0 stands for any ring of so many members; the last number then tells those of one call apart."""

Counts = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.unsignedinteger]

_MOST_IN_NODE = 64  # devices of a node whose peers are counted


@dataclass(frozen=True, eq=False)
class Links:
    """Connections of a call.

    Attributes:
        rings: with the first rank of a stretch that is in such rings, and the one behind its last.
        messages: rings whose members send each other messages, the first rank, and how many others of its node each
            rank is connected with.
        first, peers: bits of devices of its node with which each rank exchanges rows or parameters, from rank `first`.
    """

    rings: tuple[tuple[Ring, int, int], ...]
    messages: tuple[tuple[Ring, int, Counts], ...] = ()
    first: int = 0
    peers: Bits = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))


@lru_cache(maxsize=16384)
def links_of(strategy: ParallelStrategy, first: int, cluster: Cluster, *, is_trained: bool = False) -> Links:
    """Return the connections of a call on a mesh that begins at rank `first`, in the plain order of ranks.

    Args:
        is_trained: True if the call trains, so that its role is saved.
    """
    tp, pp = strategy.tp, strategy.pp
    block, end, size = strategy.dp * tp, first + strategy.n_devices, cluster.n_devices_per_node
    strides = ((1, tp), (tp, strategy.dp), (block, pp))
    rings = [(_ring(stride, n, first), first, end) for stride, n in strides if n > 1]
    if pp > 2:  # the first stage and the last one share an embedding
        last = first + block * (pp - 1)
        tied = _ring(last - first, 2, first)
        rings += [(tied, first, first + block), (tied, last, end)]
    ranks = np.arange(first, end)
    messages = []
    if 1 < pp < cluster.n_devices:  # if it has all devices, those of a node exchange rows anyway
        messages.append((_ring(block, pp, first), first, _partners(ranks.reshape(pp, block), size).ravel()))
    if is_trained and 1 < tp < cluster.n_devices:
        counts = _partners(ranks.reshape(-1, tp).T, size, are_neighbours=False)
        messages.append((_ring(1, tp, first), first, counts.T.ravel()))
    return Links(tuple(rings), tuple(messages), first, _peers(strategy, ranks, size))


@lru_cache(maxsize=16384)
def ordered_links(
    strategy: ParallelStrategy, order: tuple[int, ...], pairs: frozenset[tuple[int, int]], cluster: Cluster
) -> Links:
    """Return the connections of a call whose ranks have an order, and of moving its parameters; at least.

    Args:
        order: the ranks of its mesh, as `Allocation.ranks` has them.
        pairs: ranks of a node, of that mesh or others, between which parameters move.
    """
    first, size, ranks = min(order), cluster.n_devices_per_node, np.array(order)
    plain = links_of(strategy, first, cluster)
    is_plain = order == tuple(range(first, first + len(order)))
    rings, messages = ([*plain.rings], [*plain.messages]) if is_plain else ([], [])
    grid = ranks.reshape(strategy.pp, strategy.dp, strategy.tp)
    n_unknown: dict[int, int] = {}
    for axis, n in enumerate(grid.shape):
        if n == 1 or is_plain:
            continue
        ring = _regular(np.moveaxis(grid, axis, 0).reshape(n, -1))
        if ring is None:
            ring = 0, n, n_unknown.get(n, 0)
            n_unknown[n] = ring[2] + 1
        elif axis == 0 and n < cluster.n_devices:
            counts = np.empty(len(order), dtype=np.uint8)
            counts[ranks - first] = _partners(grid.reshape(n, -1), size).ravel()
            messages.append((ring, first, counts))
        rings.append((ring, first, first + len(order)))
    peers = np.zeros(cluster.n_devices, dtype=_bits(size))
    peers[ranks] = _peers(strategy, ranks, size)
    if size <= _MOST_IN_NODE:
        for pair in pairs:
            both = peers.dtype.type(sum(1 << rank % size for rank in pair))
            for rank in pair:
                peers[rank] |= both
    return Links(tuple(rings), tuple(messages), 0, peers)


@lru_cache(maxsize=16384)
def unordered_links(strategy: ParallelStrategy, first: int) -> Links:
    """Return what a call on a mesh that begins at rank `first` connects in any order of its ranks."""
    rings, n_alike = list[tuple[Ring, int, int]](), dict[int, int]()
    for n in (strategy.tp, strategy.dp, strategy.pp):
        if n > 1:
            rings.append(((0, n, n_alike.get(n, 0)), first, first + strategy.n_devices))
            n_alike[n] = n_alike.get(n, 0) + 1
    return Links(tuple(rings))


@lru_cache(maxsize=64)
def node_links(cluster: Cluster) -> Links:
    """Return the connections between all devices of each node; none in nodes of very many devices."""
    n, size = cluster.n_devices, cluster.n_devices_per_node
    return Links((), peers=np.full(n, (1 << size) - 1, dtype=_bits(size))) if size <= _MOST_IN_NODE else Links(())


def connected(calls: Iterable[Links], n_devices: int, n_per_node: int) -> Matrix:
    """Return the bytes of connections on each device, int64 [devices]; calls share those that are the same."""
    peers = np.zeros(n_devices, dtype=_bits(n_per_node))
    rings = dict[Ring, set[tuple[int, int]]]()
    messages = dict[Ring, dict[tuple[int, int], Counts]]()
    for one in calls:
        peers[one.first : one.first + len(one.peers)] |= one.peers
        for ring, first, end in one.rings:
            rings.setdefault(ring, set()).add((first, end))
        for ring, first, counts in one.messages:
            found, key = messages.setdefault(ring, {}), (first, len(counts))
            found[key] = np.maximum(found[key], counts) if key in found else counts
    n_channels = RING_CHANNELS * _n_rings(rings, n_devices)
    n_pairs = (np.bitwise_count(peers) - (peers != 0)).astype(np.int64)  # of a device and itself there is none
    for by_place in messages.values():
        if len(by_place) == 1:
            (((first, n_ranks), counts),) = by_place.items()
            n_pairs[first : first + n_ranks] += counts
            continue
        most = np.zeros(n_devices, dtype=np.uint8)
        for (first, n_ranks), counts in by_place.items():
            own = most[first : first + n_ranks]
            np.maximum(own, counts, out=own)
        n_pairs += most
    n_bytes: Matrix = CONNECTION * (n_channels + MESSAGE_CHANNELS * n_pairs)
    return n_bytes


def _n_rings(rings: Mapping[Ring, Collection[tuple[int, int]]], n_devices: int) -> Matrix:
    """Return how many rings each device is in at least; unknown ones may be among those that are known."""
    known, unknown = list[tuple[int, int]](), list[tuple[int, int, tuple[int, int]]]()
    of_size: dict[int, list[tuple[int, int]]] = {}
    for ring, stretches in rings.items():
        joined = stretches if len(stretches) == 1 else _joined(stretches)
        if not ring[0]:
            unknown += [(ring[1], ring[2], stretch) for stretch in joined]
            continue
        known += joined
        of_size.setdefault(ring[1], []).extend(joined)
    found = _covered(known, n_devices)
    for n, number, (first, end) in unknown:
        found[first:end] += _covered(of_size[n], n_devices)[first:end] <= number if n in of_size else 1
    return found


def _joined(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return stretches of the same ranks that have none in common."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(stretches):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def _covered(stretches: Sequence[tuple[int, int]], n_devices: int) -> Matrix:
    """Return how many stretches each device is in."""
    if not stretches:
        return np.zeros(n_devices, dtype=np.int64)
    starts, ends = zip(*stretches, strict=True)
    steps = np.bincount(starts, minlength=n_devices + 1) - np.bincount(ends, minlength=n_devices + 1)
    found: Matrix = steps[:-1].cumsum()
    return found


def _ring(stride: int, n: int, first: int) -> Ring:
    return stride, n, first % (stride * n)


def _regular(groups: Matrix) -> Ring | None:
    """Return the ring that all groups are, [members, groups]; None if they differ."""
    members = np.sort(groups, axis=0)
    n, stride = len(members), int(members[1, 0] - members[0, 0])
    if (np.diff(members, axis=0) != stride).any():
        return None
    phase = int((members[0] % (stride * n)).min()) // stride * stride
    is_alike = (members[0] - phase) % (stride * n) < stride
    return (stride, n, phase) if is_alike.all() else None


def _partners(ranks: Matrix, n_per_node: int, *, are_neighbours: bool = True) -> Counts:
    """Return how many members of its group each rank sends messages inside its node, [members, groups].

    Args:
        are_neighbours: neighbours do, not only the first member and all others.
    """
    nodes = ranks // n_per_node
    is_near = nodes == nodes[:1]
    is_near[0] = False
    counts: Counts = is_near.astype(np.uint8)
    counts[0] = is_near.sum(axis=0)
    if are_neighbours:
        close = nodes[1:] == nodes[:-1]
        counts[2:] += close[1:]
        counts[1:-1] += close[1:]
    return counts


def _peers(strategy: ParallelStrategy, ranks: Matrix, n_per_node: int) -> Bits:
    """Return bits of the members of a rank's replica in its node; none in nodes of very many devices."""
    if n_per_node > _MOST_IN_NODE:
        return np.zeros(len(ranks), dtype=np.uint8)
    place = np.arange(len(ranks))
    nodes, replicas = ranks // n_per_node, place % (strategy.dp * strategy.tp) // strategy.tp
    nodes = nodes - nodes.min()
    bits = np.zeros((nodes.max() + 1, strategy.dp), dtype=_bits(n_per_node))
    np.bitwise_or.at(bits, (nodes, replicas), np.left_shift(1, ranks % n_per_node).astype(bits.dtype))
    found: Bits = bits[nodes, replicas]
    return found


@lru_cache(maxsize=64)
def _bits(n: int) -> type[np.unsignedinteger]:
    """Return the smallest type with so many bits."""
    return next((t for size, t in ((8, np.uint8), (16, np.uint16), (32, np.uint32)) if n <= size), np.uint64)

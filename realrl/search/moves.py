"""Seconds of moving parameters between two layouts, from counts of bytes alone.

`plan_realloc` decides for every rank what it sends to which other one, and balances them so that the busiest has as
little as possible, up to one item. Here that balance is taken for perfect: what a node lacks crosses to it once, shared
by its ranks that need it, which pass it on inside; all ranks that hold it share what crosses, and those of a node what
others of the node lack.

Invariants of `move_cost`:
    - one that moves nothing takes no time;
    - its bytes are at most those of the fullest rank of the target, in any order of these;
    - it depends on places only as far as ranks share nodes.
"""

from __future__ import annotations

import math

import numpy as np

from realrl.mesh.device_mesh import Allocation
from realrl.plan.memory.buffers import REALLOC_BUCKET, REALLOC_ROUNDS
from realrl.plan.memory.cuts import CutModel, parts_of
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.search.fast import Moved
from realrl.sim.costs.flops import Array
from realrl.sim.costs.moves import tensor_seconds
from realrl.sim.hardware import Hardware, Link


def move_cost(model: CutModel, source: Allocation, target: Allocation, hardware: Hardware) -> Moved:
    """Return the cost of a reallocation; its seconds are those from the start to the end of the last rank.

    Its bytes are those of some rank in whatever order the ranks of the target are: a run takes the best one, in which
    each rank holds as much of its part as it can.

    Args:
        source, target: layouts whose ranks are in the order of their meshes.
    """
    links = hardware.links
    overlap = model.overlap(source.strategy, target.strategy)
    size = target.mesh.cluster.n_devices_per_node
    first = min(source.mesh.ranks[0], target.mesh.ranks[0]) // size
    n_nodes = 1 + max(source.mesh.ranks[-1], target.mesh.ranks[-1]) // size - first
    sources, targets = (_parts_on(end, first, n_nodes) for end in (source, target))  # [nodes, devices of a node]
    is_source, is_target = sources >= 0, targets >= 0
    here, there = _counts(sources, overlap.held.shape[0]), _counts(targets, overlap.held.shape[1])  # [nodes, parts]
    held = overlap.held * (overlap.needed / np.maximum(overlap.held.sum(axis=0), 1))  # of replicas, one counts
    node = np.arange(n_nodes)[:, None]

    arriving = ((here == 0) @ held) * (there > 0)  # [nodes, target parts], what crosses to a node
    leaving = ((here == 0) * ((there > 0) @ held.T)).sum(axis=0)  # [source parts], what crosses to all nodes
    own = np.where(is_source & is_target, held[sources, targets], 0.0)  # what a target rank holds already
    lacking = (there @ held.T) - _sums(own, sources, overlap.held.shape[0])  # [nodes, source parts], inside a node
    relayed = np.where(is_target, (arriving / np.maximum(there, 1))[node, targets], 0.0)
    received = np.where(is_target, overlap.needed[targets], 0)
    received -= np.where(is_source & is_target, overlap.held[sources, targets], 0)
    across = relayed, np.where(is_source, leaving[sources] / source.strategy.dp, 0.0)
    inside = (
        np.maximum(received - relayed, 0.0),
        relayed * np.where(is_target, there[node, targets] - 1, 0)
        + np.where(is_source, (lacking / np.maximum(here, 1))[node, sources], 0.0),
    )
    if not received.any():
        return Moved(0.0)
    seconds = max(_busiest(*inside, links.device), _busiest(*across, links.node))
    busiest = max(float((one + other).max()) for one, other in zip(inside, across, strict=True))
    has_relays = bool(((arriving > 0) & ((there > 1) | (target.strategy.tp > 1))).any())  # tensor ranks share norms
    n_rounds = math.ceil(busiest / REALLOC_BUCKET) + (REALLOC_ROUNDS if has_relays else 0)
    seconds += n_rounds * (links.node if arriving.any() else links.device).latency_s
    seconds += tensor_seconds(len(model.specs), [source.strategy, target.strategy], hardware)
    on_both = np.bincount(sources[is_source & is_target], minlength=len(overlap.held))
    return Moved(seconds, _least_received(overlap.needed, overlap.held, on_both, target.strategy.dp))


def _least_received(needed: Matrix, held: Matrix, there: Matrix, n_replicas: int) -> int:
    """Return the bytes that some rank of a target gets at least, as if each part went to the ranks with most of it.

    Args:
        needed: bytes of each target part.
        held: those of them that source parts have, [source parts, target parts].
        there: ranks of the target by the source part that they hold.
        n_replicas: ranks that each target part is for.
    """
    most_first = np.argsort(-held, axis=0)  # [source parts, target parts]
    is_enough = there[most_first].cumsum(axis=0) >= n_replicas
    parts = np.arange(len(needed))
    own = held[most_first[is_enough.argmax(axis=0), parts], parts]
    return int((needed - np.where(is_enough.any(axis=0), own, 0)).max())


def _parts_on(allocation: Allocation, first: int, n_nodes: int) -> Matrix:
    """Return the number of each rank's part from node `first` on, -1 where there is none."""
    size, ranks = allocation.mesh.cluster.n_devices_per_node, allocation.mesh.ranks
    parts = np.full(n_nodes * size, -1)
    parts[ranks[0] - first * size : ranks[-1] + 1 - first * size] = parts_of(allocation.strategy)
    return parts.reshape(n_nodes, size)


def _counts(parts: Matrix, n_parts: int) -> Array:
    return _sums(np.ones(parts.shape), parts, n_parts)


def _sums(values: Array, parts: Matrix, n_parts: int) -> Array:
    """Add up values of ranks by node and part."""
    n_nodes = len(parts)
    place = (np.arange(n_nodes)[:, None] * (n_parts + 1) + parts + 1).ravel()
    found = np.bincount(place, weights=values.ravel(), minlength=n_nodes * (n_parts + 1)).astype(np.float64)
    return found.reshape(n_nodes, n_parts + 1)[:, 1:]


def _busiest(received: Array, sent: Array, link: Link) -> float:
    """Return the seconds of the rank, or of the node, that has the most bytes in one direction."""
    most = float(max(received.max(), sent.max())) / link.speed()
    if link.sharing is None:
        return most
    of_nodes = float(max(received.sum(axis=1).max(), sent.sum(axis=1).max()))
    return max(most, of_nodes / (link.speed() * link.sharing))

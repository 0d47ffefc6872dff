"""Seconds of messages and collectives: latency, plus bytes over the bandwidth of the slowest link on the way.

A collective of n ranks on m nodes goes through log2 n rounds of latency, an all-reduce through twice as many (Thakur et
al. 2005, "Optimization of collective communication operations in MPICH"). A ring moves (n - 1) / n of the bytes inside
a node and (m - 1) / m of them between nodes, at the same time; an all-reduce does both twice. All groups of a call work
at the same time, so that those with ranks on a node share its network cards.

Invariants:
    - a group of one, or nothing to send, takes no time;
    - no function gives less for more bytes or more ranks of a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.mesh.device_mesh import DeviceMesh
from realrl.sim.hardware import Links


@dataclass(frozen=True)
class Route:
    """The way of a group of ranks, as far as time depends on it.

    Attributes:
        n_ranks: ranks of the group.
        n_nodes: nodes that they are on.
        n_active: devices of a node that send at the same time, those of other groups included.
    """

    n_ranks: int
    n_nodes: int
    n_active: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on a node."""
        return -(-self.n_ranks // self.n_nodes)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a collective: latency, plus seconds for each byte."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def __call__(self, n_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * n_bytes if n_bytes > 0 else 0.0


FREE = LinearCost()


def route_of(ranks: Sequence[int], mesh: DeviceMesh) -> Route:
    """Return the way of a group whose like work at the same time on all ranks of a mesh."""
    cluster = mesh.cluster
    n_active = min(mesh.n_devices, cluster.n_devices_per_node)  # a mesh is a part of a node, or whole nodes
    return Route(len(ranks), len(set(map(cluster.node_of, ranks))), n_active)


def all_gather(route: Route, links: Links) -> LinearCost:
    """Return the cost of gathering, or of a reduce-scatter, by the bytes of the whole."""
    n, m = route.n_ranks, route.n_nodes
    if n == 1:
        return FREE
    k = route.per_node
    s_per_byte = (k - 1) / k / links.device.speed(route.n_active)
    latency = math.ceil(math.log2(k)) * links.device.latency_s if k > 1 else 0.0
    if m > 1:
        speed = links.node.speed(route.n_active) * k  # of all the group's ranks on a node together
        s_per_byte = max(s_per_byte, (m - 1) / m / speed)
        latency += math.ceil(math.log2(m)) * links.node.latency_s
    return LinearCost(latency, s_per_byte)


def all_reduce(route: Route, links: Links) -> LinearCost:
    """Return the cost of adding up, by the bytes of one rank's summand."""
    half = all_gather(route, links)
    return LinearCost(2 * half.latency_s, 2 * half.s_per_byte)


def send(is_between_nodes: bool, n_active: int, links: Links) -> LinearCost:
    """Return the cost of a message from one rank to another.

    Args:
        n_active: devices of a node that send at the same time.
    """
    link = links.node if is_between_nodes else links.device
    return LinearCost(link.latency_s, 1.0 / link.speed(n_active))

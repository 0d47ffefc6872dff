"""Clusters, device meshes, parallel strategies and allocations.

Rank order inside a mesh is (pp, dp, tp) with tp fastest: ``mesh_rank = (pp_rank * dp + dp_rank) * tp + tp_rank``. The
allocation maps mesh ranks to global ranks; in the plain order both ascend together.

A mesh is legal when it is
- 1, 2, 4, ... consecutive devices of one node that start at a multiple of their number, or
- whole consecutive nodes, any number of them, of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from realrl.errors import AllocationError


@dataclass(frozen=True)
class Cluster:
    """`n_nodes` nodes of `n_devices_per_node` devices; global rank = node * n_devices_per_node + device.

    Raises:
        AllocationError: a size is not positive.
    """

    n_nodes: int
    n_devices_per_node: int

    def __post_init__(self) -> None:
        for field, value in (("n_nodes", self.n_nodes), ("n_devices_per_node", self.n_devices_per_node)):
            if value < 1:
                raise AllocationError(f"a cluster has {field}={value}", remedy=f"Use {field}=1 or more.")

    @property
    def n_devices(self) -> int:
        return self.n_nodes * self.n_devices_per_node

    def node_of(self, global_rank: int) -> int:
        return global_rank // self.n_devices_per_node

    def __str__(self) -> str:
        nodes = "1 node" if self.n_nodes == 1 else f"{self.n_nodes} nodes"
        return f"{nodes} of {self.n_devices_per_node} device{'s' if self.n_devices_per_node > 1 else ''}"


@dataclass(frozen=True)
class DeviceMesh:
    """Whole nodes, or consecutive devices of one node. Prints as ``0:4-7``, ``0:3`` or ``0-1`` (whole nodes).

    Args:
        cluster: the cluster that the mesh is part of.
        ranks: global ranks, ascending and consecutive.

    Raises:
        AllocationError: the ranks are not a legal mesh of the cluster; the message names the nearest one that is.
    """

    cluster: Cluster
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        problem = _problem(self.cluster, self.ranks)
        if problem is not None:
            raise AllocationError(
                f"devices {_ranks_text(self.ranks)} are no device mesh of a cluster with {self.cluster}: {problem}",
                remedy=f"The nearest mesh is '{nearest_mesh(self.cluster, self.ranks)}'.",
                mesh=_ranks_text(self.ranks),
            )

    @classmethod
    def whole(cls, cluster: Cluster) -> DeviceMesh:
        """The mesh of all devices."""
        return cls(cluster, tuple(range(cluster.n_devices)))

    @classmethod
    def of_nodes(cls, cluster: Cluster, first: int, last: int) -> DeviceMesh:
        """All devices of the nodes `first` to `last`, both included."""
        size = cluster.n_devices_per_node
        return cls(cluster, tuple(range(first * size, (last + 1) * size)))

    @classmethod
    def of_devices(cls, cluster: Cluster, node: int, first: int, last: int) -> DeviceMesh:
        """Devices `first` to `last` of one node, both included."""
        start = node * cluster.n_devices_per_node
        return cls(cluster, tuple(range(start + first, start + last + 1)))

    @property
    def n_devices(self) -> int:
        return len(self.ranks)

    @property
    def nodes(self) -> range:
        return range(self.cluster.node_of(self.ranks[0]), self.cluster.node_of(self.ranks[-1]) + 1)

    def overlaps(self, other: DeviceMesh) -> bool:
        """True if the two meshes share a device."""
        return self.ranks[0] <= other.ranks[-1] and other.ranks[0] <= self.ranks[-1]

    def contains(self, other: DeviceMesh) -> bool:
        """True if every device of `other` is in this mesh."""
        return self.ranks[0] <= other.ranks[0] and other.ranks[-1] <= self.ranks[-1]

    def __str__(self) -> str:
        nodes, size = self.nodes, self.cluster.n_devices_per_node
        if len(nodes) > 1:
            return f"{nodes[0]}-{nodes[-1]}"
        first, last = self.ranks[0] % size, self.ranks[-1] % size
        return f"{nodes[0]}:{first}" if first == last else f"{nodes[0]}:{first}-{last}"


@dataclass(frozen=True)
class ParallelStrategy:
    """Data, tensor and pipeline parallel sizes; `sp` switches sequence parallelism. Prints as ``d4t1p2``.

    With `vpp` virtual stages, every pipeline stage has that many chunks of neighbouring blocks, and the sizes print as
    ``d4t1p2v3``.

    Raises:
        AllocationError: a size is not positive, or a single stage has virtual ones.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    vpp: int = 1

    def __post_init__(self) -> None:
        for field, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("vpp", self.vpp)):
            if value < 1:
                raise AllocationError(f"a parallel strategy has {field}={value}", remedy=f"Use {field}=1 or more.")
        if self.vpp > 1 and self.pp == 1:
            raise AllocationError(
                f"strategy {self} has {self.vpp} virtual stages, but no pipeline: pp is 1",
                remedy="Leave them out, or use two pipeline stages or more.",
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.dp, self.tp, self.pp, self.sp, self.vpp))

    def __hash__(self) -> int:  # searches look strategies up millions of times; the same in every process
        return self._hash

    @cached_property
    def n_devices(self) -> int:
        return self.dp * self.tp * self.pp

    def coordinates(self, mesh_rank: int) -> tuple[int, int, int]:
        """``(pp_rank, dp_rank, tp_rank)`` of a mesh rank."""
        rest, tp_rank = divmod(mesh_rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return pp_rank, dp_rank, tp_rank

    def mesh_rank(self, *, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """Inverse of `coordinates`."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def __str__(self) -> str:
        return f"d{self.dp}t{self.tp}p{self.pp}" + (f"v{self.vpp}" if self.vpp > 1 else "") + ("s" if self.sp else "")


@dataclass(frozen=True)
class Allocation:
    """Mesh and strategy of a call. Prints as ``d4t1p2@0:0-7``, without the rank order.

    Args:
        order: ``order[mesh_rank]`` is a global rank. None is the plain order, which is ascending; an ascending tuple
            becomes None. Only planning chooses another order, to save bytes.

    Raises:
        AllocationError: the strategy needs another number of devices than the mesh has.
        ValueError: `order` is not an order of the mesh's ranks.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        needed, given = self.strategy.n_devices, self.mesh.n_devices
        if needed != given:
            raise AllocationError(
                f"strategy {self.strategy} needs {needed} device{'s' if needed > 1 else ''}, "
                f"its mesh '{self.mesh}' has {given}",
                remedy=f"The nearest strategy for this mesh is {nearest_strategy(self.strategy, given)}.",
                mesh=str(self.mesh),
            )
        if self.order is not None:
            if tuple(sorted(self.order)) != self.mesh.ranks:
                raise ValueError(f"{self.order} is no order of the ranks of mesh '{self.mesh}'")
            if self.order == self.mesh.ranks:
                object.__setattr__(self, "order", None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks by mesh rank: the first is at coordinate (0, 0, 0). Ascending only in the plain order."""
        return self.mesh.ranks if self.order is None else self.order

    def dp_group_members(self, dp_rank: int) -> tuple[int, ...]:
        """Global ranks of all (pp, tp) coordinates that hold data-parallel slice `dp_rank`."""
        return self.dp_groups[dp_rank]

    @cached_property
    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of all (pp, tp) coordinates, for each data-parallel slice."""
        s, ranks = self.strategy, self.ranks
        firsts = [[(pp * s.dp + dp_rank) * s.tp for pp in range(s.pp)] for dp_rank in range(s.dp)]
        return tuple([tuple([rank for i in starts for rank in ranks[i : i + s.tp]]) for starts in firsts])

    def output_rank(self, dp_rank: int) -> int:
        """Global rank (last stage, tp 0) that keeps the call's outputs of data-parallel slice `dp_rank`."""
        s = self.strategy
        return self.ranks[((s.pp - 1) * s.dp + dp_rank) * s.tp]

    def __str__(self) -> str:
        return f"{self.strategy}@{self.mesh}"


def legal_meshes(cluster: Cluster) -> Iterator[DeviceMesh]:
    """Every mesh of the cluster, each once: inside nodes first, then whole nodes."""
    size = cluster.n_devices_per_node
    for node in range(cluster.n_nodes):
        n_devices = 1
        while n_devices < size:
            for first in range(0, size - n_devices + 1, n_devices):
                yield DeviceMesh.of_devices(cluster, node, first, first + n_devices - 1)
            n_devices *= 2
    for first in range(cluster.n_nodes):
        for last in range(first, cluster.n_nodes):
            yield DeviceMesh.of_nodes(cluster, first, last)


def nearest_mesh(cluster: Cluster, ranks: tuple[int, ...]) -> DeviceMesh:
    """The legal mesh that differs from `ranks` in the fewest devices; ties go to the larger mesh, then to the first.

    A mesh of the same size that shares a device with `ranks` comes before all others, because the strategy fits it.
    """
    wanted = set(ranks)

    def distance(mesh: DeviceMesh) -> tuple[bool, int, int, tuple[int, ...]]:
        is_as_large = mesh.n_devices == len(wanted) and not wanted.isdisjoint(mesh.ranks)
        return not is_as_large, len(wanted.symmetric_difference(mesh.ranks)), -mesh.n_devices, mesh.ranks

    return min(legal_meshes(cluster), key=distance)


def nearest_strategy(strategy: ParallelStrategy, n_devices: int) -> ParallelStrategy:
    """The strategy of `n_devices` devices that keeps tp and pp, or changes them the least; dp takes the rest."""

    def distance(candidate: ParallelStrategy) -> tuple[int, int]:
        changes = (abs(candidate.tp - strategy.tp), abs(candidate.pp - strategy.pp))
        return sum(map(bool, changes)), sum(changes)

    divisors = [d for d in range(1, n_devices + 1) if n_devices % d == 0]
    return min(
        (
            ParallelStrategy(n_devices // (tp * pp), tp, pp, strategy.sp)
            for tp in divisors
            for pp in divisors
            if n_devices % (tp * pp) == 0
        ),
        key=distance,
    )


def _problem(cluster: Cluster, ranks: tuple[int, ...]) -> str | None:
    """Reason why the ranks are not a legal mesh, or None."""
    if not ranks:
        return "it has no device"
    first, last, size = ranks[0], ranks[-1], cluster.n_devices_per_node
    if ranks != tuple(range(first, first + len(ranks))):
        return "its devices are not consecutive"
    if first < 0 or last >= cluster.n_devices:
        return f"the cluster has devices 0-{cluster.n_devices - 1}" if cluster.n_devices > 1 else "it has device 0 only"
    if first % size == 0 and len(ranks) % size == 0:
        return None
    if cluster.node_of(first) != cluster.node_of(last):
        return "a mesh across nodes is made of whole nodes"
    if len(ranks) & (len(ranks) - 1):
        return "inside a node a mesh has 1, 2, 4, 8, ... devices"
    if first % size % len(ranks):
        return f"{len(ranks)} devices of a node start at a multiple of {len(ranks)}"
    return None


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "(none)"

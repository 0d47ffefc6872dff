"""Devices of the cluster, rectangles of them, and how a call is spread over one.

Rank order inside a mesh is (pp, dp, tp) with tp fastest: ``mesh_rank = (pp_rank * dp + dp_rank) * tp + tp_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from realrl.errors import AllocationError


@dataclass(frozen=True)
class Cluster:
    """`n_nodes` nodes of `n_devices_per_node` devices; global rank = node * n_devices_per_node + device."""

    n_nodes: int
    n_devices_per_node: int

    @property
    def n_devices(self) -> int:
        return self.n_nodes * self.n_devices_per_node

    def node_of(self, global_rank: int) -> int:
        return global_rank // self.n_devices_per_node


@dataclass(frozen=True)
class DeviceMesh:
    """Whole nodes, or consecutive devices of one node.

    Args:
        cluster: the cluster that the mesh is part of.
        ranks: global ranks, ascending and consecutive.
    """

    cluster: Cluster
    ranks: tuple[int, ...]

    @property
    def n_devices(self) -> int:
        return len(self.ranks)

    def overlaps(self, other: DeviceMesh) -> bool:
        """Whether the two meshes share a device."""
        return not set(self.ranks).isdisjoint(other.ranks)


@dataclass(frozen=True)
class ParallelStrategy:
    """Data, tensor and pipeline parallel sizes; `sp` switches sequence parallelism."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False

    @property
    def n_devices(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"d{self.dp}t{self.tp}p{self.pp}" + ("s" if self.sp else "")


@dataclass(frozen=True)
class Allocation:
    """Where one call runs and how it is spread there."""

    mesh: DeviceMesh
    strategy: ParallelStrategy

    def __post_init__(self) -> None:
        if self.strategy.n_devices != self.mesh.n_devices:
            raise AllocationError(
                f"strategy {self.strategy} needs {self.strategy.n_devices} devices, its mesh has {self.mesh.n_devices}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in mesh order."""
        return self.mesh.ranks

    def dp_group_members(self, dp_rank: int) -> tuple[int, ...]:
        """Global ranks of all (pp, tp) coordinates that hold data-parallel slice `dp_rank`."""
        s = self.strategy
        return tuple(self.ranks[(pp * s.dp + dp_rank) * s.tp + tp] for pp in range(s.pp) for tp in range(s.tp))

    def output_rank(self, dp_rank: int) -> int:
        """Global rank (last stage, tp 0) that keeps the call's outputs of data-parallel slice `dp_rank`."""
        s = self.strategy
        return self.ranks[((s.pp - 1) * s.dp + dp_rank) * s.tp]

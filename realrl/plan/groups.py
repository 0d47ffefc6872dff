"""The process groups of a run: one ordered list, the same on every rank.

Invariants:
- The list depends on the set of allocations alone, not on the order or names of calls.
- The global group is first; then, for each distinct mesh in order of its ranks, the mesh's group and, for each
  distinct (pp, dp, tp) and rank order on it, the pipeline, tensor, data and tied groups.
- Every rank of a mesh is in exactly one pipeline, one tensor and one data group per (pp, dp, tp) and rank order of the
  mesh, also where that group has one member only; its place in the group is its coordinate on that axis.
- The global group and those of meshes are in ascending order, for any rank order of an allocation.
- With pp > 1, every rank of the first and the last stage is in exactly one tied group, which holds these two ranks of
  its pipeline; with two stages it has the members of the pipeline group. Other ranks are in none.
- No two groups have the same kind, mesh and ranks.
- `axes` cuts the list into runs of groups without a common rank: at most four for each (pp, dp, tp) and rank order of a
  mesh, one more for each mesh, and one for the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy


class GroupKind(Enum):
    """Property that the members of a process group share."""

    GLOBAL = "global"  # all ranks of the run
    MESH = "mesh"  # all ranks of one mesh
    PP = "pp"  # the stages of one pipeline: same dp_rank and tp_rank
    TP = "tp"  # the slices of one layer: same pp_rank and dp_rank
    DP = "dp"  # the holders of the same parameters: same pp_rank and tp_rank
    TIED = "tied"  # first and last stage of one pipeline: both hold an embedding that the head shares


@dataclass(frozen=True)
class ProcessGroup:
    """One process group, not yet created.

    Attributes:
        ranks: global ranks of the members; the position is the rank inside the group.
        mesh: the mesh that the group is a part of; the whole cluster for the global group.
    """

    kind: GroupKind
    ranks: tuple[int, ...]
    mesh: DeviceMesh

    @property
    def n_ranks(self) -> int:
        """Number of members; a group of one has nothing to communicate."""
        return len(self.ranks)


def process_groups(allocations: Iterable[Allocation], cluster: Cluster) -> tuple[ProcessGroup, ...]:
    """Return all groups in the order in which every rank creates them.

    Args:
        allocations: allocations of all calls; equal ones count once.
        cluster: source of the ranks of the global group.
    """
    whole = DeviceMesh.whole(cluster)
    groups = [ProcessGroup(GroupKind.GLOBAL, whole.ranks, whole)]
    layouts: dict[DeviceMesh, set[tuple[int, int, int, tuple[int, ...]]]] = {}
    for allocation in allocations:
        s = allocation.strategy
        layouts.setdefault(allocation.mesh, set()).add((s.pp, s.dp, s.tp, allocation.ranks))
    for mesh in sorted(layouts, key=lambda mesh: mesh.ranks):
        groups.append(ProcessGroup(GroupKind.MESH, mesh.ranks, mesh))
        for pp, dp, tp, order in sorted(layouts[mesh]):
            groups.extend(_axis_groups(Allocation(mesh, ParallelStrategy(dp, tp, pp), order)))
    return tuple(dict.fromkeys(groups))


def axes(groups: Iterable[ProcessGroup]) -> tuple[tuple[ProcessGroup, ...], ...]:
    """Return the groups in their order, those of one axis together: they share no rank, and can be made at once."""
    found: list[list[ProcessGroup]] = []
    taken: set[int] = set()
    for group in groups:
        is_next = found and (found[-1][0].kind, found[-1][0].mesh) == (group.kind, group.mesh)
        if not is_next or not taken.isdisjoint(group.ranks):
            found.append([])
            taken = set()
        found[-1].append(group)
        taken.update(group.ranks)
    return tuple(map(tuple, found))


def group_of(groups: Sequence[ProcessGroup], kind: GroupKind, allocation: Allocation, global_rank: int) -> ProcessGroup:
    """Return the group of one kind that a rank of the allocation's mesh belongs to.

    Raises:
        LookupError: the list was not made from this allocation, or the rank is not on its mesh.
    """
    if kind is GroupKind.GLOBAL:
        return next(group for group in groups if group.kind is kind)
    wanted: ProcessGroup | None
    if kind is GroupKind.MESH:
        wanted = ProcessGroup(kind, allocation.mesh.ranks, allocation.mesh)
    else:
        of_rank = [g for g in _axis_groups(allocation) if g.kind is kind]
        wanted = next((g for g in of_rank if global_rank in g.ranks), None)
    if wanted is None or global_rank not in wanted.ranks or wanted not in groups:
        raise LookupError(f"no {kind.value} group of {allocation} with rank {global_rank}")
    return wanted


def _axis_groups(allocation: Allocation) -> Iterator[ProcessGroup]:
    s = allocation.strategy

    def group(kind: GroupKind, mesh_ranks: Iterable[int]) -> ProcessGroup:
        return ProcessGroup(kind, tuple(allocation.ranks[mesh_rank] for mesh_rank in mesh_ranks), allocation.mesh)

    for dp in range(s.dp):
        for tp in range(s.tp):
            yield group(GroupKind.PP, (s.mesh_rank(pp_rank=i, dp_rank=dp, tp_rank=tp) for i in range(s.pp)))
    for pp in range(s.pp):
        for dp in range(s.dp):
            yield group(GroupKind.TP, (s.mesh_rank(pp_rank=pp, dp_rank=dp, tp_rank=i) for i in range(s.tp)))
    for pp in range(s.pp):
        for tp in range(s.tp):
            yield group(GroupKind.DP, (s.mesh_rank(pp_rank=pp, dp_rank=i, tp_rank=tp) for i in range(s.dp)))
    ends = (0, s.pp - 1) if s.pp > 1 else ()
    for dp in range(s.dp if ends else 0):
        for tp in range(s.tp):
            yield group(GroupKind.TIED, (s.mesh_rank(pp_rank=i, dp_rank=dp, tp_rank=tp) for i in ends))

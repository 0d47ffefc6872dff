"""Where each call runs: from the graph, the `allocation` section of the configuration and the cluster.

Modes of `allocation.mode`:

| mode | meaning |
|---|---|
| `data`, `colocate` | every call on all devices, data-parallel over all of them |
| `tensor`, `pipeline` | every call on all devices, tensor- or pipeline-parallel over all of them |
| `d2t2p1` | every call on all devices with this strategy |
| `d2t1p1@0:0-1` | every call on this mesh with this strategy |
| `split` | two halves of the cluster, data-parallel in each; see `split_roles` |
| `standalone` | every role has devices of its own, as evenly as possible; data-parallel in each |
| `manual` | every call is given in `allocation.calls` |
| `heuristic` | the same as `data` |

`allocation.calls.<call>` is `strategy@mesh`, or a strategy alone for the mesh that the mode gives the call; it takes
the place of what the mode says.

Invariants of `plan_allocations`:
- exactly the calls of the graph have an allocation, in declared order;
- the strategy's sizes multiply to the number of devices of the mesh, and the mesh is inside the cluster;
- each data-parallel rank gets at least one sample of every batch, minibatch and streamed piece;
- what today's engines cannot run is refused by `check_supported`, and by nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError, did_you_mean
from realrl.graph.build import calls, roles, topological_calls
from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_allocation, parse_strategy

if TYPE_CHECKING:
    import networkx as nx


def plan_allocations(
    graph: nx.DiGraph,
    allocation_config: AllocationConfig,
    cluster: Cluster,
    *,
    heads: Mapping[str, str] | None = None,
) -> dict[str, Allocation]:
    """Decide mesh and strategy of every call.

    Args:
        graph: from `build_graph`.
        allocation_config: mode and overrides.
        cluster: the devices there are.
        heads: role -> "lm", "value" or "reward", where known; `split` uses it.

    Returns:
        Call name -> allocation, in declared order of the calls.

    Raises:
        AllocationError: the mode is unknown, an override names no call or cannot be read, a mesh or strategy does not
            fit, a call has too few samples for its ranks, or the engines cannot run it (see `check_supported`).
    """
    overrides = allocation_config.calls
    names = [mfc.name for mfc in calls(graph)]
    for name in overrides:
        if name not in names:
            raise AllocationError(
                f"allocation.calls.{name}: there is no call '{name}'",
                remedy=f"Calls: {', '.join(names)}.{did_you_mean(name, names)}",
            )
    plan = _mode_allocations(graph, allocation_config, cluster, heads)
    for name, text in overrides.items():
        with _named(f"allocation.calls.{name}"):
            if "@" in text or name not in plan:
                plan[name] = parse_allocation(text, cluster)
            else:
                plan[name] = Allocation(plan[name].mesh, parse_strategy(text))
    plan = {name: plan[name] for name in names}
    check_n_seqs(graph, plan)
    check_supported(graph, plan)
    return plan


def check_supported(graph: nx.DiGraph, allocations: Mapping[str, Allocation]) -> None:
    """Refuse what the engines cannot run yet. This is the only place that knows; nothing else depends on it.

    Today a call is data-parallel only, and all calls of a role share one mesh, because parameters do not move.

    Raises:
        AllocationError: names the call, the rule and the nearest allocation that is supported.
    """
    for name, allocation in allocations.items():
        s = allocation.strategy
        if s.tp > 1 or s.pp > 1 or s.sp:
            nearest = Allocation(allocation.mesh, ParallelStrategy(dp=allocation.mesh.n_devices))
            raise AllocationError(
                f"call '{name}' has strategy {s}, but the engines run data-parallel calls only (tp=1, pp=1)",
                remedy=f"The nearest allocation that runs is {nearest}.",
                call=name,
                mesh=str(allocation.mesh),
            )
    home: dict[str, str] = {}
    for mfc in sorted(calls(graph), key=lambda mfc: not mfc.is_train):
        if mfc.pre_hooks or mfc.post_hooks or mfc.model.replica_id:
            what = f"runs on replica '{mfc.model}'" if mfc.model.replica_id else "has hooks"
            raise AllocationError(
                f"call '{mfc.name}' {what}, but the engines neither move nor offload parameters yet",
                remedy="The graph can be drawn; to run it, leave out hooks and replicas.",
                call=mfc.name,
            )
        first = home.setdefault(mfc.role, mfc.name)
        here, there = allocations[mfc.name], allocations[first]
        if here.mesh != there.mesh:
            raise AllocationError(
                f"calls '{first}' and '{mfc.name}' of role '{mfc.role}' run on different meshes ('{there.mesh}' and "
                f"'{here.mesh}'), but parameters cannot move between meshes yet",
                remedy=f"Give '{mfc.name}' the allocation of '{first}': allocation.calls.{mfc.name}={there}.",
                call=mfc.name,
                mesh=str(here.mesh),
            )


def check_n_seqs(graph: nx.DiGraph, allocations: Mapping[str, Allocation]) -> None:
    """Check that every data-parallel rank gets a sample of each batch, minibatch and streamed piece.

    Raises:
        AllocationError: a call has fewer samples than data-parallel ranks.
    """
    for mfc in calls(graph):
        dp = allocations[mfc.name].strategy.dp
        pieces = {
            "n_seqs / n_minibatches" if mfc.n_minibatches > 1 else "n_seqs": mfc.n_seqs // mfc.n_minibatches,
            "min_n_seqs": mfc.n_seqs if mfc.min_n_seqs is None else mfc.min_n_seqs,
        }
        for field, n_samples in pieces.items():
            if n_samples < dp:
                times = f" (n_seqs={dp * mfc.n_minibatches})" if mfc.n_minibatches > 1 else ""
                fitting = _power_of_two(n_samples)
                raise AllocationError(
                    f"call '{mfc.name}' has {field}={n_samples}, fewer than its {dp} data-parallel ranks",
                    remedy=f"Use {field}={dp} or more{times}, or a mesh with {fitting} of the devices.",
                    call=mfc.name,
                    mesh=str(allocations[mfc.name].mesh),
                )


def split_roles(graph: nx.DiGraph, heads: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the roles of a graph into two groups that can work at the same time.

    The policy, which is the role that generates (else the first trained role, else the first role), leads the first
    group; the other trained roles are the second. Then come the frozen roles: one with a known head goes to the first
    group if the head is "lm" and to the second if not; the rest, in the order in which their calls run, each to the
    group with fewer roles, the second when both are equal. For PPO: actor and ref, critic and reward.

    Returns:
        The two groups, each with the roles in declared order. The second is empty for a graph of one role.
    """
    known = heads or {}
    ordered = topological_calls(graph)
    trained = {mfc.role for mfc in ordered if mfc.is_train}
    generating = [mfc.role for mfc in ordered if mfc.interface_type is InterfaceType.GENERATE]
    policy = [*generating, *(mfc.role for mfc in ordered if mfc.is_train), ordered[0].role][0]
    first, second = {policy}, set[str]()

    def rank(role: str) -> tuple[bool, bool]:
        return role not in trained, role not in known

    for role in sorted(dict.fromkeys(mfc.role for mfc in ordered), key=rank):
        if role == policy:
            continue
        if role in trained or known.get(role, "lm") != "lm":
            second.add(role)
        elif role in known or len(first) < len(second):
            first.add(role)
        else:
            second.add(role)
    return (
        tuple(role for role in roles(graph) if role in first),
        tuple(role for role in roles(graph) if role in second),
    )


def divide_cluster(cluster: Cluster, n_parts: int) -> tuple[DeviceMesh, ...]:
    """Disjoint legal meshes, as even as possible, the larger ones first among nodes that are divided alike.

    With at least as many nodes as parts, each part is whole nodes. Otherwise nodes are cut into 1, 2, 4, ... devices;
    where a node's size is no power of two, devices can stay idle.

    Raises:
        AllocationError: there are fewer devices than parts.
    """
    if n_parts > cluster.n_devices:
        raise AllocationError(
            f"{n_parts} meshes of their own do not fit a cluster with {cluster}",
            remedy=f"The least is cluster.n_devices_per_node={-(-n_parts // cluster.n_nodes)}.",
        )
    if n_parts <= cluster.n_nodes:
        share, extra = divmod(cluster.n_nodes, n_parts)
        ends = [0]
        for part in range(n_parts):
            ends.append(ends[-1] + share + (part < extra))
        return tuple(DeviceMesh.of_nodes(cluster, a, b - 1) for a, b in itertools.pairwise(ends))
    share, extra = divmod(n_parts, cluster.n_nodes)
    meshes: list[DeviceMesh] = []
    for node in range(cluster.n_nodes):
        cuts = _cut_node(cluster.n_devices_per_node, share + (node >= cluster.n_nodes - extra))
        meshes.extend(DeviceMesh.of_devices(cluster, node, first, first + n - 1) for first, n in cuts)
    return tuple(meshes)


# ---------------------------------------------------------------- modes


def _mode_allocations(
    graph: nx.DiGraph, config: AllocationConfig, cluster: Cluster, heads: Mapping[str, str] | None
) -> dict[str, Allocation]:
    """What the mode alone says; empty for `manual`."""
    whole = DeviceMesh.whole(cluster)
    n = whole.n_devices
    same: dict[str, Callable[[], Allocation]] = {
        "data": lambda: Allocation(whole, ParallelStrategy(dp=n)),
        "colocate": lambda: Allocation(whole, ParallelStrategy(dp=n)),
        "heuristic": lambda: Allocation(whole, ParallelStrategy(dp=n)),
        "tensor": lambda: Allocation(whole, ParallelStrategy(tp=n)),
        "pipeline": lambda: Allocation(whole, ParallelStrategy(pp=n)),
    }
    mode = config.mode
    if mode in same:
        return {mfc.name: same[mode]() for mfc in calls(graph)}
    if mode == "manual":
        _check_all_given(graph, config)
        return {}
    if mode == "split":
        return _by_role(graph, "split", [part for part in split_roles(graph, heads) if part], cluster)
    if mode == "standalone":
        return _by_role(graph, "standalone", [(role,) for role in _by_weight(graph)], cluster)
    known = [*same, "manual", "split", "standalone"]
    if not any(char.isdigit() for char in mode):
        raise AllocationError(
            f"allocation.mode={mode} is not a mode",
            remedy=f"Modes: {', '.join(known)}, or a strategy like d2t1p1 for all calls.{did_you_mean(mode, known)}",
        )
    with _named(f"allocation.mode={mode}"):
        allocation = parse_allocation(mode, cluster) if "@" in mode else Allocation(whole, parse_strategy(mode))
    return {mfc.name: allocation for mfc in calls(graph)}


def _check_all_given(graph: nx.DiGraph, config: AllocationConfig) -> None:
    missing = [mfc.name for mfc in calls(graph) if mfc.name not in config.calls]
    if missing:
        raise AllocationError(
            f"allocation.mode=manual needs an allocation for every call; missing: {', '.join(missing)}",
            remedy=f"Example: allocation.calls.{missing[0]}=d1t1p1@0:0.",
            call=missing[0],
        )


def _by_role(graph: nx.DiGraph, mode: str, parts: list[tuple[str, ...]], cluster: Cluster) -> dict[str, Allocation]:
    """Each group of roles on a mesh of its own, data-parallel."""
    with _named(f"allocation.mode={mode}"):
        meshes = divide_cluster(cluster, len(parts))
    mesh_of = {role: mesh for part, mesh in zip(parts, meshes, strict=True) for role in part}
    return {
        mfc.name: Allocation(mesh_of[mfc.role], ParallelStrategy(dp=mesh_of[mfc.role].n_devices))
        for mfc in calls(graph)
    }


def _by_weight(graph: nx.DiGraph) -> list[str]:
    """Roles with the most work first, so that they get the larger meshes: those with more calls, trained ones first."""
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    n_calls = {role: sum(mfc.role == role for mfc in calls(graph)) for role in roles(graph)}
    return sorted(roles(graph), key=lambda role: (role not in trained, -n_calls[role]))


def _cut_node(n_devices: int, n_parts: int) -> list[tuple[int, int]]:
    """``(first device, number of devices)`` of `n_parts` aligned blocks of one node, in order of devices."""
    if n_parts == 1:
        return [(0, n_devices)]
    blocks, first = list[tuple[int, int]](), 0
    while first < n_devices:
        size = _power_of_two(n_devices - first)
        blocks.append((first, size))
        first += size
    while len(blocks) < n_parts:
        start, size = largest = max(blocks, key=lambda block: (block[1], block[0]))
        blocks.remove(largest)
        blocks += [(start, size // 2), (start + size // 2, size // 2)]
    return sorted(sorted(blocks, key=lambda block: (-block[1], block[0]))[:n_parts])


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Put the configuration key in front of the message of an `AllocationError`."""
    try:
        yield
    except AllocationError as error:
        raise AllocationError(f"{key}: {error.message}", remedy=error.remedy, mesh=error.mesh) from None


def _power_of_two(at_most: int) -> int:
    return 1 << (max(at_most, 1).bit_length() - 1)

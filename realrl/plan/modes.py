"""Modes of allocation: one word in the place of an allocation for every call.

| mode | meaning |
|---|---|
| `data` | every call on all devices, data-parallel over all of them |
| `colocate` | every call on all devices |
| `tensor`, `pipeline` | every call on all devices, tensor- or pipeline-parallel over all of them |
| `d2t2p1` | every call on all devices with this strategy |
| `d2t1p1@0:0-1` | every call on this mesh with this strategy |
| `split` | two halves of the cluster; see `split_roles` |
| `standalone` | every role has devices of its own, as evenly as possible; see `standalone_parts` |
| `manual` | every call is given in `allocation.calls` |
| `heuristic` | every role on as many devices as its calls can feed; see `_heuristic` |

In the modes of `SIZED_MODES` every role has one layout for all its calls: data-parallel, unless its model is cut into
parts for the memory of a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError, did_you_mean
from realrl.graph.build import call, calls, producers, roles, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_allocation, parse_strategy

if TYPE_CHECKING:
    import networkx as nx

SIZED_MODES = ("colocate", "heuristic", "split", "standalone")

Cut = tuple[int, int]
"""(tp, pp): the parts that a role's model is cut into."""


def mode_allocations(
    graph: nx.DiGraph,
    config: AllocationConfig,
    cluster: Cluster,
    heads: Mapping[str, str],
    cuts: Mapping[str, Cut],
) -> dict[str, Allocation]:
    """Return the allocations of the mode, without overrides; none for `manual`.

    Args:
        heads: role -> "lm", "value", "reward" or "none" (no parameters), where known.
        cuts: role -> the parts of its model, in the modes of `SIZED_MODES`; (1, 1) by default.

    Raises:
        AllocationError: the mode is unknown, or cannot be had on this cluster, or with these cuts.
    """
    whole = DeviceMesh.whole(cluster)
    n = whole.n_devices
    same: dict[str, Callable[[], Allocation]] = {
        "data": lambda: Allocation(whole, ParallelStrategy(dp=n)),
        "tensor": lambda: Allocation(whole, ParallelStrategy(tp=n)),
        "pipeline": lambda: Allocation(whole, ParallelStrategy(pp=n)),
    }
    mode = config.mode
    if mode in same:
        return {mfc.name: same[mode]() for mfc in calls(graph)}
    if mode == "manual":
        _check_all_given(graph, config)
        return {}
    if mode == "heuristic":
        return _heuristic(graph, cluster, cuts)
    parts = {
        "colocate": lambda: [tuple(roles(graph))],
        "split": lambda: [part for part in split_roles(graph, heads) if part],
        "standalone": lambda: standalone_parts(graph, heads),
    }
    if mode in parts:
        return _by_role(graph, mode, parts[mode](), cluster, cuts)
    known = [*same, *SIZED_MODES, "manual"]
    if not any(char.isdigit() for char in mode):
        raise AllocationError(
            f"allocation.mode={mode} is not a mode",
            remedy=f"Modes: {', '.join(known)}, or a strategy like d2t1p1 for all calls.{did_you_mean(mode, known)}",
        )
    with named_in(f"allocation.mode={mode}"):
        allocation = parse_allocation(mode, cluster) if "@" in mode else Allocation(whole, parse_strategy(mode))
    return {mfc.name: allocation for mfc in calls(graph)}


def _heuristic(graph: nx.DiGraph, cluster: Cluster, cuts: Mapping[str, Cut]) -> dict[str, Allocation]:
    """Put every role on one mesh for all its calls, so that no parameters move.

    A role whose calls all have enough samples takes the whole cluster; another one the largest mesh that they fill, and
    several such roles take turns over the blocks of the cluster, so that they can run at the same time.
    """
    size, plan = cluster.n_devices_per_node, dict[str, Allocation]()
    n_placed: dict[int, int] = {}
    for role in roles(graph):
        own = [mfc for mfc in calls(graph) if mfc.role == role]
        tp, pp = cuts.get(role, (1, 1))
        most = tp * pp * min(n_samples for mfc in own for n_samples in pieces_of(mfc).values())
        if most >= size:
            n_nodes = min(most // size, cluster.n_nodes)
            n_nodes = next((n for n in range(n_nodes, 0, -1) if n * size % (tp * pp) == 0), n_nodes)
            mesh = DeviceMesh.of_nodes(cluster, 0, n_nodes - 1)
        else:
            n_devices = power_of_two(most)
            turn = n_placed.get(n_devices, 0)
            n_placed[n_devices] = turn + 1
            node, block = divmod(turn % (cluster.n_nodes * (size // n_devices)), size // n_devices)
            mesh = DeviceMesh.of_devices(cluster, node, block * n_devices, (block + 1) * n_devices - 1)
        plan |= {mfc.name: _cut(role, mesh, (tp, pp)) for mfc in own}
    return plan


def _check_all_given(graph: nx.DiGraph, config: AllocationConfig) -> None:
    missing = [mfc.name for mfc in calls(graph) if mfc.name not in config.calls]
    if missing:
        raise AllocationError(
            f"allocation.mode=manual needs an allocation for every call; missing: {', '.join(missing)}",
            remedy=f"Example: allocation.calls.{missing[0]}=d1t1p1@0:0.",
            call=missing[0],
        )


def _by_role(
    graph: nx.DiGraph, mode: str, parts: list[tuple[str, ...]], cluster: Cluster, cuts: Mapping[str, Cut]
) -> dict[str, Allocation]:
    """Put each group of roles on a mesh of its own."""
    with named_in(f"allocation.mode={mode}"):
        meshes = divide_cluster(cluster, len(parts))
    mesh_of = {role: mesh for part, mesh in zip(parts, meshes, strict=True) for role in part}
    return {mfc.name: _cut(mfc.role, mesh_of[mfc.role], cuts.get(mfc.role, (1, 1))) for mfc in calls(graph)}


def _cut(role: str, mesh: DeviceMesh, cut: Cut) -> Allocation:
    """Return a role's allocation with its model cut in parts, and as many replicas as the mesh has room for."""
    tp, pp = cut
    if mesh.n_devices % (tp * pp):
        raise AllocationError(f"role '{role}' has {mesh.n_devices} devices, which t{tp}p{pp} does not divide")
    return Allocation(mesh, ParallelStrategy(mesh.n_devices // (tp * pp), tp, pp, sp=tp > 1))


def standalone_parts(graph: nx.DiGraph, heads: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Every role for itself; but one without weights that waits for another role's results is beside that role.

    A role that reads responses only, such as a reward function, works while others are generated, and stays alone.
    """
    producer, beside = producers(graph), dict[str, str]()
    for mfc in topological_calls(graph):
        read = [call(graph, producer[key]) for key in mfc.input_keys if key in producer]
        hosts = [other.role for other in read if other.interface_type is not InterfaceType.GENERATE]
        if heads.get(mfc.role) == "none" and hosts and hosts[-1] != mfc.role:
            beside[mfc.role] = beside.get(hosts[-1], hosts[-1])
    alone = [role for role in _by_weight(graph) if role not in beside]
    return [(role, *(other for other, host in beside.items() if host == role)) for role in alone]


def _by_weight(graph: nx.DiGraph) -> list[str]:
    """Return roles, trained ones first, then by number of calls, so that those with the most work get larger meshes."""
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    n_calls = {role: sum(mfc.role == role for mfc in calls(graph)) for role in roles(graph)}
    return sorted(roles(graph), key=lambda role: (role not in trained, -n_calls[role]))


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
    """Return disjoint legal meshes, as even as possible, the larger ones first among nodes that are divided alike.

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


def _cut_node(n_devices: int, n_parts: int) -> list[tuple[int, int]]:
    """Return ``(first device, number of devices)`` of `n_parts` aligned blocks of one node, in order of devices."""
    if n_parts == 1:
        return [(0, n_devices)]
    blocks, first = list[tuple[int, int]](), 0
    while first < n_devices:
        size = power_of_two(n_devices - first)
        blocks.append((first, size))
        first += size
    while len(blocks) < n_parts:
        start, size = largest = max(blocks, key=lambda block: (block[1], block[0]))
        blocks.remove(largest)
        blocks += [(start, size // 2), (start + size // 2, size // 2)]
    return sorted(sorted(blocks, key=lambda block: (-block[1], block[0]))[:n_parts])


def pieces_of(mfc: MFCDef) -> dict[str, int]:
    """Return field of the call -> samples, for the batches that are divided over ranks at once."""
    return {
        "n_seqs / n_minibatches" if mfc.n_minibatches > 1 else "n_seqs": mfc.n_seqs // mfc.n_minibatches,
        "min_n_seqs": mfc.n_seqs if mfc.min_n_seqs is None else mfc.min_n_seqs,
    }


@contextmanager
def named_in(key: str) -> Iterator[None]:
    """Put the configuration key in front of the message of an `AllocationError`."""
    try:
        yield
    except AllocationError as error:
        raise AllocationError(f"{key}: {error.message}", remedy=error.remedy, mesh=error.mesh) from None


def power_of_two(at_most: int) -> int:
    return 1 << (max(at_most, 1).bit_length() - 1)

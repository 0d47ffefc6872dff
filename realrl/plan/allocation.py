"""Allocation of each call, from the graph, the `allocation` section of the configuration and the cluster.

Modes of `allocation.mode`:

| mode | meaning |
|---|---|
| `data`, `colocate` | every call on all devices, data-parallel over all of them |
| `tensor`, `pipeline` | every call on all devices, tensor- or pipeline-parallel over all of them |
| `d2t2p1` | every call on all devices with this strategy |
| `d2t1p1@0:0-1` | every call on this mesh with this strategy |
| `split` | two halves of the cluster, data-parallel in each; see `split_roles` |
| `standalone` | every role has devices of its own, as evenly as possible; see `standalone_parts` |
| `manual` | every call is given in `allocation.calls` |
| `heuristic` | every role data-parallel on as many devices as its calls can feed; see `_heuristic` |

`allocation.calls.<call>` overrides the mode for one call: `strategy@mesh`, or a strategy alone for the mesh that the
mode gives the call.

Invariants of `plan_allocations`:
- exactly the calls of the graph have an allocation, in declared order;
- the strategy's sizes multiply to the number of devices of the mesh, and the mesh is inside the cluster;
- each slice that the call's protocol makes of a batch, minibatch or streamed piece has a sample (`check_n_seqs`);
- two meshes are disjoint, or one contains the other (`check_meshes`);
- ranks that must have the same samples get them (`check_protocols`), and hooks have parameters at both ends;
- where the shapes of models are known, tp divides heads and pp leaves every stage a layer (`check_shapes`).
A refusal names the call, the rule and the nearest allocation that is legal.

Partial overlaps are refused although nothing would deadlock. Inside a node any two legal meshes nest or are disjoint;
across nodes, whole nodes 0-1 and 1-2 are neither. Calls on such meshes can neither run at the same time nor share all
their devices: while one runs, devices of the other idle. Nested meshes give every device one chain of meshes, so its
contents, its waits and its next request follow from one list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError, did_you_mean
from realrl.graph.build import call, calls, producers, roles, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes, nearest_strategy
from realrl.mesh.notation import parse_allocation, parse_strategy
from realrl.plan.hooks import plan_hooks, role_homes
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import check_tp
from realrl.plan.parameters.specs import ParameterSpec
from realrl.plan.parameters.stages import stages_of
from realrl.plan.protocols import CallLayout, slices_of
from realrl.shape import DecoderConfig

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
        heads: role -> "lm", "value", "reward" or "none" (no parameters), where known.

    Returns:
        Call name -> allocation, in declared order of the calls.

    Raises:
        AllocationError: the mode is unknown, an override names no call or cannot be read, a mesh or strategy does not
            fit, a call has too few samples for its ranks, or the plan cannot run (see `check_supported`).
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
    weightless = [role for role, head in (heads or {}).items() if head == "none"]
    check_supported(graph, plan, weightless=weightless)
    return plan


def check_supported(
    graph: nx.DiGraph, allocations: Mapping[str, Allocation], *, weightless: Collection[str] = ()
) -> None:
    """Refuse a plan that cannot run, as far as the graph tells; `check_shapes` checks the rest with the models.

    Args:
        graph: from `build_graph`.
        allocations: call -> mesh and strategy.
        weightless: roles without parameters, whose calls run in any layout.

    Raises:
        AllocationError: names the call, the rule and the nearest allocation that is legal.
    """
    check_meshes(graph, allocations)
    check_protocols(graph, allocations, weightless=weightless)
    check_n_seqs(graph, allocations)
    plan_hooks(graph, allocations, weightless=weightless)


def check_meshes(graph: nx.DiGraph, allocations: Mapping[str, Allocation]) -> None:
    """Check that of any two meshes one contains the other, or they are disjoint.

    Raises:
        AllocationError: two meshes share only a part of each other's devices.
    """
    first_on: dict[DeviceMesh, str] = {}
    for mfc in calls(graph):
        mesh = allocations[mfc.name].mesh
        for other, name in first_on.items():
            if _nests(mesh, other):
                continue
            cluster, others = mesh.cluster, tuple(first_on)
            nearest = min(
                (mesh for mesh in legal_meshes(cluster) if all(_nests(mesh, known) for known in others)),
                key=lambda legal: (len(set(mesh.ranks) ^ set(legal.ranks)), -legal.n_devices, legal.ranks),
            )
            strategy = nearest_strategy(allocations[mfc.name].strategy, nearest.n_devices)
            raise AllocationError(
                f"calls '{name}' and '{mfc.name}' have meshes '{other}' and '{mesh}', which overlap, but neither "
                "contains the other",
                remedy=f"The nearest legal one: allocation.calls.{mfc.name}={Allocation(nearest, strategy)}.",
                call=mfc.name,
                mesh=str(mesh),
            )
        first_on.setdefault(mesh, mfc.name)


def check_protocols(
    graph: nx.DiGraph, allocations: Mapping[str, Allocation], *, weightless: Collection[str] = ()
) -> None:
    """Check that calls' transfer protocols suit their layouts.

    All tensor and pipeline ranks of a data-parallel rank compute on the same samples, and a train_step sees each sample
    once. Calls without parameters may divide their samples in any way.

    Raises:
        AllocationError: a protocol gives ranks other samples than their engine needs, or does not fit the layout.
    """
    homes = role_homes(graph, allocations, weightless=weightless)
    for mfc in calls(graph):
        allocation = allocations[mfc.name]
        with _naming_call(mfc):
            groups = slices_of(mfc.protocol, CallLayout(allocation, homes.get(mfc.role), mfc.balanced_dp))
        if mfc.role in weightless:
            continue
        dp = allocation.strategy.dp
        needed = [set(allocation.dp_group_members(dp_rank)) for dp_rank in range(dp)]
        if all(any(members.issubset(group) for group in groups) for members in needed):
            if not mfc.is_train or len(groups) == dp:
                continue
            problem = "gives one sample to several data-parallel ranks, which would train on it more than once"
        else:
            problem = "gives different samples to ranks that compute on the same ones"
        raise AllocationError(
            f"call '{mfc.name}' has protocol {mfc.protocol}, which on {allocation} {problem}",
            remedy=f"Use 3D_PROTO, or d{allocation.mesh.n_devices}.",
            call=mfc.name,
            mesh=str(allocation.mesh),
        )


def check_n_seqs(graph: nx.DiGraph, allocations: Mapping[str, Allocation]) -> None:
    """Check that every slice that a protocol makes has a sample of each batch, minibatch and streamed piece.

    Raises:
        AllocationError: a call has fewer samples than slices: with the usual protocol, than data-parallel ranks.
    """
    homes = role_homes(graph, allocations)
    for mfc in calls(graph):
        layout = CallLayout(allocations[mfc.name], homes[mfc.role], mfc.balanced_dp)
        n_slices = len(slices_of(mfc.protocol, layout))
        for field, n_samples in _pieces(mfc).items():
            if n_samples < n_slices:
                times = f" (n_seqs={n_slices * mfc.n_minibatches})" if mfc.n_minibatches > 1 else ""
                fitting = _power_of_two(n_samples)
                what = "data-parallel ranks" if n_slices == layout.allocation.strategy.dp else f"ranks ({mfc.protocol})"
                raise AllocationError(
                    f"call '{mfc.name}' has {field}={n_samples}, fewer than its {n_slices} {what}",
                    remedy=f"Use {field}={n_slices} or more{times}, or a mesh with {fitting} of the devices.",
                    call=mfc.name,
                    mesh=str(allocations[mfc.name].mesh),
                )


def check_shapes(graph: nx.DiGraph, allocations: Mapping[str, Allocation], shapes: Mapping[str, DecoderConfig]) -> None:
    """Check that the strategies can cut the models.

    Args:
        graph: from `build_graph`.
        allocations: call -> mesh and strategy.
        shapes: role -> shape of its model, where known; calls of other roles are not checked.

    Raises:
        AllocationError: tp does not divide the heads, or pp exceeds the layers; names the call and the nearest strategy
            for its mesh that the model and the call's samples allow.
    """
    specs_of = {role: parameter_specs(shape) for role, shape in shapes.items()}
    for mfc in calls(graph):
        specs = specs_of.get(mfc.role)
        if specs is None:
            continue
        allocation = allocations[mfc.name]
        try:
            check_cut(specs, allocation.strategy)
        except AllocationError as err:
            nearest = _nearest_cut(specs, mfc, allocation)
            use = err.remedy if nearest is None else f"The nearest legal one: allocation.calls.{mfc.name}={nearest}."
            raise AllocationError(
                f"call '{mfc.name}' of role '{mfc.role}' runs on {allocation}, but {err.message}",
                remedy=use,
                call=mfc.name,
                mesh=str(allocation.mesh),
            ) from None


def check_cut(specs: Sequence[ParameterSpec], strategy: ParallelStrategy) -> None:
    """Check that a strategy can cut a model.

    Raises:
        AllocationError: tp does not divide the heads, or pp exceeds the layers.
    """
    check_tp(specs, strategy.tp)
    stages_of(specs, strategy.pp)


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


# ---------------------------------------------------------------- modes


def _mode_allocations(
    graph: nx.DiGraph, config: AllocationConfig, cluster: Cluster, heads: Mapping[str, str] | None
) -> dict[str, Allocation]:
    """Return the allocations of the mode, without overrides; none for `manual`."""
    whole = DeviceMesh.whole(cluster)
    n = whole.n_devices
    same: dict[str, Callable[[], Allocation]] = {
        "data": lambda: Allocation(whole, ParallelStrategy(dp=n)),
        "colocate": lambda: Allocation(whole, ParallelStrategy(dp=n)),
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
        return _heuristic(graph, cluster)
    if mode == "split":
        return _by_role(graph, "split", [part for part in split_roles(graph, heads) if part], cluster)
    if mode == "standalone":
        return _by_role(graph, "standalone", standalone_parts(graph, heads or {}), cluster)
    known = [*same, "heuristic", "manual", "split", "standalone"]
    if not any(char.isdigit() for char in mode):
        raise AllocationError(
            f"allocation.mode={mode} is not a mode",
            remedy=f"Modes: {', '.join(known)}, or a strategy like d2t1p1 for all calls.{did_you_mean(mode, known)}",
        )
    with _named(f"allocation.mode={mode}"):
        allocation = parse_allocation(mode, cluster) if "@" in mode else Allocation(whole, parse_strategy(mode))
    return {mfc.name: allocation for mfc in calls(graph)}


def _heuristic(graph: nx.DiGraph, cluster: Cluster) -> dict[str, Allocation]:
    """Put every role data-parallel on one mesh for all its calls, so that no parameters move.

    A role whose calls all have enough samples takes the whole cluster; another one the largest mesh that they fill, and
    several such roles take turns over the blocks of the cluster, so that they can run at the same time.
    """
    size, plan = cluster.n_devices_per_node, dict[str, Allocation]()
    n_placed: dict[int, int] = {}
    for role in roles(graph):
        own = [mfc for mfc in calls(graph) if mfc.role == role]
        most = min(n_samples for mfc in own for n_samples in _pieces(mfc).values())
        if most >= size:
            mesh = DeviceMesh.of_nodes(cluster, 0, min(most // size, cluster.n_nodes) - 1)
        else:
            n_devices = _power_of_two(most)
            turn = n_placed.get(n_devices, 0)
            n_placed[n_devices] = turn + 1
            node, block = divmod(turn % (cluster.n_nodes * (size // n_devices)), size // n_devices)
            mesh = DeviceMesh.of_devices(cluster, node, block * n_devices, (block + 1) * n_devices - 1)
        plan |= {mfc.name: Allocation(mesh, ParallelStrategy(dp=mesh.n_devices)) for mfc in own}
    return plan


def _check_all_given(graph: nx.DiGraph, config: AllocationConfig) -> None:
    missing = [mfc.name for mfc in calls(graph) if mfc.name not in config.calls]
    if missing:
        raise AllocationError(
            f"allocation.mode=manual needs an allocation for every call; missing: {', '.join(missing)}",
            remedy=f"Example: allocation.calls.{missing[0]}=d1t1p1@0:0.",
            call=missing[0],
        )


def _by_role(graph: nx.DiGraph, mode: str, parts: list[tuple[str, ...]], cluster: Cluster) -> dict[str, Allocation]:
    """Put each group of roles on a mesh of its own, data-parallel."""
    with _named(f"allocation.mode={mode}"):
        meshes = divide_cluster(cluster, len(parts))
    mesh_of = {role: mesh for part, mesh in zip(parts, meshes, strict=True) for role in part}
    return {
        mfc.name: Allocation(mesh_of[mfc.role], ParallelStrategy(dp=mesh_of[mfc.role].n_devices))
        for mfc in calls(graph)
    }


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


def _cut_node(n_devices: int, n_parts: int) -> list[tuple[int, int]]:
    """Return ``(first device, number of devices)`` of `n_parts` aligned blocks of one node, in order of devices."""
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


def _pieces(mfc: MFCDef) -> dict[str, int]:
    """Return field of the call -> samples, for the batches that are divided over ranks at once."""
    return {
        "n_seqs / n_minibatches" if mfc.n_minibatches > 1 else "n_seqs": mfc.n_seqs // mfc.n_minibatches,
        "min_n_seqs": mfc.n_seqs if mfc.min_n_seqs is None else mfc.min_n_seqs,
    }


def _nests(a: DeviceMesh, b: DeviceMesh) -> bool:
    return not a.overlaps(b) or a.contains(b) or b.contains(a)


def _nearest_cut(specs: Sequence[ParameterSpec], mfc: MFCDef, allocation: Allocation) -> Allocation | None:
    """Return the allocation on the same mesh that the model allows and that changes tp and pp the least, or None."""
    n, wanted = allocation.mesh.n_devices, allocation.strategy
    legal = []
    for tp, pp in itertools.product(range(1, n + 1), repeat=2):
        if n % (tp * pp) or n // (tp * pp) > min(_pieces(mfc).values()):
            continue
        strategy = ParallelStrategy(n // (tp * pp), tp, pp, wanted.sp and tp > 1)
        try:
            check_cut(specs, strategy)
        except AllocationError:
            continue
        changes = abs(tp - wanted.tp), abs(pp - wanted.pp)
        legal.append((sum(map(bool, changes)), sum(changes), strategy.tp, strategy))
    return Allocation(allocation.mesh, min(legal, key=lambda entry: entry[:3])[3]) if legal else None


@contextmanager
def _naming_call(mfc: MFCDef) -> Iterator[None]:
    """Put the call in front of the message of an `AllocationError`."""
    try:
        yield
    except AllocationError as error:
        raise AllocationError(
            f"call '{mfc.name}': {error.message}", remedy=error.remedy, call=mfc.name, mesh=error.mesh
        ) from None


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Put the configuration key in front of the message of an `AllocationError`."""
    try:
        yield
    except AllocationError as error:
        raise AllocationError(f"{key}: {error.message}", remedy=error.remedy, mesh=error.mesh) from None


def _power_of_two(at_most: int) -> int:
    return 1 << (max(at_most, 1).bit_length() - 1)

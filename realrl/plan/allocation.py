"""Allocation of each call, from the graph, the `allocation` section of the configuration and the cluster.

`realrl.plan.modes` has the values of `allocation.mode`. `allocation.calls.<call>` overrides it for one call:
`strategy@mesh`, or a strategy alone for the mesh that the
mode gives the call.

Invariants of `plan_allocations`:
- exactly the calls of the graph have an allocation, in declared order;
- the strategy's sizes multiply to the number of devices of the mesh, and the mesh is inside the cluster;
- each slice that the call's protocol makes of a batch, minibatch or streamed piece has a sample (`check_n_seqs`);
- two meshes are disjoint, or one contains the other (`check_meshes`);
- a train_step with `virtual_stages` has them in its strategy, and so has every call of its role that would else differ
  from it in nothing but these: it computes where the parameters live;
- ranks that must have the same samples get them (`check_protocols`), and hooks have parameters at both ends;
- where the shapes of models are known, tp divides heads and pp leaves every chunk of a stage a layer
  (`check_shapes`).
A refusal names the call, the rule and the nearest allocation that is legal.

Partial overlaps are refused although nothing would deadlock. Inside a node any two legal meshes nest or are disjoint;
across nodes, whole nodes 0-1 and 1-2 are neither. Calls on such meshes can neither run at the same time nor share all
their devices: while one runs, devices of the other idle. Nested meshes give every device one chain of meshes, so its
contents, its waits and its next request follow from one list.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError, did_you_mean
from realrl.graph.build import calls
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes, nearest_strategy
from realrl.mesh.notation import parse_allocation, parse_strategy
from realrl.plan.hooks import plan_hooks, role_homes
from realrl.plan.modes import Cut, mode_allocations, named_in, pieces_of, power_of_two
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import check_tp
from realrl.plan.parameters.specs import ParameterSpec
from realrl.plan.parameters.stages import stage_layers, stages_of
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
    cuts: Mapping[str, Cut] | None = None,
) -> dict[str, Allocation]:
    """Decide mesh and strategy of every call.

    Args:
        graph: from `build_graph`.
        allocation_config: mode and overrides.
        cluster: the devices there are.
        heads: role -> "lm", "value", "reward" or "none" (no parameters), where known.
        cuts: role -> the parts of its model, in modes that leave them open; (1, 1) by default.

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
    plan = mode_allocations(graph, allocation_config, cluster, heads or {}, cuts or {})
    for name, text in overrides.items():
        with named_in(f"allocation.calls.{name}"):
            if "@" in text or name not in plan:
                plan[name] = parse_allocation(text, cluster)
            else:
                plan[name] = Allocation(plan[name].mesh, parse_strategy(text))
    plan = with_virtual_stages(graph, {name: plan[name] for name in names})
    weightless = [role for role, head in (heads or {}).items() if head == "none"]
    check_supported(graph, plan, weightless=weightless)
    return plan


def with_virtual_stages(graph: nx.DiGraph, allocations: Mapping[str, Allocation]) -> dict[str, Allocation]:
    """Return allocations with the virtual stages that the graph's calls ask for.

    Raises:
        AllocationError: a call with virtual stages has no pipeline, or a strategy with others.
    """
    plan = dict(allocations)
    for mfc in calls(graph):
        v, strategy = mfc.virtual_stages, plan[mfc.name].strategy
        if v is None or v == strategy.vpp:
            continue
        where = f"call '{mfc.name}' has virtual_stages={v}, but runs on {plan[mfc.name]}"
        if strategy.vpp > 1:
            raise AllocationError(where, remedy="Say it in one place, or the same in both.", call=mfc.name)
        if strategy.pp == 1:
            raise AllocationError(
                f"{where}, which is no pipeline",
                remedy=f"Use allocation.mode=pipeline, or allocation.calls.{mfc.name}=STRATEGY@MESH with p2 or more.",
                call=mfc.name,
            )
        plan[mfc.name] = replace(plan[mfc.name], strategy=replace(strategy, vpp=v))
    homes = role_homes(graph, plan)
    for mfc in calls(graph):
        home, own = homes[mfc.role], plan[mfc.name]
        if own == replace(home, strategy=replace(home.strategy, vpp=1)):
            plan[mfc.name] = home
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
        for field, n_samples in pieces_of(mfc).items():
            if n_samples < n_slices:
                times = f" (n_seqs={n_slices * mfc.n_minibatches})" if mfc.n_minibatches > 1 else ""
                fitting = power_of_two(n_samples)
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
    for mfc in calls(graph):
        if mfc.role not in shapes:
            continue
        specs, allocation = parameter_specs(shapes[mfc.role]), allocations[mfc.name]
        strategy = allocation.strategy
        try:
            check_tp(specs, strategy.tp)
            stage_layers(shapes[mfc.role], strategy.pp, strategy.vpp)
        except AllocationError as err:
            is_cut_too_often = strategy.vpp > 1 and _can_cut(specs, replace(strategy, vpp=1))
            nearest = None if is_cut_too_often else _nearest_cut(specs, mfc, allocation)
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
        AllocationError: tp does not divide the heads, or there are more stages or chunks than layers.
    """
    check_tp(specs, strategy.tp)
    stages_of(specs, strategy.pp, strategy.vpp)


def _can_cut(specs: Sequence[ParameterSpec], strategy: ParallelStrategy) -> bool:
    try:
        check_cut(specs, strategy)
    except AllocationError:
        return False
    return True


def _nests(a: DeviceMesh, b: DeviceMesh) -> bool:
    return not a.overlaps(b) or a.contains(b) or b.contains(a)


def _nearest_cut(specs: Sequence[ParameterSpec], mfc: MFCDef, allocation: Allocation) -> Allocation | None:
    """Return the allocation on the same mesh that the model allows and that changes tp and pp the least, or None."""
    n, wanted = allocation.mesh.n_devices, allocation.strategy
    legal = []
    for tp, pp in itertools.product(range(1, n + 1), repeat=2):
        if n % (tp * pp) or n // (tp * pp) > min(pieces_of(mfc).values()):
            continue
        strategy = ParallelStrategy(n // (tp * pp), tp, pp, wanted.sp and tp > 1)
        if not _can_cut(specs, strategy):
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

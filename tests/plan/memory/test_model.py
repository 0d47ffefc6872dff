"""`MemoryModel` against a count rank by rank, on random models, clusters, allocations, hooks and settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.graph.build import build_graph, topological_calls
from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes
from realrl.plan.hooks import CallHooks, Offload, Realloc, plan_hooks, role_homes
from realrl.plan.memory.assignment import AssignedMemory
from realrl.plan.memory.buffers import REALLOC_BUCKET
from realrl.plan.memory.cuts import CutModel
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import MemoryModel
from realrl.plan.memory.moves import MESSAGES, Moves
from realrl.plan.memory.plan import CallState, RoleState, layout_of
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.realloc import plan_realloc
from realrl.shape import LoRA
from tests.graph.examples import ppo
from tests.helpers.layouts import SHAPE, legal_tps, shapes
from tests.plan.memory.reference import counted

INFERENCE, TRAIN = InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
CLUSTERS = [Cluster(1, 4), Cluster(2, 2), Cluster(3, 4), Cluster(2, 3)]
BACKENDS = [("native", 0), ("native", 1), ("megatron", 1), ("deepspeed", 0), ("deepspeed", 2), ("deepspeed", 3)]
SAVES = [None, Saves(is_staged=False, is_repeated=False), Saves(is_staged=True, is_repeated=True)]
LOADS = st.builds(
    Load,
    n_seqs=st.just(4),
    n_tokens=st.integers(1, 99),
    n_scored=st.integers(1, 99),
    n_mbs=st.integers(1, 3),
    n_runs=st.integers(1, 3),
    n_rows=st.integers(1, 9),
    longest_row=st.integers(1, 50),
    prefill_tokens=st.integers(1, 50),
)


@st.composite
def models(draw):
    """Models whose parameters fill message buckets, and others; some with adapters."""
    lora = draw(st.sampled_from([None, None, LoRA(2, 1.0, ("q", "o"))]))
    sizes = {
        "hidden_size": draw(st.sampled_from([2, 1 << 20, 1 << 23])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    return replace(draw(shapes()), lora=lora, **sizes)


@st.composite
def allocations(draw, model, cluster):
    mesh = draw(st.sampled_from([*legal_meshes(cluster)]))
    n, specs = mesh.n_devices, parameter_specs(model)
    fitting = [
        ParallelStrategy(n // (tp * pp), tp, pp, sp)
        for tp in legal_tps(specs, n)
        for pp in range(1, min(n // tp, model.n_layers) + 1)
        for sp in (False, True)
        if n % (tp * pp) == 0
    ]
    order = draw(st.permutations(mesh.ranks)) if draw(st.booleans()) else None
    return Allocation(mesh, draw(st.sampled_from(fitting)), order and tuple(order))


@st.composite
def plans(draw, model, cluster):
    """Roles and calls: homes with or without training, calls elsewhere, averages and offloads."""
    roles, calls = {}, []

    def add(name, of, kind, place, before=(), after=()):
        calls.append(CallState(name, of, kind, place, CallHooks(tuple(before), tuple(after)), draw(LOADS)))

    for name in ("actor", "ema", "other")[: draw(st.integers(1, 3))]:
        is_trained, (backend, zero_stage) = draw(st.booleans()), draw(st.sampled_from(BACKENDS))
        roles[name] = RoleState(
            model,
            replace(draw(allocations(model, cluster)), order=None),
            is_trained=is_trained,
            is_changed=is_trained or draw(st.booleans()),
            is_averaged=not is_trained and draw(st.booleans()),
            backend=backend if is_trained else "native",
            zero_stage=zero_stage if is_trained else 0,
            offloads_optimizer=is_trained and draw(st.booleans()),
            checkpoints_activations=draw(st.booleans()),
        )
    for name, role in roles.items():
        after = [Offload(name, role.home)] if draw(st.booleans()) else []
        target = draw(st.sampled_from([*roles]))
        if role.is_trained:
            average = [Realloc(name, role.home, target, roles[target].home, 0.5)] if target != name else []
            add(f"{name}_train", name, TRAIN, role.home, after=(*average, *after))
        place = draw(allocations(model, cluster))
        before = [] if place == role.home else [Realloc(name, role.home, name, place)]
        kind = draw(st.sampled_from([InterfaceType.GENERATE, INFERENCE]))
        add(f"{name}_use", name, kind, place, before, () if role.is_trained else after)
    add("score", "none", INFERENCE, draw(allocations(model, cluster)))
    return roles, draw(st.permutations(calls))


@given(st.data(), models(), st.sampled_from(CLUSTERS), st.sampled_from(SAVES), st.booleans())
def test_plans_are_those_counted_rank_by_rank(data, shape, cluster, saves, is_host_memory):
    model = MemoryModel(rows_bytes=7, saves=saves)
    for _ in range(2):  # the second plan meets what the first one has left
        roles, calls = data.draw(plans(shape, cluster))
        runtime = data.draw(st.dictionaries(st.integers(0, cluster.n_devices), st.integers(0, MESSAGES)))
        found = model.plan(roles, calls, runtime_bytes=runtime)
        assert found.calls == counted(roles, calls, rows_bytes=7, runtime_bytes=runtime, saves=saves)
        assert found == MemoryModel(rows_bytes=7, saves=saves).plan(roles, calls, runtime_bytes=runtime)
        check_groups(model.peaks(roles, calls, runtime_bytes=runtime), found)
        peaks = partial(model.peaks, roles, calls, runtime_bytes=runtime, is_host_memory=is_host_memory)
        check_peaks(peaks, found, is_host_memory)


def check_groups(peaks, plan):
    reached = []
    for group in peaks.groups():
        assert {plan.peak(rank) for rank in group.ranks} == {(group.call, group.usage)}
        reached += group.ranks
    assert sorted(reached) == [*plan.ranks]


def check_peaks(peaks, plan, is_host_memory):
    """Check each question by itself: what was asked before may have counted messages already."""
    needs = {
        rank: {
            call: by_rank[rank].total + (by_rank[rank].host if is_host_memory else 0)
            for call, by_rank in plan.calls.items()
            if rank in by_rank
        }
        for rank in plan.ranks
    }
    most = max(max(of_rank.values()) for of_rank in needs.values())
    rank = min(rank for rank, of_rank in needs.items() if max(of_rank.values()) == most)
    assert peaks().fullest == (rank, max(needs[rank], key=needs[rank].get), most)
    for limit in (most - MESSAGES, most - 1, most, most + MESSAGES):
        assert peaks().fits(limit) == (limit >= most)
    asked = peaks()
    calls, bytes_of = (array.tolist() for array in asked.by_rank)
    for rank, (call, n_bytes) in enumerate(zip(calls, bytes_of, strict=True)):
        if rank in needs:
            assert asked.names[call] == max(needs[rank], key=needs[rank].get)
            assert n_bytes == max(needs[rank].values())
        else:
            assert (call, n_bytes) == (-1, 0)


@given(st.data(), models())
def test_what_is_sent_on_later_nodes_is_what_is_sent_on_the_first(data, shape):
    cluster, moves, model = Cluster(4, 2), Moves(), CutModel(shape)
    for _ in range(6):
        source, target = (data.draw(allocations(shape, cluster)) for _ in range(2))
        plan = plan_realloc(layout_of(shape, source), layout_of(shape, target), node_of=cluster.node_of)
        sent = moves.sent(model, source, target)
        for ranks in (np.arange(cluster.n_devices), slice(2, 5)):
            everyone = np.arange(cluster.n_devices)[ranks].tolist()
            out = [min(plan.bytes_sent(rank), MESSAGES) for rank in everyone]
            held = [min(plan.bytes_from_other_nodes(rank), REALLOC_BUCKET) for rank in everyone]
            assert sent.messages(ranks, is_average=False).tolist() == out
            assert sent.messages(ranks, is_average=True).tolist() == [a + b for a, b in zip(out, held, strict=True)]


def test_a_reallocation_is_planned_once_for_all_nodes():
    cluster, moves, model = Cluster(4, 2), Moves(), CutModel(SHAPE)
    for node in range(3):
        source = Allocation(DeviceMesh.of_nodes(cluster, node, node), ParallelStrategy(2))
        target = Allocation(DeviceMesh.of_nodes(cluster, node + 1, node + 1), ParallelStrategy(1, 2))
        assert moves.sent(model, source, target).first == 2 * node
    assert len(moves) == 1


@given(st.data(), st.booleans())
def test_assignments_have_the_homes_hooks_and_loads_of_a_run(data, offload_frozen):
    graph, cluster = build_graph(ppo(), ["prompt_ids"]), Cluster(1, 4)
    home = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(4))
    settings = {
        name: RoleState(SHAPE, home, is_trained=name in ("actor", "critic")) for name in ("actor", "critic", "ref")
    }

    def load_of(mfc, allocation):
        asked.append((mfc.name, allocation.strategy.dp, allocation.strategy.pp))
        return Load(1, n_tokens=len(mfc.name), n_rows=allocation.strategy.dp, n_mbs=allocation.strategy.pp)

    asked, model = [], MemoryModel(rows_bytes=3)
    memory = AssignedMemory(
        model, graph, settings, load_of=load_of, weightless=["reward"], offload_frozen=offload_frozen
    )
    for _ in range(2):
        places = {name: data.draw(allocations(SHAPE, cluster)) for name in graph}
        hooks = plan_hooks(graph, places, weightless=["reward"], offload_frozen=offload_frozen)
        roles, calls = memory.states(places)
        homes = role_homes(graph, places, weightless=["reward"])
        assert roles == {name: replace(role, home=homes[name]) for name, role in settings.items()}
        assert calls == [
            CallState(m.name, m.role, m.interface_type, places[m.name], hooks[m.name], load_of(m, places[m.name]))
            for m in topological_calls(graph)
        ]
        assert memory.peaks(places).fullest == model.peaks(roles, calls).fullest
        assert {call.name for call in calls} == graph.nodes.keys()


def test_a_load_is_asked_for_once():
    asked, graph, cluster = [], build_graph(ppo(), ["prompt_ids"]), Cluster(1, 4)
    memory = AssignedMemory(MemoryModel(), graph, {}, load_of=lambda mfc, place: asked.append(mfc.name) or Load(1))
    for tp in (1, 2, 1):
        place = Allocation(DeviceMesh.of_devices(cluster, 0, 0, 2 * tp - 1), ParallelStrategy(2, tp))
        memory.states(dict.fromkeys(graph, place))
    assert sorted(asked) == sorted(graph)


def test_strategies_that_do_not_fit_are_refused():
    place = Allocation(DeviceMesh.whole(Cluster(1, 3)), ParallelStrategy(1, 3))
    model, role = MemoryModel(), RoleState(SHAPE, place, is_trained=False)
    for ask in (model.plan, model.peaks):
        with pytest.raises(AllocationError, match="tp=3 does not fit the model"):
            ask({"actor": role}, [])
    too_deep = replace(role, home=replace(place, strategy=ParallelStrategy(1, 1, 3)), model=replace(SHAPE, n_layers=2))
    with pytest.raises(AllocationError, match="pp=3 does not fit a model of 2 layers"):
        model.plan({"actor": too_deep}, [])

"""`MemoryModel` against a count rank by rank, on random models, clusters, allocations, hooks and settings."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy, legal_meshes
from realrl.plan.hooks import CallHooks, Offload, Realloc
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import MemoryModel
from realrl.plan.memory.moves import MESSAGES
from realrl.plan.memory.plan import CallState, RoleState
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import LoRA
from tests.helpers.layouts import legal_tps, shapes
from tests.plan.memory.reference import counted

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
def plans(draw):
    """Roles and calls: homes with or without training, calls elsewhere, averages and offloads."""
    model, cluster = draw(models()), draw(st.sampled_from([Cluster(1, 4), Cluster(2, 2), Cluster(3, 4), Cluster(2, 3)]))
    roles, calls = {}, []
    for name in ("actor", "ema", "other")[: draw(st.integers(1, 3))]:
        is_trained, (backend, zero_stage) = draw(st.booleans()), draw(st.sampled_from(BACKENDS))
        home = replace(draw(allocations(model, cluster)), order=None)
        roles[name] = RoleState(
            model,
            home,
            is_trained=is_trained,
            is_changed=is_trained or draw(st.booleans()),
            is_averaged=not is_trained and draw(st.booleans()),
            backend=backend if is_trained else "native",
            zero_stage=zero_stage if is_trained else 0,
            offloads_optimizer=is_trained and draw(st.booleans()),
            checkpoints_activations=draw(st.booleans()),
        )
    for name, role in roles.items():
        kinds = [InterfaceType.GENERATE, InterfaceType.INFERENCE]
        after = [Offload(name, role.home)] if draw(st.booleans()) else []
        if role.is_trained:
            if draw(st.booleans()):
                target = draw(st.sampled_from([*roles]))
                after.append(Realloc(name, role.home, target, roles[target].home, 0.5)) if target != name else None
            calls.append(
                CallState(
                    f"{name}_train",
                    name,
                    InterfaceType.TRAIN_STEP,
                    role.home,
                    CallHooks(after=tuple(after)),
                    draw(LOADS),
                )
            )
        place = draw(allocations(model, cluster))
        before = () if place == role.home else (Realloc(name, role.home, name, place),)
        hooks = CallHooks(before, () if role.is_trained else tuple(after))
        calls.append(CallState(f"{name}_use", name, draw(st.sampled_from(kinds)), place, hooks, draw(LOADS)))
    calls.append(
        CallState("score", "none", InterfaceType.INFERENCE, draw(allocations(model, cluster)), CallHooks(), Load(1))
    )
    return roles, draw(st.permutations(calls))


@given(plans(), st.sampled_from(SAVES), st.booleans())
def test_plans_are_those_counted_rank_by_rank(plan, saves, is_host_memory):
    roles, calls = plan
    model = MemoryModel(rows_bytes=7, saves=saves)
    found = model.plan(roles, calls)
    assert found.calls == counted(roles, calls, rows_bytes=7, saves=saves)
    assert found == model.plan(roles, calls)
    peaks, reached = model.peaks(roles, calls), set()
    ours = peaks.by_rank[1].tolist()
    for group in peaks.groups():
        for rank in group.ranks:
            assert found.peak(rank) == (group.call, group.usage)
            assert ours[rank] == group.usage.total
        reached.update(group.ranks)
    assert reached == set(found.ranks)
    needs = {
        rank: max(
            usage.total + (usage.host if is_host_memory else 0)
            for by_rank in found.calls.values()
            if (usage := by_rank.get(rank)) is not None
        )
        for rank in found.ranks
    }
    peaks = model.peaks(roles, calls, is_host_memory=is_host_memory)
    rank, call, most = peaks.fullest
    assert most == max(needs.values())
    assert rank == min(rank for rank, n in needs.items() if n == most)
    assert rank in found.calls[call]
    for limit in (most - 1, most, most + MESSAGES):
        assert model.peaks(roles, calls, is_host_memory=is_host_memory).fits(limit) == (limit >= most)
    assert {rank: n for rank, n in enumerate(peaks.by_rank[1].tolist()) if n or rank in needs} == needs

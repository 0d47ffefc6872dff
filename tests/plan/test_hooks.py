"""Moves around each call: exactly the invariants that the module states, and every refusal."""

import dataclasses
import re
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.graph.build import build_graph, calls, topological_calls
from realrl.graph.mfc import ModelName, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, legal_meshes
from realrl.mesh.notation import parse_allocation
from realrl.plan.hooks import CallHooks, Offload, Realloc, check_realloc_shapes, plan_hooks, role_homes
from realrl.shape import DecoderConfig, LoRA
from tests.graph.examples import ppo
from tests.helpers.layouts import EXPERTS
from tests.sched.plans import strategies_of, with_hooks

NODE = Cluster(1, 8)
TABLE = {
    "actor_gen": "d4t1p2@0:0-7", "critic_inf": "d2@0:0-1", "rew_inf": "p2@0:2-3", "ref_inf": "p4@0:4-7",
    "critic_train": "d2p2@0:4-7", "actor_train": "d2p2@0:0-3",
}  # fmt: skip


def on(**texts):
    return {name: parse_allocation(text, NODE) for name, text in texts.items()}


def graph_with(**changes):
    """PPO where some calls have other fields."""
    return build_graph([dataclasses.replace(mfc, **changes.get(mfc.name, {})) for mfc in ppo()], ["prompt_ids"])


@st.composite
def placed_graphs(draw):
    mfcs = draw(with_hooks([dataclasses.replace(mfc, max_staleness=0) for mfc in ppo()]))
    graph = build_graph(draw(st.permutations(mfcs)), ["prompt_ids"])
    allocations = {}
    for name in graph:
        mesh = draw(st.sampled_from(list(legal_meshes(NODE))))
        allocations[name] = Allocation(mesh, draw(st.sampled_from(strategies_of(mesh.n_devices, 8))))
    return graph, allocations


@given(placed_graphs(), st.sets(st.sampled_from(["reward", "ref"])), st.booleans())
def test_invariants(placed, weightless, offload_frozen):
    graph, allocations = placed
    homes = role_homes(graph, allocations, weightless=weightless)
    asked = [end for mfc in calls(graph) for ends in mfc.reallocs for end in ends]
    if weightless & set(asked):
        with pytest.raises(AllocationError, match="has none"):
            plan_hooks(graph, allocations, weightless=weightless)
        return
    try:
        plan = plan_hooks(graph, allocations, weightless=weightless, offload_frozen=offload_frozen)
    except AllocationError as err:
        if "which nothing orders" not in err.message:
            raise
        reject()  # see test_offloading_what_another_call_moves
    assert list(plan) == list(graph)
    for mfc in calls(graph):
        hooks = plan[mfc.name]
        assert hooks.home == homes.get(mfc.role)
        both = (*hooks.before, *hooks.after)
        implied = [hook for hook in both if isinstance(hook, Realloc) and hook.is_implied]
        if mfc.role in weightless or allocations[mfc.name] == homes[mfc.role]:
            assert implied == []
        else:
            assert implied == [hooks.before[-1]]
            assert implied[0] == Realloc(mfc.role, homes[mfc.role], mfc.role, allocations[mfc.name])
        assert not (mfc.is_train and implied)
        moved = [(h.source, h.target) for h in both if isinstance(h, Realloc) and not h.is_implied]
        assert moved == list(mfc.reallocs)
        for hook in both:
            if isinstance(hook, Realloc) and not hook.is_implied:
                assert (hook.source_allocation, hook.target_allocation) == (homes[hook.source], homes[hook.target])
        for i, hook in enumerate(both):
            if isinstance(hook, Offload):
                assert i >= len(hooks.before)
                later = [h for h in both[i:] if isinstance(h, Realloc)]
                assert not any(hook.role in (h.source, h.target) for h in later)
                assert hook.allocation == homes[hook.role]
        assert hooks.before_ranks == tuple(sorted({rank for hook in hooks.before for rank in hook.ranks}))
        assert hooks.after_ranks == tuple(sorted({rank for hook in hooks.after for rank in hook.ranks}))
    if offload_frozen:
        check_offloaded(graph, allocations, homes, plan)


def check_offloaded(graph, allocations, homes, plan):
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    for role, home in homes.items():
        shared = any(m.role != role and home.mesh.overlaps(allocations[m.name].mesh) for m in calls(graph))
        if role in trained or not shared:
            continue
        used_by = [mfc.name for mfc in calls(graph) if role in mfc.read_roles]
        writers = [mfc.name for mfc in calls(graph) if role in mfc.changed_roles]
        if len(used_by) == 1:  # only its own call reads it: that is the last one
            assert all(Offload(role, home) in plan[name].after for name in [*used_by, *writers])


def test_homes():
    graph, allocations = graph_with(), on(**TABLE)
    homes = role_homes(graph, allocations, weightless=["reward"])
    assert homes == {
        role: allocations[name]
        for role, name in {"actor": "actor_train", "ref": "ref_inf", "critic": "critic_train"}.items()
    }


def test_home_of_a_frozen_role_is_replica_0():
    mfcs = ppo()
    mfcs.append(dataclasses.replace(mfcs[2], name="again", output_keys=("more",)))
    mfcs[2] = dataclasses.replace(mfcs[2], model_name=ModelName("ref", 1))
    graph = build_graph(mfcs, ["prompt_ids"])
    assert next(mfc.name for mfc in topological_calls(graph) if mfc.role == "ref") == "ref_inf"
    allocations = on(**TABLE, again="d1@0:0")
    assert role_homes(graph, allocations)["ref"] == allocations["again"]
    assert plan_hooks(graph, allocations)["ref_inf"].before == (
        Realloc("ref", allocations["again"], "ref", allocations["ref_inf"]),
    )


def test_the_table_of_eight_devices():
    allocations = on(**TABLE)
    plan = plan_hooks(graph_with(), allocations, weightless=["reward"])
    moving = {name: (hooks.before_ranks, hooks.after_ranks) for name, hooks in plan.items() if hooks.before}
    assert moving == {"actor_gen": (tuple(range(8)), ()), "critic_inf": ((0, 1, 4, 5, 6, 7), ())}
    assert plan["rew_inf"] == CallHooks()


def test_average_from_home_to_home():
    average = ParamReallocHook(target=ModelName("ref"), eta=0.1)
    graph, allocations = graph_with(actor_train={"post_hooks": (average, OffloadHook())}), on(**TABLE)
    assert plan_hooks(graph, allocations)["actor_train"].after == (
        Realloc("actor", allocations["actor_train"], "ref", allocations["ref_inf"], 0.1),
        Offload("actor", allocations["actor_train"]),
    )


def test_offloading_what_another_call_moves():
    mfcs = ppo()
    mfcs.append(dataclasses.replace(mfcs[2], name="again", output_keys=("more",)))
    mfcs[2] = dataclasses.replace(mfcs[2], post_hooks=(OffloadHook(),))
    graph, here = build_graph(mfcs, ["prompt_ids"]), on(**TABLE, again="p4@0:4-7")
    assert plan_hooks(graph, here)["again"].before == ()
    with pytest.raises(
        AllocationError,
        match=r"'ref_inf' offloads role 'ref' after it, while call 'again', which nothing orders against it, moves the "
        r"role's parameters between d1t1p4@0:4-7 and d1t1p1@0:0[\s\S]*allocation.calls.again=d1t1p4@0:4-7",
    ):
        plan_hooks(graph, {**here, **on(again="d1@0:0")})
    mfcs[-1] = dataclasses.replace(mfcs[-1], input_keys=("input_ids", "ref_logprobs"))  # now after the offload
    assert plan_hooks(build_graph(mfcs, ["prompt_ids"]), {**here, **on(again="d1@0:0")})["again"].before


def test_hooks_between_replicas_are_implied():
    pull = ParamReallocHook(source=ModelName("actor", 1))
    graph, allocations = graph_with(actor_gen={"pre_hooks": (pull,)}), on(**TABLE)
    assert plan_hooks(graph, allocations)["actor_gen"] == plan_hooks(graph_with(), allocations)["actor_gen"]


def test_frozen_roles_wait_in_host_memory():
    allocations = on(**TABLE)
    average = ParamReallocHook(target=ModelName("ref"), eta=0.1)
    graph = graph_with(actor_train={"post_hooks": (average,)})
    plan = plan_hooks(graph, allocations, weightless=["reward"], offload_frozen=True)
    offload = Offload("ref", allocations["ref_inf"])
    assert plan["ref_inf"].after == (offload,)
    assert plan["actor_train"].after[1:] == (offload,)
    alone = {**allocations, "actor_gen": allocations["actor_train"], "critic_train": allocations["critic_inf"]}
    assert plan_hooks(graph_with(), alone, offload_frozen=True)["ref_inf"].after == ()


SHAPE = DecoderConfig(
    vocab_size=40,
    hidden_size=24,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=4,
    intermediate_size=48,
    tied_embeddings=True,
    max_positions=64,
)


@pytest.mark.parametrize(
    ("field", "value"), [("n_layers", 4), ("head", "value"), ("lora", LoRA(2, 4.0, ("q",))), ("tied_embeddings", False)]
)
def test_models_at_both_ends_have_one_shape(field, value):
    graph = graph_with(actor_train={"post_hooks": (ParamReallocHook(target=ModelName("ref"), eta=0.1),)})
    shape, other = SHAPE, replace(SHAPE, **{field: value})
    check_realloc_shapes(graph, {"actor": shape, "ref": shape, "critic": other})
    check_realloc_shapes(graph, {"actor": shape})
    difference = re.escape(f"{field} is {getattr(SHAPE, field)} and {value}")
    with pytest.raises(AllocationError, match=rf"'actor_train' .* 'actor' to role 'ref', but .* differ: {difference}"):
        check_realloc_shapes(graph, {"actor": shape, "ref": other})


def test_roles_with_different_heads_are_told_so():
    graph = graph_with(actor_train={"post_hooks": (ParamReallocHook(target=ModelName("ref"), eta=0.1),)})
    shapes = {role: replace(SHAPE, head=head) for role, head in (("actor", "lm"), ("ref", "value"))}
    with pytest.raises(AllocationError, match=r"declare both roles with one head: Role\(..., head=...\)"):
        check_realloc_shapes(graph, shapes)


def test_experts_and_learned_positions_at_both_ends_are_the_same():
    graph = graph_with(actor_train={"post_hooks": (ParamReallocHook(target=ModelName("ref"), eta=0.1),)})

    def check(here, there):
        check_realloc_shapes(graph, {"actor": replace(SHAPE, **here), "ref": replace(SHAPE, **there)})

    check({"max_positions": 64}, {"max_positions": 128})
    check({"moe": EXPERTS}, {"moe": EXPERTS})
    with pytest.raises(AllocationError, match="moe is 3 experts of size 13, 2 a token and None"):
        check({"moe": EXPERTS}, {})
    with pytest.raises(
        AllocationError, match=r"moe is 3 experts .* and 3 experts of size 13, 1 a token, but in layers 0"
    ):
        check({"moe": EXPERTS}, {"moe": replace(EXPERTS, top_k=1, dense_layers=(0,))})
    learned = {"learned_positions": True}
    with pytest.raises(AllocationError, match="max_positions is 64 and 128"):
        check(learned, {**learned, "max_positions": 128})

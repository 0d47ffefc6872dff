"""Devices that each call gets."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError
from realrl.graph.build import build_graph, calls
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy, legal_meshes
from realrl.plan.allocation import (
    check_meshes,
    check_shapes,
    check_supported,
    plan_allocations,
)
from realrl.plan.modes import divide_cluster, split_roles
from realrl.shape import DecoderConfig
from tests.graph.examples import DATASET_KEYS, ppo, seventeen, sft

PPO = build_graph(ppo(), ["prompt_ids"])
NODE = Cluster(1, 4)
INFERENCE = InterfaceType.INFERENCE


def config(mode, **by_call):
    """The section with a mode and overrides."""
    return AllocationConfig(mode=mode, calls=by_call)


def texts(graph, mode, cluster=NODE, **by_call):
    return {name: str(a) for name, a in plan_allocations(graph, config(mode, **by_call), cluster).items()}


@pytest.mark.parametrize("mode", ["data", "colocate", "heuristic", "d4", "d4t1p1@0:0-3"])
def test_all_calls_on_all_devices(mode):
    assert texts(PPO, mode) == {mfc.name: "d4t1p1@0:0-3" for mfc in calls(PPO)}


def test_all_calls_on_one_mesh():
    assert set(texts(PPO, "d2@0:2-3").values()) == {"d2t1p1@0:2-3"}


def test_default_of_the_schema():
    plan = plan_allocations(PPO, AllocationConfig(), Cluster(2, 2))
    assert {str(a) for a in plan.values()} == {"d4t1p1@0-1"}


def test_split():
    assert texts(PPO, "split") == {
        "actor_gen": "d2t1p1@0:0-1",
        "rew_inf": "d2t1p1@0:2-3",
        "ref_inf": "d2t1p1@0:0-1",
        "critic_inf": "d2t1p1@0:2-3",
        "actor_train": "d2t1p1@0:0-1",
        "critic_train": "d2t1p1@0:2-3",
    }


def test_split_roles_of_ppo():
    assert split_roles(PPO) == (("actor", "ref"), ("reward", "critic"))
    mfcs = ppo()
    mfcs[1], mfcs[2] = mfcs[2], mfcs[1]
    heads = {"actor": "lm", "ref": "lm", "reward": "reward", "critic": "value"}
    assert split_roles(build_graph(mfcs, ["prompt_ids"]), heads) == (("actor", "ref"), ("reward", "critic"))


def test_split_of_one_role_takes_everything():
    graph = build_graph(sft(), DATASET_KEYS["sft"])
    assert split_roles(graph) == (("actor",), ())
    assert texts(graph, "split") == {"sft_train": "d4t1p1@0:0-3"}


def test_split_needs_two_devices():
    with pytest.raises(AllocationError, match=r"allocation.mode=split: 2 meshes of their own do not fit"):
        texts(PPO, "split", Cluster(1, 1))


def test_standalone():
    assert texts(PPO, "standalone", Cluster(1, 8)) == {
        "actor_gen": "d2t1p1@0:0-1",
        "rew_inf": "d2t1p1@0:4-5",
        "ref_inf": "d2t1p1@0:6-7",
        "critic_inf": "d2t1p1@0:2-3",
        "actor_train": "d2t1p1@0:0-1",
        "critic_train": "d2t1p1@0:2-3",
    }


def test_standalone_gives_no_device_to_a_role_that_only_waits_for_another():
    """A filter reads what the reward model says; a function that reads responses can work beside generation."""
    mfcs = ppo()
    mfcs[2:2] = [
        MFCDef("scorer_inf", "scorer", INFERENCE, "x", ("input_ids", "rewards"), ("sums",), n_seqs=mfcs[0].n_seqs),
        MFCDef("filter", "filter", INFERENCE, "x", ("sums",), ("kept",), n_seqs=mfcs[0].n_seqs),
    ]
    graph = build_graph(mfcs, ["prompt_ids"])
    heads = {"actor": "lm", "critic": "value", "ref": "lm", "reward": "reward", "scorer": "none", "filter": "none"}
    for mode, head, expected in (("standalone", "reward", "d1t1p1@0:2"), ("standalone", "none", "d1t1p1@0:2")):
        plan = plan_allocations(graph, config(mode), NODE, heads={**heads, "reward": head})
        assert {str(plan[name]) for name in ("rew_inf", "scorer_inf", "filter")} == {expected}
        assert [str(plan[name]) for name in ("actor_gen", "critic_inf", "ref_inf")] == [
            *("d1t1p1@0:0", "d1t1p1@0:1", "d1t1p1@0:3"),
        ]
    split = plan_allocations(graph, config("split"), NODE, heads=heads)
    assert str(split["filter"]) == str(split["rew_inf"]) == "d2t1p1@0:2-3"


def test_standalone_needs_a_device_for_each_role():
    with pytest.raises(AllocationError, match=r"mode=standalone: 4 meshes[\s\S]*n_devices_per_node=4"):
        texts(PPO, "standalone", Cluster(1, 2))


def test_manual():
    given_texts = {mfc.name: "d2@0:0-1" if mfc.role == "actor" else "d1@0:2" for mfc in calls(PPO)}
    plan = texts(PPO, "manual", **given_texts)
    assert plan["actor_gen"] == "d2t1p1@0:0-1"
    assert plan["ref_inf"] == "d1t1p1@0:2"
    del given_texts["ref_inf"]
    with pytest.raises(AllocationError, match=r"manual needs an allocation for every call; missing: ref_inf"):
        texts(PPO, "manual", **given_texts)


def test_overrides_take_the_place_of_the_mode():
    assert texts(PPO, "data", ref_inf="d1@0:1")["ref_inf"] == "d1t1p1@0:1"
    assert texts(PPO, "split", ref_inf="d2")["ref_inf"] == "d2t1p1@0:0-1"


@pytest.mark.parametrize(
    ("mode", "by_call", "message"),
    [
        ("dta", {}, r"allocation.mode=dta is not a mode[\s\S]*Did you mean 'data'"),
        ("everything", {}, r"allocation.mode=everything is not a mode[\s\S]*Modes: data, tensor"),
        ("d2x", {}, r"allocation.mode=d2x: 'd2x' is not a parallel strategy at 'x'"),
        ("d8", {}, r"allocation.mode=d8: strategy d8t1p1 needs 8 devices, its mesh '0:0-3' has 4"),
        ("d2@0:4-5", {}, r"allocation.mode=d2@0:4-5: mesh '0:4-5' lies outside the cluster"),
        ("data", {"actr_gen": "d1@0:0"}, r"allocation.calls.actr_gen: there is no call[\s\S]*Did you mean 'actor_gen'"),
        ("data", {"ref_inf": "d2@0:1-2"}, r"allocation.calls.ref_inf: [\s\S]*nearest mesh is"),
        ("data", {"ref_inf": "d2@0:0-1!"}, r"allocation.calls.ref_inf: .*at '!'"),
        ("manual", {mfc.name: "d4" for mfc in calls(PPO)}, r"allocation.calls.actor_gen: .*no '@' and mesh"),
    ],
)
def test_refusals(mode, by_call, message):
    with pytest.raises(AllocationError, match=message):
        texts(PPO, mode, **by_call)


@pytest.mark.parametrize(
    ("n_seqs", "cluster", "message"),
    [
        (
            4,
            Cluster(1, 8),
            r"call 'actor_gen' has n_seqs=4, fewer than its 8 data-parallel ranks[\s\S]*n_seqs=8 or more",
        ),
        (16, Cluster(1, 8), r"call 'actor_train' has n_seqs / n_minibatches=4, fewer than its 8[\s\S]*\(n_seqs=32\)"),
    ],
)
def test_too_few_samples(n_seqs, cluster, message):
    with pytest.raises(AllocationError, match=message):
        texts(build_graph(ppo(n_seqs), ["prompt_ids"]), "data", cluster)


def test_too_few_streamed_samples():
    graph = build_graph(seventeen(), ["prompt_ids"])
    with pytest.raises(AllocationError, match=r"'harmless_inf' has min_n_seqs=16, fewer than its 32"):
        texts(graph, "data", Cluster(4, 8))


# ---------------------------------------------------------------- what runs now


def test_modes_of_model_parallelism():
    assert set(texts(PPO, "tensor").values()) == {"d1t4p1@0:0-3"}
    assert set(texts(PPO, "pipeline").values()) == {"d1t1p4@0:0-3"}
    assert set(texts(PPO, "d2t2s").values()) == {"d2t2p1s@0:0-3"}


TABLE = {
    "actor_gen": "d4t1p2@0:0-7", "critic_inf": "d2@0:0-1", "rew_inf": "p2@0:2-3", "ref_inf": "p4@0:4-7",
    "critic_train": "d2p2@0:4-7", "actor_train": "d2p2@0:0-3",
}  # fmt: skip


def test_every_call_on_a_mesh_of_its_own():
    plan = plan_allocations(PPO, config("manual", **TABLE), Cluster(1, 8), heads={"reward": "none"})
    assert [str(plan[name]) for name in ("actor_gen", "rew_inf")] == ["d4t1p2@0:0-7", "d1t1p2@0:2-3"]


def test_heuristic_keeps_roles_that_cannot_feed_all_devices_on_blocks_of_their_own():
    mfcs = [dataclasses.replace(mfc, n_minibatches=1) for mfc in ppo(8)]
    mfcs = [dataclasses.replace(mfc, min_n_seqs=2) if mfc.role in ("ref", "reward") else mfc for mfc in mfcs]
    found = texts(build_graph(mfcs, ["prompt_ids"]), "heuristic", Cluster(1, 8))
    assert found["actor_gen"] == found["actor_train"] == found["critic_inf"] == "d8t1p1@0:0-7"
    assert (found["rew_inf"], found["ref_inf"]) == ("d2t1p1@0:0-1", "d2t1p1@0:2-3")
    one = build_graph([dataclasses.replace(sft()[0], n_seqs=9)], DATASET_KEYS["sft"])
    assert texts(one, "heuristic", Cluster(3, 4)) == {"sft_train": "d8t1p1@0-1"}


@given(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 40), st.integers(1, 4))
def test_heuristic_always_gives_a_legal_plan(n_nodes, n_devices_per_node, n_seqs, n_minibatches):
    mfcs = [
        dataclasses.replace(mfc, n_seqs=n_seqs, n_minibatches=min(n_minibatches, n_seqs) if mfc.is_train else 1)
        for mfc in ppo()
    ]
    graph = build_graph(mfcs, ["prompt_ids"])
    plan = plan_allocations(graph, config("heuristic"), Cluster(n_nodes, n_devices_per_node))
    for mfc in calls(graph):
        assert plan[mfc.name] == next(plan[other.name] for other in calls(graph) if other.role == mfc.role)


# ---------------------------------------------------------------- what does not


def test_meshes_of_nodes_that_overlap_in_part():
    cluster = Cluster(3, 2)
    with pytest.raises(AllocationError) as caught:
        texts(PPO, "data", cluster, actor_gen="d4@0-1", ref_inf="d4@1-2")
    assert "calls 'actor_gen' and 'ref_inf' have meshes '0-1' and '1-2', which overlap, but" in str(caught.value)
    nearest = caught.value.remedy.partition("ref_inf=")[2].rstrip(".")
    texts(PPO, "data", cluster, actor_gen="d4@0-1", ref_inf=nearest)
    assert caught.value.call == "ref_inf"


@given(st.integers(1, 9), st.data())
def test_meshes_inside_a_node_always_nest(n_devices, data):
    mesh = st.sampled_from(list(legal_meshes(Cluster(1, n_devices))))
    plan = {name: Allocation(m, ParallelStrategy(tp=m.n_devices)) for name in PPO for m in [data.draw(mesh)]}
    check_meshes(PPO, plan)


def with_protocol(protocol, call="rew_inf", **changes):
    mfcs = [dataclasses.replace(mfc, protocol=protocol, **changes) if mfc.name == call else mfc for mfc in ppo()]
    return build_graph(mfcs, ["prompt_ids"])


def test_protocols_that_engines_cannot_serve():
    graph = with_protocol("DP_PROTO")
    with pytest.raises(
        AllocationError,
        match=r"'rew_inf' has protocol DP_PROTO, which on d2t2p1@0:0-3 gives different samples[\s\S]*3D_PROTO, or d4",
    ):
        texts(graph, "data", rew_inf="d2t2")
    assert texts(graph, "data", rew_inf="d4")
    plan_allocations(graph, config("data", rew_inf="d2t2"), NODE, heads={"reward": "none"})
    with pytest.raises(AllocationError, match=r"'critic_train' has protocol ONE_TO_ALL, .* train on it more than once"):
        texts(with_protocol("ONE_TO_ALL", "critic_train"), "data")
    assert texts(with_protocol("ONE_TO_ALL", "critic_train"), "tensor")
    with pytest.raises(AllocationError, match=r"call 'actor_gen': protocol 3D_ALL_MICRO_DP needs replicas"):
        texts(with_protocol("3D_ALL_MICRO_DP", "actor_gen"), "d4", actor_gen="d1t4")
    assert texts(with_protocol("3D_ALL_MICRO_DP", "actor_gen"), "t4", actor_gen="d2t2")
    graph = build_graph([dataclasses.replace(mfc, protocol="DP_PROTO") for mfc in ppo(2)[:1]], ["prompt_ids"])
    with pytest.raises(AllocationError, match=r"n_seqs=2, fewer than its 4 data-parallel ranks"):
        texts(graph, "data")


def test_hook_of_a_role_without_parameters():
    hook = ParamReallocHook(target=ModelName("reward"), eta=0.5)
    mfcs = [dataclasses.replace(mfc, post_hooks=(hook,)) if mfc.name == "actor_train" else mfc for mfc in ppo()]
    with pytest.raises(AllocationError, match=r"hook of call 'actor_train' .* but 'reward' has none"):
        plan_allocations(build_graph(mfcs, ["prompt_ids"]), config("data"), NODE, heads={"reward": "none"})


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
    ("strategy", "message", "nearest"),
    [
        (
            "t4",
            r"call 'ref_inf' of role 'ref' runs on d1t4p1@0:0-3, but tp=4 .* divide the 6 attention heads",
            "d2t2p1",
        ),
        ("p4", r"pp=4 does not fit a model of 3 layers", "d2t1p2"),
        ("d1t1p4s", r"pp=4", "d2t1p2"),
        ("d2t2", None, None),
        ("d4", None, None),
    ],
)
def test_models_that_cannot_be_cut_so(strategy, message, nearest):
    plan = plan_allocations(PPO, config("data", ref_inf=strategy), NODE)
    if message is None:
        check_shapes(PPO, plan, {"ref": SHAPE})
        return
    check_shapes(PPO, plan, {"actor": SHAPE})
    with pytest.raises(AllocationError, match=message) as caught:
        check_shapes(PPO, plan, {"ref": SHAPE})
    assert caught.value.remedy == f"The nearest legal one: allocation.calls.ref_inf={nearest}@0:0-3."
    assert caught.value.call == "ref_inf"


@given(
    st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 8]), st.sampled_from([2, 4, 8])
)
def test_the_suggested_cut_is_legal(n_layers, n_kv_heads, groups, n_devices):
    shape = dataclasses.replace(SHAPE, n_layers=n_layers, n_heads=n_kv_heads * groups, n_kv_heads=n_kv_heads)
    cluster = Cluster(1, n_devices)
    for strategy in (f"t{n_devices}", f"p{n_devices}", f"t{n_devices // 2}p2"):
        plan = plan_allocations(PPO, config("data", ref_inf=strategy), cluster)
        try:
            check_shapes(PPO, plan, {"ref": shape})
        except AllocationError as err:
            nearest = err.remedy.partition("ref_inf=")[2].rstrip(".")
            again = plan_allocations(PPO, config("data", ref_inf=nearest), cluster)
            check_shapes(PPO, again, {"ref": shape})


def test_all_checks_of_a_plan_in_one():
    plan = plan_allocations(PPO, config("data"), NODE)
    check_supported(PPO, plan)


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_divided_clusters_are_disjoint_and_even(n_nodes, n_devices_per_node, data):
    cluster = Cluster(n_nodes, n_devices_per_node)
    n_parts = data.draw(st.integers(1, cluster.n_devices))
    meshes = divide_cluster(cluster, n_parts)
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    assert len(meshes) == n_parts
    assert len(set(ranks)) == len(ranks)
    if n_devices_per_node in (1, 2, 4, 8):
        assert len(ranks) == cluster.n_devices
    if n_parts <= n_nodes:
        sizes = [mesh.n_devices for mesh in meshes]
        assert max(sizes) - min(sizes) in (0, n_devices_per_node)


@given(st.sampled_from(["data", "split", "standalone"]), st.integers(1, 4), st.sampled_from([4, 6, 8]))
def test_modes_always_give_a_supported_plan(mode, n_nodes, n_devices_per_node):
    cluster = Cluster(n_nodes, n_devices_per_node)
    graph = build_graph(ppo(256), ["prompt_ids"])
    plan = plan_allocations(graph, config(mode), cluster)
    assert list(plan) == list(graph)
    assert all(a.strategy.n_devices == a.mesh.n_devices for a in plan.values())

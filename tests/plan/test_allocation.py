"""Which devices each call gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.schema import AllocationConfig
from realrl.errors import AllocationError
from realrl.graph.build import build_graph, calls
from realrl.mesh.device_mesh import Cluster
from realrl.plan.allocation import check_supported, divide_cluster, plan_allocations, split_roles
from tests.graph.examples import DATASET_KEYS, ppo, seventeen, sft

PPO = build_graph(ppo(), ["prompt_ids"])
NODE = Cluster(1, 4)


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
        ("everything", {}, r"allocation.mode=everything is not a mode[\s\S]*Modes: data, colocate"),
        ("d2x", {}, r"allocation.mode=d2x: 'd2x' is not a parallel strategy at 'x'"),
        ("d8", {}, r"allocation.mode=d8: strategy d8t1p1 needs 8 devices, its mesh '0:0-3' has 4"),
        ("d2@0:4-5", {}, r"allocation.mode=d2@0:4-5: mesh '0:4-5' lies outside the cluster"),
        ("data", {"actr_gen": "d1@0:0"}, r"allocation.calls.actr_gen: there is no call[\s\S]*Did you mean 'actor_gen'"),
        ("data", {"ref_inf": "d2@0:1-2"}, r"allocation.calls.ref_inf: [\s\S]*nearest mesh is"),
        ("data", {"ref_inf": "d2@0:0-1!"}, r"allocation.calls.ref_inf: .*at '!'"),
        ("manual", {mfc.name: "d4" for mfc in calls(PPO)}, r"allocation.calls.actor_gen: .*no '@' and mesh"),
        ("d2t2", {}, r"call 'actor_gen' has strategy d2t2p1, but .*data-parallel calls only[\s\S]*is d4t1p1@0:0-3"),
        ("tensor", {}, r"strategy d1t4p1"),
        ("pipeline", {}, r"strategy d1t1p4"),
        ("d4s", {}, r"strategy d4t1p1s"),
        (
            "data",
            {"actor_gen": "d2@0:0-1"},
            r"calls 'actor_train' and 'actor_gen' of role 'actor' run on different meshes"
            r"[\s\S]*allocation.calls.actor_gen=d4t1p1@0:0-3",
        ),
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


def test_support_is_one_separate_check():
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

"""The graph that a list of calls compiles to."""

import dataclasses

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import GraphError
from realrl.graph.build import (
    StepWait,
    build_graph,
    call,
    calls,
    data_graph,
    dataset_keys,
    home_calls,
    producers,
    readers,
    roles,
    topological_calls,
    version_edges,
    writer_waits,
)
from realrl.graph.mfc import N_SEQS_OF_THE_RUN, InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook
from tests.graph.examples import GENERATE, INFERENCE, PPO_KEYS, TRAIN, chain, ppo, sft


def replaced(name, /, **changes):
    return [MFCDef(**{**vars(mfc), **changes}) if mfc.name == name else mfc for mfc in ppo()]


def edge_kinds(graph):
    return {(a, b): data["kind"] for a, b, data in graph.edges(data=True)}


def test_ppo_edges():
    graph = build_graph(ppo(), ["prompt_ids"])
    assert isinstance(graph, nx.DiGraph)
    assert list(graph) == ["actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"]
    assert graph.nodes["ref_inf"]["mfc"].role == "ref"
    assert graph.edges["actor_gen", "rew_inf"] == {"kind": "data", "keys": ("input_ids",)}
    assert graph.edges["actor_gen", "critic_inf"]["keys"] == ("input_ids", "truncated")
    assert graph.edges["actor_gen", "actor_train"]["keys"] == ("input_ids", "old_logprobs", "prompt_mask", "truncated")
    assert graph.edges["actor_train", "actor_gen"] == {"kind": "version", "lag": 1}
    assert [pair for pair, kind in edge_kinds(graph).items() if kind == "version"] == [
        ("actor_train", "actor_gen"),
        ("critic_train", "critic_inf"),
    ]
    assert len(data_graph(graph).edges) == 11


def test_questions():
    graph = build_graph(ppo(), ["prompt_ids", "answer"])
    assert dataset_keys(graph) == ("prompt_ids",)
    assert roles(graph) == ("actor", "reward", "ref", "critic")
    assert producers(graph)["values"] == "critic_inf"
    assert set(producers(graph)) == set(PPO_KEYS)
    assert readers(graph, "truncated") == ("critic_inf", "actor_train", "critic_train")
    assert readers(graph, "nothing") == ()
    assert call(graph, "ref_inf").role == "ref"
    assert [mfc.name for mfc in calls(graph)] == list(graph)
    with pytest.raises(GraphError, match=r"no call 'ref_imf'[\s\S]*Did you mean 'ref_inf'"):
        call(graph, "ref_imf")


def test_topological_order_breaks_ties_by_declaration():
    graph = build_graph(list(reversed(ppo())), ["prompt_ids"])
    names = [mfc.name for mfc in topological_calls(graph)]
    assert names == ["actor_gen", "critic_inf", "ref_inf", "rew_inf", "critic_train", "actor_train"]


def test_train_only_graph_has_no_version_edge():
    graph = build_graph(sft(), ["input_ids", "prompt_mask"])
    assert version_edges(graph) == ()
    assert dataset_keys(graph) == ("input_ids", "prompt_mask")


def test_staleness_is_the_lag():
    graph = build_graph(ppo(max_staleness=3), ["prompt_ids"])
    assert StepWait("actor_train", "actor_gen", 4) in version_edges(graph)


def staged(gen_staleness, inf_staleness):
    """The actor generates, then computes log-probabilities again, then trains."""
    return [
        MFCDef("gen", "actor", GENERATE, "x", ("p",), ("ids",), max_staleness=gen_staleness, n_seqs=1),
        MFCDef("again", "actor", INFERENCE, "x", ("ids",), ("lp",), max_staleness=inf_staleness, n_seqs=1),
        MFCDef("train", "actor", TRAIN, "x", ("ids", "lp"), n_seqs=1),
    ]


def test_version_edge_goes_to_the_earliest_reader():
    assert version_edges(build_graph(staged(0, 0), ["p"])) == (StepWait("train", "gen", 1),)
    assert version_edges(build_graph(staged(1, 2), ["p"])) == (StepWait("train", "gen", 2),)


def test_stricter_later_reader_keeps_its_own_version_edge():
    edges = version_edges(build_graph(staged(2, 0), ["p"]))
    assert edges == (StepWait("train", "gen", 3), StepWait("train", "again", 1))


def test_two_earliest_readers_get_an_edge_each():
    mfcs = [
        MFCDef("a", "actor", INFERENCE, "x", ("p",), ("ka",), n_seqs=1),
        MFCDef("b", "actor", INFERENCE, "x", ("p",), ("kb",), n_seqs=1),
        MFCDef("train", "actor", TRAIN, "x", ("ka", "kb"), n_seqs=1),
    ]
    assert [edge.after for edge in version_edges(build_graph(mfcs, ["p"]))] == ["a", "b"]


def test_data_and_version_between_the_same_calls():
    mfcs = [
        MFCDef("train", "actor", TRAIN, "x", ("p",), ("report",), n_seqs=1),
        MFCDef("judge", "actor", INFERENCE, "x", ("report",), ("verdict",), n_seqs=1),
    ]
    graph = build_graph(mfcs, ["p"])
    assert graph.edges["train", "judge"] == {"kind": "data", "keys": ("report",), "lag": 1}
    assert version_edges(graph) == (StepWait("train", "judge", 1),)
    assert data_graph(graph).edges["train", "judge"] == {"kind": "data", "keys": ("report",)}


def test_realloc_hooks_carry_versions_to_other_roles():
    pushed = replaced("actor_train", post_hooks=(ParamReallocHook(target=ModelName("ref"), eta=0.1),))
    assert StepWait("actor_train", "ref_inf", 1) in version_edges(build_graph(pushed, ["prompt_ids"]))
    pulled = replaced("ref_inf", pre_hooks=(ParamReallocHook(source=ModelName("actor")),))
    edges = version_edges(build_graph(pulled, ["prompt_ids"]))
    assert StepWait("actor_train", "ref_inf", 1) in edges
    assert not any(edge.before == "critic_train" and edge.after == "ref_inf" for edge in edges)


def test_a_call_that_trains_a_role_may_also_pull_parameters_into_it():
    pulled = replaced("actor_train", post_hooks=(ParamReallocHook(source=ModelName("ref"), eta=0.5),))
    plain = build_graph(replaced("actor_train"), ["prompt_ids"])
    assert version_edges(build_graph(pulled, ["prompt_ids"])) == version_edges(plain)


def test_replicas_of_a_role_wait_for_its_training():
    mfcs = replaced("actor_gen", model_name=ModelName("actor", 1))
    assert StepWait("actor_train", "actor_gen", 1) in version_edges(build_graph(mfcs, ["prompt_ids"]))


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_order_of_declaration_gives_the_same_edges(length, random):
    mfcs = chain(length)
    graph = build_graph(mfcs, ["k0"])
    random.shuffle(mfcs)
    shuffled = build_graph(mfcs, ["k0"])
    assert {(a, b): d for a, b, d in graph.edges(data=True)} == {(a, b): d for a, b, d in shuffled.edges(data=True)}
    order = [mfc.name for mfc in topological_calls(shuffled)]
    assert all(order.index(a) < order.index(b) for a, b in data_graph(shuffled).edges)


# ---------------------------------------------------------------- refusals


REFUSED = {
    "empty": ([], r"the list of calls is empty"),
    "two names": ([*ppo(), ppo()[1]], r"two calls have the name 'rew_inf'"),
    "no name": (replaced("rew_inf", name=""), r"call number 2 has the name ''"),
    "no role": (replaced("rew_inf", model_name=""), r"call 'rew_inf' runs on role ''"),
    "negative replica": (replaced("rew_inf", model_name=ModelName("reward", -1)), r"replica -1"),
    "type as text": (replaced("rew_inf", interface_type="inference"), r"interface_type='inference'[\s\S]*INFERENCE"),
    "two producers": (replaced("rew_inf", output_keys=("values",)), r"'rew_inf' and 'critic_inf' both produce key 'va"),
    "dataset and call": (replaced("rew_inf", output_keys=("prompt_ids",)), r"dataset and call 'rew_inf' both provide"),
    "nobody": (
        replaced("rew_inf", input_keys=("imput_ids",)),
        r"call 'rew_inf' reads key 'imput_ids', which no call produces; the dataset offers prompt_ids"
        r"[\s\S]*Did you mean 'input_ids'",
    ),
    "self cycle": (replaced("rew_inf", input_keys=("rewards",)), r"cycle: 'rew_inf' reads rewards from 'rew_inf'"),
    "cycle": (
        replaced("actor_gen", input_keys=("prompt_ids", "values")),
        r"cycle: .*'critic_inf' reads input_ids and truncated from 'actor_gen'",
    ),
    "two trainers": (
        replaced("critic_train", model_name="actor"),
        r"'actor_train' and 'critic_train' both train role 'actor'",
    ),
    "offload before": (replaced("rew_inf", pre_hooks=(OffloadHook(),)), r"'rew_inf' has an OffloadHook before it"),
    "offload before moving": (
        replaced("actor_train", post_hooks=(OffloadHook(), ParamReallocHook(target=ModelName("ref")))),
        r"'actor_train' offloads role 'actor' and then moves its parameters[\s\S]*OffloadHook last",
    ),
    "two offloads": (replaced("rew_inf", post_hooks=(OffloadHook(), OffloadHook())), r"'rew_inf' has two OffloadHooks"),
    "average into itself": (
        replaced("actor_train", post_hooks=(ParamReallocHook(target=ModelName("actor", 1), eta=0.5),)),
        r"'actor_train' averages role 'actor' into itself \(eta=0.5\)[\s\S]*a role of its own",
    ),
    "into a trained role": (
        replaced("actor_train", post_hooks=(ParamReallocHook(target=ModelName("critic"), eta=0.5),)),
        r"hook of call 'actor_train' writes into role 'critic', which call 'critic_train' trains[\s\S]*Only a frozen",
    ),
    "pulled into a trained role": (
        replaced("actor_gen", pre_hooks=(ParamReallocHook(source=ModelName("ref"), eta=0.5),)),
        r"hook of call 'actor_gen' writes into role 'actor', which call 'actor_train' trains",
    ),
    "unknown role": (
        replaced("actor_train", post_hooks=(ParamReallocHook(target=ModelName("reff"), eta=0.5),)),
        r"hook of call 'actor_train' names role 'reff', which no call runs on[\s\S]*Did you mean 'ref'",
    ),
    "two into one target": (
        replaced(
            "actor_train",
            post_hooks=(ParamReallocHook(target=ModelName("ref"), eta=0.5), ParamReallocHook(target=ModelName("ref"))),
        ),
        r"hook of call 'actor_train' writes into role 'ref', and so does a hook of the same call",
    ),
    "streamed realloc": (
        replaced("ref_inf", min_n_seqs=4, pre_hooks=(ParamReallocHook(source=ModelName("actor")),)),
        r"'ref_inf' streams \(min_n_seqs=4\) and has a hook that moves parameters",
    ),
    "trained replica": (
        replaced("actor_train", model_name=ModelName("actor", 1)),
        r"'actor_train' trains replica 'actor#1'[\s\S]*model_name='actor'",
    ),
    "protocol": (replaced("rew_inf", protocol="DP_PROT"), r"protocol='DP_PROT'[\s\S]*Did you mean 'DP_PROTO'"),
    "streamed training": (replaced("actor_train", min_n_seqs=4), r"'actor_train' is a train_step and has min_n_seqs=4"),
    "stream too large": (replaced("rew_inf", min_n_seqs=33), r"min_n_seqs=33, more than its n_seqs=32"),
    "n_seqs": (
        replaced("rew_inf", n_seqs=12),
        r"n_seqs=12 of call 'rew_inf' does not divide n_seqs=32 of [\s\S]*nearest value that does is 16",
    ),
    "zero n_seqs": (replaced("rew_inf", n_seqs=0), r"'rew_inf' has n_seqs=0"),
    "fraction": (replaced("rew_inf", n_seqs=1.5), r"'rew_inf' has n_seqs=1.5"),
    "bool": (replaced("rew_inf", n_seqs=True), r"'rew_inf' has n_seqs=True"),
    "None": (replaced("rew_inf", n_seqs=None), r"'rew_inf' has n_seqs=None"),
    "negative min_n_seqs": (replaced("rew_inf", min_n_seqs=-1), r"min_n_seqs=-1"),
    "negative n_mbs": (replaced("rew_inf", n_mbs=-2), r"n_mbs=-2[\s\S]*at least 1"),
    "negative tokens": (replaced("rew_inf", max_tokens_per_mb=0), r"max_tokens_per_mb=0"),
    "negative staleness": (replaced("actor_gen", max_staleness=-1), r"max_staleness=-1[\s\S]*at least 0"),
    "stale training": (
        replaced("actor_train", max_staleness=1),
        r"'actor_train' is a train_step and has max_staleness",
    ),
    "minibatches": (replaced("actor_train", n_minibatches=33), r"n_minibatches=33, more than its n_seqs=32"),
    "inference minibatches": (
        replaced("rew_inf", n_minibatches=2),
        r"'rew_inf' is an inference and has n_minibatches=2",
    ),
    "no pass": (replaced("actor_train", n_passes=0), r"'actor_train' has n_passes=0[\s\S]*at least 1"),
    "inference passes": (
        replaced("rew_inf", n_passes=2),
        r"'rew_inf' is an inference and has n_passes=2",
    ),
    "keys as text": (replaced("rew_inf", input_keys="input_ids"), r"is the string 'input_ids'[\s\S]*\('input_ids',\)"),
    "key twice": (replaced("rew_inf", output_keys=("a", "a")), r"output_keys of call 'rew_inf' has 'a' twice"),
    "input remap": (
        replaced("rew_inf", input_key_remap={"input_id": "ids"}),
        r"input_key_remap of call 'rew_inf' names 'input_id'[\s\S]*Did you mean 'input_ids'",
    ),
    "output remap": (
        replaced("rew_inf", output_key_remap={"scores": "reward"}),
        r"output_key_remap of call 'rew_inf' names 'reward'[\s\S]*Did you mean 'rewards'",
    ),
    "folding remap": (
        replaced("critic_inf", input_key_remap={"truncated": "input_ids"}),
        r"input_key_remap of call 'critic_inf' maps two keys to 'input_ids'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    mfcs, message = REFUSED[case]
    with pytest.raises(GraphError, match=message):
        build_graph(mfcs, ["prompt_ids"])


# ---------------------------------------------------------------- who may change what others read


def test_writers_wait_for_readers_that_no_data_orders():
    average = ParamReallocHook(target=ModelName("teacher"), eta=0.1)
    mfcs = replaced("actor_train", post_hooks=(average,))
    mfcs.append(MFCDef("teach", "teacher", InterfaceType.INFERENCE, "x", ("input_ids",), ("hints",), n_seqs=32))
    graph = build_graph(mfcs, ["prompt_ids"])
    assert writer_waits(graph) == (StepWait("teach", "actor_train", 0),)
    assert StepWait("actor_train", "teach", 1) in version_edges(graph)


def test_writers_wait_for_the_step_before_of_readers_behind_them():
    pull = ParamReallocHook(source=ModelName("actor"))
    mfcs = replaced("ref_inf", pre_hooks=(pull,))
    mfcs.append(MFCDef("again", "ref", InterfaceType.INFERENCE, "x", ("ref_logprobs",), ("more",), n_seqs=32))
    assert writer_waits(build_graph(mfcs, ["prompt_ids"])) == (StepWait("again", "ref_inf", 1),)


def test_writers_that_leave_no_order():
    def call(name, role, hook=(), reads=("p",), out=()):
        return MFCDef(name, role, InterfaceType.INFERENCE, "x", reads, out, pre_hooks=hook, n_seqs=1)

    mfcs = [
        call("a", "a", (ParamReallocHook(source=ModelName("b")),), out=("ka",)),
        call("b", "b", (ParamReallocHook(source=ModelName("a")),), out=("kb",)),
    ]
    with pytest.raises(GraphError, match=r"call 'a' changes parameters that call 'b' reads in the same step"):
        build_graph(mfcs, ["p"])
    mfcs[1] = call("b", "b", (ParamReallocHook(source=ModelName("a")),), reads=("ka",), out=("kb",))
    build_graph(mfcs, ["p"])


def test_home_calls():
    mfcs = ppo()
    assert home_calls(build_graph(mfcs, ["prompt_ids"])) == {
        "actor": "actor_train", "reward": "rew_inf", "ref": "ref_inf", "critic": "critic_train",
    }  # fmt: skip


@pytest.mark.parametrize(("source", "target"), [(None, None), (ModelName("a"), ModelName("b"))])
def test_realloc_hook_has_one_other_end(source, target):
    with pytest.raises(GraphError, match="exactly one of source and target"):
        ParamReallocHook(source=source, target=target)


@pytest.mark.parametrize(
    ("hooks", "what", "remedy"),
    [
        (OffloadHook(), r"post_hooks=OffloadHook\(\)", "Write a tuple of hooks"),
        (("offload",), r"post_hooks=\('offload',\)", "Write a tuple of hooks"),
        ((ParamReallocHook(target="ref"),), "a hook of call 'actor_gen' names the role 'ref'", r"ModelName\('ref'\)"),
    ],
)
def test_hooks_of_wrong_types(hooks, what, remedy):
    mfcs = ppo()
    mfcs[0] = dataclasses.replace(mfcs[0], post_hooks=hooks)
    with pytest.raises(GraphError, match=rf"{what}[\s\S]*{remedy}"):
        build_graph(mfcs, ["prompt_ids"])


@pytest.mark.parametrize("eta", [0.0, -0.5, 1.5])
def test_realloc_hook_eta(eta):
    with pytest.raises(GraphError, match="0 < eta <= 1"):
        ParamReallocHook(target=ModelName("a"), eta=eta)


def test_accepted_forms():
    mfcs = ppo()
    mfcs[1] = MFCDef(
        "rew_inf",
        ModelName("reward"),
        InterfaceType.INFERENCE,
        "x",
        ("input_ids",),
        ("rewards",),
        input_key_remap={"input_ids": "ids"},
        output_key_remap={"scores": "rewards"},
        n_seqs=16,
        min_n_seqs=4,
        post_hooks=(OffloadHook(),),
    )
    assert build_graph(mfcs, ["prompt_ids"]).nodes["rew_inf"]["mfc"].n_seqs == 16


def test_a_call_without_n_seqs_is_named():
    with pytest.raises(GraphError, match=r"call 'ref_inf' has no n_seqs\n  .*MFCDef\(\.\.\., n_seqs=SAMPLES\)"):
        build_graph(replaced("ref_inf", n_seqs=N_SEQS_OF_THE_RUN), PPO_KEYS)

"""Parameters that come early or stay: the room that each needs, to the byte, and what keeps them from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from realrl.plan.hooks import NO_OVERLAP, CallHooks, Offload, Overlap, Realloc
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.overlap import plan_overlap
from realrl.plan.memory.plan import CallState, RoleState, layout_of
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import DecoderConfig

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
NODE = Cluster(1, 4)
MODEL = DecoderConfig(
    vocab_size=64, hidden_size=32, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=4, intermediate_size=48
)
N = sum(spec.num_bytes for spec in parameter_specs(MODEL))
LOAD, LARGE = Load(4, 64, 16), Load(4, 64_000, 16_000)
PLENTY = 1 << 40


def place(text, cluster=NODE):
    return parse_allocation(text, cluster)


def role(home="d1@0:0", cluster=NODE, **changes):
    return RoleState(**{"model": MODEL, "home": place(home, cluster), "is_trained": False, **changes})


def actor(**changes):
    return role(is_trained=True, is_changed=True, **changes)


def call(name, of, where, *, kind=INFERENCE, home=None, before=(), offloads=(), load=LOAD, cluster=NODE):
    """A call of role `of`, which gets its parameters from `home`, if that is given."""
    at = place(where, cluster)
    implied = () if home is None else (Realloc(of, place(home, cluster), of, at),)
    after = tuple(Offload(name, place(text, cluster)) for name, text in offloads)
    return CallState(name, of, kind, at, CallHooks((*before, *implied), after), load)


def train(**changes):
    return call("train", "actor", "d1@0:0", kind=TRAIN, **changes)


def usages(roles, calls):
    return plan_memory(roles, calls).calls


def decide(roles, calls, capacity=PLENTY, *, is_host_memory=False, evaluating=(), batches=None):
    return plan_overlap(
        roles,
        calls,
        plan_memory(roles, calls),
        capacity=capacity,
        is_host_memory=is_host_memory,
        evaluating=evaluating,
        batches=batches or {},
    )


# ---------------------------------------------------------------- who comes early


def test_what_comes_early_needs_room_for_parameters_and_all_their_messages():
    roles = {"actor": actor(), "critic": role("d1@0:1")}
    calls = [
        call("gen", "actor", "d1@0:1", kind=GENERATE, home="d1@0:0"),
        call("value", "critic", "d1@0:1"),
        call("elsewhere", "critic", "d1@0:2", home="d1@0:1"),
        train(),
    ]
    used = usages(roles, calls)
    target, source = used["value"][1].total + 2 * N, used["train"][0].total + N  # the source's ranks send the model
    everyone = frozenset({"value", "elsewhere", "train"})
    assert decide(roles, calls).early["gen"] == everyone
    assert target < source  # training is the larger one
    assert decide(roles, calls, source).early["gen"] == everyone
    assert decide(roles, calls, source - 1).early["gen"] == everyone - {"train"}
    assert decide(roles, calls, target).early["gen"] == everyone - {"train"}
    assert "gen" not in decide(roles, calls, target - 1).early  # "elsewhere" shares no device with it


def test_slices_that_both_layouts_have_take_no_room():
    model = replace(MODEL, tied_embeddings=False)
    roles = {"actor": actor(home="p2@0:0-1", model=model), "other": role("d1@0:1")}
    calls = [
        call("gen", "actor", "d2@0:0-1", kind=GENERATE, home="p2@0:0-1"),
        call("beside", "other", "d1@0:1"),
        call("train", "actor", "p2@0:0-1", kind=TRAIN),
    ]
    first, second = (layout_of(model, place("p2@0:0-1")).num_bytes_of(rank) for rank in (0, 1))
    room = usages(roles, calls)["beside"][1].total + 2 * first + second  # the first stage comes, the second is sent
    assert "beside" in decide(roles, calls, room).early["gen"]
    assert "beside" not in decide(roles, calls, room - 1).early.get("gen", ())


def test_a_slice_of_the_home_within_a_larger_one_may_have_to_lie_twice():
    roles = {"actor": actor(home="t2@0:0-1"), "other": role("d1@0:1")}
    calls = [
        call("gen", "actor", "d2@0:0-1", kind=GENERATE, home="t2@0:0-1"),
        call("beside", "other", "d1@0:1", load=LARGE),
        call("train", "actor", "t2@0:0-1", kind=TRAIN),
    ]
    half = layout_of(MODEL, place("t2@0:0-1")).num_bytes_of(1)
    whole_on_both = 2 * half - N  # norms
    room = usages(roles, calls)["beside"][1].total + (N - whole_on_both) + 2 * (N - half)
    assert "beside" in decide(roles, calls, room).early["gen"]
    assert "beside" not in decide(roles, calls, room - 1).early.get("gen", ())


def test_parameters_that_are_gathered_for_the_moment_share_no_memory_with_the_home():
    roles = {"actor": actor(home="d2@0:0-1", zero_stage=3), "other": role("d1@0:1")}
    calls = [
        call("gen", "actor", "d1@0:1", kind=GENERATE, home="d2@0:0-1"),
        call("beside", "other", "d1@0:1", load=LARGE),
        call("train", "actor", "d2@0:0-1", kind=TRAIN),
    ]
    full = usages(roles, calls)["beside"][1].total
    assert decide(roles, calls, full + N, batches={"gen": 2}).stays == {"gen"}
    assert not decide(roles, calls, full + N - 1, batches={"gen": 2}).stays
    roles["actor"] = actor(home="d2@0:0-1")  # where they are whole, they stay at home
    assert decide(roles, calls, usages(roles, calls)["beside"][1].total, batches={"gen": 2}).stays == {"gen"}


def test_a_device_is_too_full_for_one_of_its_calls_only():
    roles = {"actor": actor(), "ref": role("d1@0:1")}
    calls = [call("gen", "actor", "d1@0:1", kind=GENERATE, home="d1@0:0"), call("small", "ref", "d1@0:1"), train()]
    calls.append(call("large", "ref", "d1@0:1", load=LARGE))
    used = usages(roles, calls)
    assert used["small"][1].total < used["large"][1].total
    found = decide(roles, calls, used["large"][1].total + 2 * N - 1)
    assert found.early["gen"] >= {"small"}
    assert "large" not in found.early["gen"]


@pytest.mark.parametrize(
    "changes", [{"zero_stage": 1}, {"backend": "megatron", "zero_stage": 1}, {"backend": "deepspeed"}]
)
def test_parameters_that_ranks_share_out_or_that_libraries_hold_do_not_come_early(changes):
    calls = [call("gen", "actor", "d2@0:0-1", kind=GENERATE, home="d1@0:0"), train()]
    assert decide({"actor": actor()}, calls).early
    assert not decide({"actor": actor(**changes)}, calls).early
    frozen = {"actor": role(is_changed=True, **changes)}  # its optimizer is no matter
    assert decide(frozen, [calls[0], call("other", "actor", "d1@0:0")]).early


def test_a_train_step_and_hooks_between_roles_are_waited_for():
    averages = Realloc("actor", place("d1@0:0"), "ref", place("d1@0:0"), eta=0.5)
    roles = {"actor": actor(), "ref": role(is_changed=True)}
    calls = [call("score", "ref", "d1@0:1", home="d1@0:0"), train(offloads=[("actor", "d1@0:0")])]
    calls.append(call("beside", "ref", "d1@0:0"))
    assert decide(roles, calls).early.keys() == {"score"}  # training needs the actor back, but not early
    calls[0] = call("score", "ref", "d1@0:1", home="d1@0:0", before=[averages])
    assert not decide(roles, calls).early
    calls[0] = call("score", "ref", "d1@0:1", home="d1@0:0")
    calls[0] = replace(calls[0], hooks=replace(calls[0].hooks, after=(averages,)))
    assert not decide(roles, calls).early


def test_relays_pass_on_what_they_get_and_so_not_at_once():
    nodes = Cluster(2, 2)
    home = role("d1@0:0", nodes)
    for where, is_early in (("d1@1:0", True), ("d2@1", False), ("p2@1", True)):
        calls = [
            call("score", "ref", where, home="d1@0:0", cluster=nodes),
            call("first", "ref", "d1@0:0", cluster=nodes),
        ]
        assert ("score" in decide({"ref": replace(home, is_changed=True)}, calls).early) is is_early, where


def test_calls_of_an_evaluation_come_between_any_two():
    roles = {"actor": actor(), "ref": role("d1@0:1")}
    calls = [call("gen", "actor", "d1@0:1", kind=GENERATE, home="d1@0:0"), call("small", "ref", "d1@0:1"), train()]
    calls.append(call("large", "ref", "d1@0:1", load=LARGE))
    capacity = usages(roles, calls)["large"][1].total + 2 * N - 1
    assert "gen" in decide(roles, calls, capacity, evaluating=["small"]).early
    assert "gen" not in decide(roles, calls, capacity, evaluating=["large"]).early
    calls[3] = call("large", "ref", "d1@0:2", load=Load(4, 128_000, 32_000))  # it evaluates elsewhere
    found = decide(roles, calls, capacity, evaluating=["large"])
    assert "large" not in found.early["gen"]


# ---------------------------------------------------------------- host memory


def test_an_offloaded_role_comes_home_early_and_takes_its_room_there():
    roles = {"ref": role(), "other": role()}
    calls = [call("score", "ref", "d1@0:0", offloads=[("ref", "d1@0:0")]), call("beside", "other", "d1@0:0")]
    full = usages(roles, calls)["beside"][0].total
    assert decide(roles, calls, full + N).early == {"score": {"beside"}}
    assert not decide(roles, calls, full + N - 1).early
    calls[0] = call("score", "ref", "d1@0:0")
    assert not decide(roles, calls).early  # it waits for nothing


def test_a_role_that_another_call_offloads_comes_back_to_its_home_first():
    roles = {"ref": role(is_changed=True), "other": role()}
    calls = [
        call("score", "ref", "d1@0:1", home="d1@0:0"),
        call("beside", "other", "d1@0:0"),
        call("last", "other", "d1@0:2", offloads=[("ref", "d1@0:0")]),
    ]
    full = usages(roles, calls)["beside"][0].total
    assert "beside" in decide(roles, calls, full + 2 * N).early["score"]  # the model there, and messages with it
    assert "beside" not in decide(roles, calls, full + 2 * N - 1).early.get("score", ())
    calls[2] = call("last", "other", "d1@0:2")
    assert "beside" in decide(roles, calls, full + N).early["score"]


def test_on_a_cpu_what_is_offloaded_takes_the_same_memory():
    roles = {"actor": actor(), "ref": role("d1@0:1"), "other": role("d1@0:1")}
    calls = [
        call("gen", "actor", "d1@0:1", kind=GENERATE, home="d1@0:0"),
        call("score", "ref", "d1@0:1", offloads=[("ref", "d1@0:1")]),
        call("beside", "other", "d1@0:1"),
        train(),
    ]
    usage = usages(roles, calls)["beside"][1]
    assert usage.host == N
    room = usage.total + 2 * N
    assert "beside" in decide(roles, calls, room).early["gen"]
    assert "beside" not in decide(roles, calls, room + N - 1, is_host_memory=True).early.get("gen", ())
    assert "beside" in decide(roles, calls, room + N, is_host_memory=True).early["gen"]


# ---------------------------------------------------------------- who stays


def frozen_in_two_layouts(**changes):
    roles = {"ref": role(**changes), "other": role("d1@0:1")}
    calls = [
        call("first", "ref", "d1@0:0"),
        call("second", "ref", "d1@0:1", home="d1@0:0"),
        call("beside", "other", "d1@0:1"),
    ]
    return roles, calls


def test_a_frozen_role_lives_twice_where_every_other_call_has_room():
    roles, calls = frozen_in_two_layouts()
    full = usages(roles, calls)["beside"][1].total
    assert decide(roles, calls, full + N) == Overlap(resident=frozenset({"second"}))  # which then never travels
    assert not decide(roles, calls, full + N - 1).resident
    for changes in ({"is_changed": True}, {"is_trained": True}):
        assert not decide(*frozen_in_two_layouts(**changes)).resident


def test_a_call_with_several_batches_a_step_keeps_its_parameters_between_them():
    roles, calls = frozen_in_two_layouts(is_changed=True)
    full = usages(roles, calls)["beside"][1].total
    assert decide(roles, calls, full + N, batches={"second": 2}).stays == {"second"}
    assert not decide(roles, calls, full + N - 1, batches={"second": 2}).stays
    assert not decide(roles, calls, batches={"second": 1}).stays
    assert not decide(roles, calls, batches={"first": 2}).stays  # it runs at home
    found = decide(*frozen_in_two_layouts(), batches={"second": 2})
    assert (found.stays, found.resident) == (frozenset(), {"second"})


def test_where_a_hook_offloads_the_role_nothing_stays():
    roles, calls = frozen_in_two_layouts()
    for number in range(len(calls)):
        offloading = list(calls)
        hooks = replace(calls[number].hooks, after=(Offload("ref", place("d1@0:0")),))
        offloading[number] = replace(calls[number], hooks=hooks)
        found = decide(roles, offloading, batches={"second": 2})
        assert not (found.resident | found.stays)
    hooks = replace(calls[2].hooks, after=(Offload("other", place("d1@0:1")),))
    assert decide(roles, [*calls[:2], replace(calls[2], hooks=hooks)]).resident


def test_what_stays_takes_room_from_others():
    roles = {"ref": role(), "rew": role(), "other": role("d1@0:1"), "actor": actor(home="d1@0:2")}
    calls = [
        call("first", "ref", "d1@0:0"),
        call("home", "rew", "d1@0:0"),
        call("second", "ref", "d1@0:1", home="d1@0:0"),
        call("again", "rew", "d1@0:1", home="d1@0:0"),
        call("beside", "other", "d1@0:1", load=LARGE),
        call("gen", "actor", "d1@0:1", home="d1@0:2"),
        call("train", "actor", "d1@0:2", kind=TRAIN),
    ]
    full = usages(roles, calls)["beside"][1].total  # the fullest moment of its device
    assert full > 2 * N + max(usages(roles, calls)[name][1].total for name in ("second", "again", "gen"))
    assert decide(roles, calls, full + N - 1).resident == frozenset()
    assert decide(roles, calls, full + N).resident == {"second"}
    assert decide(roles, calls, full + 2 * N - 1).resident == {"second"}
    assert decide(roles, calls, full + 2 * N).resident == {"second", "again"}
    assert "beside" not in decide(roles, calls, full + 4 * N - 1).early["gen"]
    assert "beside" in decide(roles, calls, full + 4 * N).early["gen"]


def test_without_hooks_there_is_nothing_to_decide():
    roles, calls = {"actor": actor(), "ref": role()}, [call("score", "ref", "d1@0:0"), train()]
    assert decide(roles, calls, batches={"score": 4}) == NO_OVERLAP


def test_the_decision_in_words():
    assert NO_OVERLAP.notes == {}
    found = Overlap(frozenset({"b", "c"}), frozenset({"a"}), {"c": frozenset({"a"})}).notes
    assert found == {"a": "live in two layouts", "b": "stay for the step", "c": "come early and stay for the step"}

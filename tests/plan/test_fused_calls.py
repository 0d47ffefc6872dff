"""Calls that may train together, their places and their order; every refusal names the calls and the reason."""

import dataclasses
import random

import pytest

from realrl.errors import AllocationError, ConfigError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_allocation
from realrl.plan.fused_calls import (
    FusedModel,
    FusedModels,
    Fusion,
    check_places,
    check_trainers,
    fusion_of,
    reversed_stages,
    with_reversed_home,
)
from realrl.plan.pipeline import StepKind
from realrl.shape import DecoderConfig
from tests.graph.examples import ppo
from tests.plan.pipeline_simulator import simulate

PPO = ppo()
NAMES = ("actor_train", "critic_train")
NODE = Cluster(1, 4)


def graph_of(mfcs=PPO):
    return build_graph(mfcs, ["prompt_ids"])


def changed(name, mfcs=PPO, **changes):
    return [dataclasses.replace(mfc, **changes) if mfc.name == name else mfc for mfc in mfcs]


def test_nothing_is_fused_by_default():
    assert fusion_of(graph_of(), ()) is None


def test_actor_and_critic():
    fusion = fusion_of(graph_of(), NAMES)
    assert fusion == Fusion(*NAMES)
    assert str(fusion) == "actor_train + critic_train"
    assert "actor_train" in fusion
    assert "actor_gen" not in fusion


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("actor_train", "critic_trian"), "there is no call 'critic_trian'"),
        (("actor_train", "critic_inf"), "call 'critic_inf' does not train (it is a call of type inference)"),
        (("actor_train",), "allocation.fuse=[actor_train] names one call"),
        (("actor_train", "critic_train", "actor_train"), "names 3 calls"),
        (("actor_train", "actor_train"), "names the same call twice"),
    ],
)
def test_names_that_are_refused(names, message):
    with pytest.raises(ConfigError) as caught:
        fusion_of(graph_of(), names)
    assert message in caught.value.message
    assert caught.value.remedy


def test_a_misspelt_name_is_guessed():
    with pytest.raises(ConfigError, match="critic_train"):
        fusion_of(graph_of(), ("actor_train", "critic_trian"))


def test_calls_that_do_not_train_equally_often():
    n = next(mfc.n_seqs for mfc in PPO if mfc.name == "critic_train")
    graph = graph_of(changed("critic_train", n_seqs=n // 2))
    with pytest.raises(ConfigError, match="do not train equally often"):
        fusion_of(graph, NAMES)


def test_a_hook_that_reads_the_other_role():
    hook = ParamReallocHook(source=ModelName("actor"), eta=0.5)
    graph = graph_of(changed("critic_train", pre_hooks=(hook,)))
    with pytest.raises(AllocationError, match="'actor_train' changes role 'actor', which 'critic_train' reads"):
        fusion_of(graph, NAMES)


def trains(name, role, reads, writes=()):
    return MFCDef(name, role, InterfaceType.TRAIN_STEP, "x", reads, writes, n_seqs=8)


@pytest.mark.parametrize("names", [("train", "other"), ("other", "train")])
def test_a_call_that_reads_what_the_other_writes(names):
    middle = MFCDef("middle", "c", InterfaceType.INFERENCE, "x", ("loss",), ("mark",), n_seqs=8)
    mfcs = [trains("train", "a", ("prompt_ids",), ("loss",)), middle, trains("other", "b", ("mark",))]
    with pytest.raises(AllocationError, match="'other' waits for 'train' \\(train -> middle -> other\\)"):
        fusion_of(graph_of(mfcs), names)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_readers_that_run_ahead_need_no_later_step_of_the_other_call(max_staleness):
    read = {"interface_impl": "x", "input_keys": ("prompt_ids",), "n_seqs": 8, "max_staleness": max_staleness}
    mfcs = [
        MFCDef("read", "a", InterfaceType.INFERENCE, output_keys=("mark",), **read),
        MFCDef("see", "b", InterfaceType.INFERENCE, output_keys=("sight",), **read),
        trains("train", "a", ("mark", "sight")),
        trains("other", "b", ("mark", "sight")),
    ]
    assert fusion_of(graph_of(mfcs), ("train", "other")) is not None


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (("p2@0:0-1", "p2@0:2-3"), "not on the same devices"),
        (("p4@0:0-3", "d2p2@0:0-3"), "their stages have not the same devices"),
        (("t2p2@0:0-3", "d2p2@0:0-3"), "their stages have not the same devices"),
        (("d4@0:0-3", "d4@0:0-3"), "has one pipeline stage, and so no bubbles"),
        (("d1p4v2@0:0-3", "d1p4v2@0:0-3"), "has virtual stages"),
    ],
)
def test_places_that_are_refused(places, message):
    allocations = dict(zip(NAMES, (parse_allocation(text, NODE) for text in places), strict=True))
    with pytest.raises(AllocationError) as caught:
        check_places(Fusion(*NAMES), allocations)
    assert message in caught.value.message
    assert caught.value.remedy


def test_backends_that_are_refused_by_name():
    check_trainers(Fusion(*NAMES), dict.fromkeys(NAMES, "native"))
    with pytest.raises(ConfigError, match="call 'critic_train' trains with backend=megatron"):
        check_trainers(Fusion(*NAMES), {"actor_train": "native", "critic_train": "megatron"})


@pytest.mark.parametrize("strategy", ["p4", "d2p2", "t2p2", "p2", "d2t2p2"])
def test_reversed_stages(strategy):
    plain = parse_allocation(
        f"{strategy}@0:0-{7 if strategy == 'd2t2p2' else 3 if strategy != 'p2' else 1}", Cluster(1, 8)
    )
    other, s = reversed_stages(plain), plain.strategy
    assert str(other) == str(plain)
    for mesh_rank, rank in enumerate(plain.ranks):
        pp, dp, tp = s.coordinates(mesh_rank)
        assert s.coordinates(other.ranks.index(rank)) == (s.pp - 1 - pp, dp, tp)
    assert reversed_stages(dataclasses.replace(other, order=None)) == other


def test_every_call_in_the_home_is_reversed_and_no_other():
    home = Allocation(DeviceMesh.whole(NODE), ParallelStrategy(pp=4))
    elsewhere = Allocation(DeviceMesh.whole(NODE), ParallelStrategy(dp=4))
    allocations = {mfc.name: home for mfc in PPO} | {"rew_inf": elsewhere}
    placed = with_reversed_home(graph_of(), allocations, Fusion(*NAMES))
    role_of = {mfc.name: mfc.role for mfc in PPO}
    for name, allocation in placed.items():
        expected = allocations[name]
        assert allocation == (reversed_stages(expected) if role_of[name] == "critic" else expected)
    assert with_reversed_home(graph_of(), allocations, None) == allocations


BIG = DecoderConfig(97, 32, 8, 4, 2, 8, 64)
SMALL = dataclasses.replace(BIG, n_layers=4, head="value")


def models(pp, *, recomputes=False):
    first = FusedModel.of(BIG, pp, recomputes=recomputes, n_minibatches=1)
    return FusedModels(first, FusedModel.of(SMALL, pp, recomputes=False, n_minibatches=2))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("n_first", "n_second"), [(1, 1), (4, 3), (2, 7)])
def test_lists_hold_every_computation_and_cannot_block(pp, n_first, n_second):
    lists = models(pp).lists(n_first, n_second)
    for device, steps in enumerate(lists):
        done = [(s.kind, s.chunk, s.micro_batch) for s in steps if not s.kind.is_message]
        own = {device: n_first, pp + pp - 1 - device: n_second}
        for kind in (StepKind.FORWARD, StepKind.BACKWARD):
            for chunk, n in own.items():
                assert [m for k, c, m in done if (k, c) == (kind, chunk)] == list(range(n))
        assert len(done) == 2 * (n_first + n_second)
    draw = random.Random(pp)
    for _ in range(5):
        simulate(lists, cost=lambda step: draw.uniform(0.1, 3.0))


def test_orders_depend_on_counts_and_models_alone():
    one, other = models(2), models(2)
    assert one.lists(4, 3) == other.lists(4, 3)
    assert one.schedule(4, 3).latency < sum(one.schedule(n, 1).latency for n in (4, 3))


def test_micro_batches_in_flight_are_those_of_the_orders():
    fused = models(2)
    schedule, pairs = fused.schedule(4, 4), fused.in_flight(4, 4)
    for device, order in enumerate(schedule.orders):
        held = [0, 0]
        for task in order:
            held[task.pipeline] += -1 if task.is_backward else 1
            assert any(held[0] <= n and held[1] <= m for n, m in pairs[device])
        assert all(max(1, n) <= 4 and max(1, m) <= 4 for n, m in pairs[device])

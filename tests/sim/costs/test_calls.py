from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.schema import GenerationConfig
from realrl.errors import ConfigError
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh
from realrl.mesh.notation import parse_strategy
from realrl.plan.hooks import CallHooks, Offload, Realloc
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.plan import RoleState, layout_of
from realrl.plan.samples.transfer import Placement, RowTransfer
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import MoveRows, RunCall
from realrl.sched.track.dispatch import plan_work
from realrl.sim.costs.calls import CostModel
from realrl.sim.costs.moves import realloc_of, realloc_seconds
from realrl.sim.durations import SampleSizes
from tests.sim.costs.models import hardware, llama, small

A100 = hardware()
CLUSTER = Cluster(2, 4)
IDS = [f"1/{i}" for i in range(16)]
SIZES = {i: SampleSizes((20 + n,), (10 + 3 * n,)) for n, i in enumerate(IDS)}
GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
KINDS = st.sampled_from([GENERATE, INFERENCE, TRAIN])


def place(text, cluster=CLUSTER):
    return Allocation(DeviceMesh.whole(cluster), parse_strategy(text))


def call(kind, text="d8", *, home=None, before=(), after=(), has_role=True, **changes):
    allocation = place(text)
    mfc = MFCDef("call", "actor", kind, "x", ("input_ids",), n_seqs=len(IDS), **changes)
    home = (home or allocation) if has_role else None
    return ScheduledCall(mfc, allocation, CallHooks(before, after, home))


def requests(scheduled, ids=IDS, sizes=SIZES):
    placements = {"input_ids": {i: Placement(frozenset({0})) for i in ids}}
    counts = [sum(sizes[i].tokens) for i in ids]
    work, _ = plan_work(scheduled, ids, counts, placements, CLUSTER.node_of, key=(1, 1, 0))
    return {
        rank: RunCall(0, 1, "call", 1, w.minibatches, w.transfers, keeps=w.keeps, spreads=w.spreads)
        for rank, w in work.items()
    }


def model_of(scheduled, model=None, *, machines=A100, kernels=None, **changes):
    home = scheduled.hooks.home or scheduled.allocation
    role = RoleState(model or small(), home, scheduled.mfc.is_train, **changes)
    return CostModel({"actor": role}, machines, generation=GenerationConfig(max_batch_size=8), kernels=kernels)


def seconds(scheduled, model=None, sizes=SIZES, **changes):
    return model_of(scheduled, model, **changes).call(scheduled, requests(scheduled, sizes=sizes), sizes)


@pytest.mark.parametrize("text", ["d8", "d4t2", "d2t2p2", "d1t4p2s", "d2p4", "d4p2v2"])
@pytest.mark.parametrize("kind", [GENERATE, INFERENCE, TRAIN])
def test_ranks_of_a_group_take_equally_long(kind, text):
    scheduled = call(kind, text)
    found = seconds(scheduled)
    assert found.keys() == set(scheduled.ranks)
    assert min(found.values()) > A100.host.call_s
    meets = model_of(scheduled).meets(scheduled)
    assert sorted(rank for group in meets for rank in group) == sorted(scheduled.ranks)
    assert all(len({found[rank] for rank in group}) == 1 for group in meets)


@settings(max_examples=20)
@given(KINDS, st.sampled_from(["d8", "d4t2", "d2p4"]), st.integers(1, 400))
def test_longer_samples_never_take_less(kind, text, more):
    scheduled = call(kind, text)
    longer = {i: SampleSizes((s.prompt_tokens[0] + more,), s.response_tokens) for i, s in SIZES.items()}
    given_work = requests(scheduled)
    model = model_of(scheduled)
    assert max(model.call(scheduled, given_work, SIZES).values()) <= max(
        model.call(scheduled, given_work, longer).values()
    )


def test_answers_do_not_depend_on_earlier_questions():
    scheduled = call(GENERATE, "d2p4")
    model = model_of(scheduled)
    first = model.call(scheduled, requests(scheduled), SIZES)
    other = {i: SampleSizes((9,), (4,)) for i in IDS}
    model.call(scheduled, requests(scheduled, sizes=other), other)
    assert model.call(scheduled, requests(scheduled), SIZES) == first == seconds(scheduled)


def test_training_takes_longer_than_inference_and_more_minibatches_longer_than_one():
    one, many = (max(seconds(call(TRAIN, n_minibatches=n), llama(n_layers=2)).values()) for n in (1, 2))
    assert max(seconds(call(INFERENCE), llama(n_layers=2)).values()) < one < many


def test_virtual_stages_shorten_training_where_bubbles_are_larger_than_messages():
    """And where passes are long enough for their constants not to matter."""
    long = {i: SampleSizes((2000,), (2000,)) for i in IDS}
    machines = replace(A100, device=replace(A100.device, pass_s=0.0))
    train, generate = (
        [max(seconds(call(kind, text), llama(), sizes=long, machines=machines).values()) for text in ("d1p8", "d1p8v4")]
        for kind in (TRAIN, GENERATE)
    )
    assert train[1] < train[0]
    assert generate[0] < generate[1]  # every token goes four times through all stages


def test_checkpointing_and_offloaded_optimizers_take_longer():
    plain = max(seconds(call(TRAIN)).values())
    assert plain < max(seconds(call(TRAIN), checkpoints_activations=True).values())
    assert plain < max(seconds(call(TRAIN), offloads_optimizer=True).values())


def test_zero_3_gathers_parameters_before_a_call_at_home():
    scheduled = call(INFERENCE)
    plain, gathered = (
        max(
            CostModel(
                {"actor": RoleState(llama(), scheduled.allocation, True, backend="deepspeed", zero_stage=stage)},
                A100,
                generation=GenerationConfig(),
            )
            .call(scheduled, requests(scheduled), SIZES)
            .values()
        )
        for stage in (2, 3)
    )
    assert gathered - plain > 0.05


def test_generation_in_another_dtype_reads_other_weights():
    scheduled = call(GENERATE)
    model = llama(n_layers=4, dtype="float32")
    own, half = (seconds(scheduled, model, kernels=Kernels(generation_bytes=width)) for width in (4, 2))
    assert max(half.values()) < 0.7 * max(own.values())


def test_a_dtype_that_the_hardware_lacks():
    with pytest.raises(ConfigError, match=r"no device\.flops_per_s\.float64"):
        seconds(call(INFERENCE), small(dtype="float64"), machines=hardware("two_cores"))


def test_reward_functions_judge_what_a_rank_keeps():
    scheduled = call(INFERENCE, has_role=False)
    work = requests(scheduled)
    found = model_of(scheduled).call(scheduled, work, SIZES)
    assert found == {rank: A100.host.call_s + len(work[rank].keeps) * A100.host.reward_s for rank in range(8)}


class TestHooks:
    home, other = place("d4t2"), place("d8")

    def test_parameters_that_come_for_a_call(self):
        move = Realloc("actor", self.home, "actor", self.other)
        scheduled = call(GENERATE, "d8", home=self.home, before=(move,))
        model = model_of(scheduled)
        plan = realloc_of(small(), self.home, self.other)
        took = realloc_seconds(plan, A100, CLUSTER.node_of)
        assert model.hooks(scheduled, "before", range(8)) == dict.fromkeys(range(8), took)
        assert model.hooks(scheduled, "after", range(8)) == dict.fromkeys(range(8), 0.0)
        assert 0 < model.hooks(scheduled, "ahead of", [3])[3] < took
        assert [model.received_bytes(scheduled, "before", r) for r in range(8)] == [
            plan.bytes_received(r) for r in range(8)
        ]
        assert model.received_bytes(scheduled, "after", 0) == 0

    def test_averages_take_longer_than_copies(self):
        average = Realloc("actor", self.other, "reference", self.other, eta=0.5)
        scheduled = call(TRAIN, "d8", after=(average,))
        roles = {name: RoleState(small(), self.other, False) for name in ("actor", "reference")}
        model = CostModel(roles, A100, generation=GenerationConfig())
        n_bytes = layout_of(small(), self.other).num_bytes_of(0)
        assert model.hooks(scheduled, "after", [0])[0] == pytest.approx(3 * n_bytes / A100.device.stream)

    def test_offload_and_return(self):
        scheduled = call(TRAIN, "d4t2", after=(Offload("actor", self.home),))
        model, host = model_of(scheduled), A100.links.host
        n_bytes = layout_of(small(), self.home).num_bytes_of(0)
        expected = host.latency_s + n_bytes / host.speed(4)
        assert model.hooks(scheduled, "after", [0])[0] == model.onload("actor", [0])[0] == pytest.approx(expected)
        frozen = call(INFERENCE, "d4t2", after=(Offload("actor", self.home),))
        assert model_of(frozen).hooks(frozen, "after", [0])[0] == 0.0  # the host has had a copy since the first time


def test_rows():
    scheduled = call(INFERENCE)
    model, host, links = model_of(scheduled), A100.host, A100.links
    pulled = RowTransfer(0, 1, "x", tuple(IDS[:2]))
    n_bytes = 8 * sum(sum(SIZES[i].tokens) for i in IDS[:2])
    found = model.rows({1: RunCall(0, 1, "call", 1, (), (pulled,)), 2: RunCall(0, 1, "call", 1, (), ())}, SIZES)
    assert found == {1: pytest.approx(2 * host.message_s + n_bytes / host.socket_bytes_per_s), 2: 0.0}
    found = model.rows(
        {0: MoveRows(0, 1, "call", 1, (pulled,), ()), 1: MoveRows(0, 1, "call", 1, (), (pulled,))}, SIZES
    )
    assert found[0] == found[1] == pytest.approx(links.device.latency_s + n_bytes / links.device.speed())


def test_checkpoints_are_written_once():
    scheduled = call(TRAIN, "d4t2")
    model = model_of(scheduled)
    n_elements = sum(layout_of(small(), scheduled.allocation).num_bytes_of(rank) for rank in (0, 1)) / 2
    written = sum(model.write(rank) for rank in range(8)) * A100.host.disk_bytes_per_s
    assert written == pytest.approx((2 + 12) * n_elements, rel=0.01)
    assert model.save(0) > 0.0 == model.save(7)


def test_everything_else_is_what_the_file_says():
    model = model_of(call(INFERENCE))
    host = A100.host
    assert (model.load(4), model.read(4), model.free()) == (4 * host.sample_s, 4 * host.sample_s, host.sample_s)
    assert (model.start(), model.handling(3), model.latency(0)) == (host.start_s, 3 * host.event_s, host.message_s)


def test_slower_networks_make_spread_training_slower():
    slow = replace(A100, links=replace(A100.links, node=replace(A100.links.node, sharing=1)))
    scheduled = call(TRAIN, "d2t4")
    assert max(seconds(scheduled, llama()).values()) < max(seconds(scheduled, llama(), machines=slow).values())

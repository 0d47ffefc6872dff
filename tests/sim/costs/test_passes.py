from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.pipeline import inference, interleaved
from realrl.shape import LoRA
from realrl.sim.costs.collectives import FREE, LinearCost
from realrl.sim.costs.flops import LOGIT_BYTES, attended, stage_work
from realrl.sim.costs.passes import Load, PassCost, pipeline_seconds
from tests.plan.pipeline_simulator import simulate
from tests.sim.costs.models import hardware, llama, small

DEVICE = hardware().device
WORK = stage_work(small(), ParallelStrategy(), 0)


def load(tokens, scored=None):
    n = np.atleast_1d(np.array(tokens, dtype=float))
    return Load(n, n if scored is None else np.atleast_1d(np.array(scored, dtype=float)), {None: attended(n, None)})


@pytest.mark.parametrize("is_backward", [False, True])
@given(tokens=st.integers(0, 10**5), more=st.integers(0, 10**5))
def test_more_tokens_never_take_less(is_backward, tokens, more):
    cost = PassCost(WORK, DEVICE, LinearCost(1e-6, 1e-9), is_backward=is_backward)
    assert cost(load(tokens))[0] <= cost(load(tokens + more))[0]


def test_no_tokens_take_no_time():
    assert PassCost(WORK, DEVICE, FREE)(load([0, 1]))[0] == 0.0


def test_a_long_pass_is_bound_by_flops_and_a_short_one_by_weights():
    work, n = stage_work(llama(), ParallelStrategy(), 0), 1e6
    cost = PassCost(work, DEVICE, FREE)
    flops = work.product_flops(n) + float(work.head_flops(np.array(n)))
    attention = work.attention_flops(32 * n) / (312e12 * DEVICE.attention_efficiency)
    single = Load(np.array([n]), np.array([n]), {None: np.array([n])})  # sequences of one token
    assert cost(single)[0] == pytest.approx(flops / DEVICE.rate("bfloat16") + attention, rel=0.1)
    weights = (work.matrix_bytes + 2 * work.head) / DEVICE.stream
    assert cost(load(1))[0] == pytest.approx(weights + 32 * DEVICE.block_s + DEVICE.pass_s, rel=0.02)


def test_backward_takes_twice_as_long_and_with_checkpointing_three_times():
    work = stage_work(llama(), ParallelStrategy(pp=2), 0)
    forward, backward, again = (
        PassCost(work, DEVICE, FREE, is_backward=back, recomputes=back_again)(load(10**5))[0]
        for back, back_again in ((False, False), (True, False), (True, True))
    )
    assert backward == pytest.approx(2 * forward, rel=0.2)
    assert again == pytest.approx(backward + forward, rel=0.01)


def test_what_a_block_takes_beside_computing_counts_twice_backward():
    slow = replace(DEVICE, block_s=DEVICE.block_s + 1.0)
    for is_backward, times in ((False, 1), (True, 2)):
        costs = [PassCost(WORK, device, FREE, is_backward=is_backward)(load(10))[0] for device in (DEVICE, slow)]
        assert costs[1] - costs[0] == pytest.approx(times * WORK.n_layers)


def test_prompts_that_responses_share_take_time_in_every_block():
    device = replace(DEVICE, fork_s=0.25)
    plain, shared = load([10, 10]), replace(load([10, 10]), forks=np.array([0.0, 3.0]))
    for is_backward, times in ((False, 1), (True, 2)):
        cost = PassCost(WORK, device, FREE, is_backward=is_backward)
        assert (cost(shared) - cost(plain)).tolist() == pytest.approx([0.0, times * WORK.n_layers * 3 * 0.25])
    assert shared.reshape(2, 1).forks.tolist() == [[0.0], [3.0]]
    assert plain.reshape(2, 1).forks.tolist() == [[0.0], [0.0]]


def test_activations_have_a_bandwidth_of_their_own():
    slow = replace(DEVICE, activation_efficiency=DEVICE.activation_efficiency / 2)
    more = [PassCost(WORK, device, FREE)(load(100))[0] for device in (DEVICE, slow)]
    rows = (100 * WORK.row_bytes + 100 * WORK.logits * LOGIT_BYTES) / DEVICE.activation_stream
    assert more[1] - more[0] == pytest.approx(rows)


def test_adapters_make_backward_shorter():
    plain, adapted = (
        PassCost(stage_work(llama(lora=lora), ParallelStrategy(), 0), DEVICE, FREE, is_backward=True)(load(2000))[0]
        for lora in (None, LoRA(8, 16, ("q", "v")))
    )
    assert adapted < 0.7 * plain


def test_tensor_parallel_passes_meet_in_every_block():
    tensor = LinearCost(1.0, 0.0)
    first, last = (stage_work(small(), ParallelStrategy(tp=2, pp=2), stage) for stage in (0, 1))
    forward = [PassCost(work, DEVICE, tensor)(load(8))[0] for work in (first, last)]
    backward = [PassCost(work, DEVICE, tensor, is_backward=True)(load(8))[0] for work in (first, last)]
    assert [round(s) for s in forward] == [2 * first.n_layers + 1, 2 * last.n_layers + 2]
    assert [round(s) for s in backward] == [2 * first.n_layers, 2 * last.n_layers + 1]


@given(st.integers(1, 8), st.integers(1, 12), st.floats(0.1, 5), st.floats(0.1, 5))
def test_the_bubble_of_equal_stages(n_stages, n_mbs, forward, backward):
    forwards, backwards = ([np.full((n_mbs, 2), s)] * n_stages for s in (forward, backward))
    assert pipeline_seconds(forwards, backwards) == pytest.approx((n_mbs + n_stages - 1) * (forward + backward))
    assert pipeline_seconds(forwards, None) == pytest.approx((n_mbs + n_stages - 1) * forward)


@given(n_stages=st.integers(1, 5), vpp=st.integers(1, 3), n_mbs=st.integers(1, 6), trains=st.booleans(), data=st.data())
def test_pipelines_are_those_of_the_schedule(n_stages, vpp, n_mbs, trains, data):
    """The engine's lists, run by the simulator of the schedules' own tests, take as long."""
    vpp = vpp if n_stages > 1 else 1
    n_chunks = n_stages * vpp
    times = st.lists(st.floats(0.5, 4), min_size=n_chunks * n_mbs, max_size=n_chunks * n_mbs)
    forward, backward = (np.array(data.draw(times)).reshape(n_chunks, n_mbs) for _ in range(2))

    def cost(step):
        table = backward if step.kind.value == "backward" else forward
        return 0.0 if step.kind.is_message else float(table[step.chunk, step.micro_batch])

    forwards, backwards = ([row[:, None] for row in table] for table in (forward, backward))
    found = pipeline_seconds(forwards, backwards if trains else None, n_stages=n_stages)
    timeline = simulate((interleaved if trains else inference)(n_stages, n_mbs, vpp), cost, eager=True)
    assert found[0] == pytest.approx(timeline.duration)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_virtual_stages_divide_the_bubble(n_stages, vpp, n_groups):
    """Of equal chunks, where the stages divide the micro-batches."""
    n_mbs = n_groups * n_stages
    forwards, backwards = ([np.full((n_mbs, 1), s / vpp)] * (n_stages * vpp) for s in (1.0, 2.0))
    found = pipeline_seconds(forwards, backwards, n_stages=n_stages)[0]
    assert found == pytest.approx(3 * (n_mbs + (n_stages - 1) / vpp))


def test_messages_make_pipelines_longer():
    forwards, backwards, messages = ([np.ones((4, 1))] * n for n in (3, 3, 2))
    free = pipeline_seconds(forwards, backwards)[0]
    assert pipeline_seconds(forwards, None, messages)[0] == 3 + 2 + 3  # to the last stage, then its other passes
    assert free < pipeline_seconds(forwards, backwards, messages)[0] <= free + 4 * 4

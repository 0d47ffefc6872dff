from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.schema import GenerationConfig
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.shape import MoEConfig
from realrl.sim.costs.collectives import FREE, LinearCost
from realrl.sim.costs.flops import stage_work
from realrl.sim.costs.generation import StageDecoding, replica_seconds, together_seconds
from tests.sim.costs.models import hardware, llama, small

DEVICE = hardware().device


def decoding(model=None, *, pp=1, max_rows=64, tensor=FREE, forward=FREE):
    strategy = ParallelStrategy(pp=pp)
    works = [stage_work(model or small(), strategy, stage) for stage in range(pp)]
    return [StageDecoding(work, DEVICE, tensor, forward, max_rows) for work in works]


def settings_of(max_rows=64):
    return GenerationConfig(max_batch_size=max_rows)


def by_hand(prompts, stage):
    """Every step of one batch of rows that enter together, one after the other."""
    rows = [(p, n) for p, made in prompts for n in made]
    copied = sum(p * (len(made) - 1) for p, made in prompts)
    seconds = float(stage.prefilling([sorted((p for p, _ in prompts), reverse=True)], [copied])[0])
    for step in range(1, max(n for _, n in rows)):
        alive = [p + step for p, n in rows if n > step]  # tokens that the row's newest one sees
        seen = sum(n * sum(min(a, w or a) for a in alive) for w, n in stage.work.windows)
        seconds += float(stage.steps[len(alive)]) + seen * stage.work.cache_bytes / DEVICE.stream
    return seconds


PROMPTS = st.lists(
    st.tuples(st.integers(1, 30), st.tuples(st.integers(1, 20), st.integers(1, 20))), min_size=1, max_size=6
)


@given(PROMPTS, st.sampled_from([None, 5]))
def test_rows_that_enter_together_take_the_sum_of_their_steps(prompts, window):
    (stage,) = decoding(small(sliding_window=window))
    expected = by_hand(prompts, stage)
    assert together_seconds([prompts, prompts[:1]], stage)[0] == pytest.approx(expected)
    assert replica_seconds(prompts, [stage], settings_of()) == pytest.approx(expected)


def test_slots_are_refilled_when_enough_are_free():
    (stage,) = decoding(max_rows=2)
    prompts = [(4, (3,)), (3, (9,)), (2, (5,))]  # the first two enter; the third when one ends
    reading = float(stage.reading(np.array([4.0, 3, 2]), np.array([3.0, 9, 5])).sum())
    prefills = stage.prefilling([[4, 3], [2]], [0, 0]).sum()
    steps = 2 * stage.steps[2] + 4 * stage.steps[2] + 2 * stage.steps[1]
    assert replica_seconds(prompts, [stage], settings_of(2)) == pytest.approx(float(prefills + steps) + reading)


@settings(max_examples=30)
@given(PROMPTS, st.integers(1, 3), st.integers(1, 9))
def test_more_work_never_takes_less(prompts, pp, more):
    """All rows enter together: else longer ones may end together, and be refilled in fewer passes."""
    stages = decoding(pp=pp, max_rows=12)
    base = replica_seconds(prompts, stages, settings_of(12))
    longer = [(p, tuple(n + more for n in made)) for p, made in prompts]
    assert 0 < base <= replica_seconds(longer, stages, settings_of(12)) * (1 + 1e-9)


def test_stages_decode_in_turn():
    prompts = [(4, (10,)), (4, (10,))]
    stages = decoding(pp=2)
    one, other = (float(stage.steps[1]) for stage in stages)
    assert stages[0].work.n_layers >= stages[1].work.n_layers
    rounds = 9 * 2 * max(one, other)
    prefill = 2 * max(float(stage.prefilling([[4]], [0])[0]) for stage in stages)
    reading = 2 * max(float(stage.reading(np.array([4.0]), np.array([10.0]))[0]) for stage in stages)
    assert replica_seconds(prompts, stages, settings_of()) == pytest.approx(rounds + prefill + reading, rel=0.02)


def test_decoding_few_rows_reads_the_weights():
    (stage,) = decoding(llama())
    weights = (stage.work.matrix_bytes + 2 * stage.work.head) / DEVICE.stream
    constant = 32 * DEVICE.block_s + DEVICE.token_s
    assert stage.steps[1] == pytest.approx(weights + constant, rel=0.01)
    assert stage.steps[0] == 0.0
    assert np.all(np.diff(stage.steps) >= 0)


def test_generation_takes_values_of_its_own():
    (stage,) = decoding(llama())
    own = replace(DEVICE, generation={"block_s": 0.0, "pass_s": 0.0, "memory_efficiency": DEVICE.memory_efficiency / 2})
    other = replace(stage, device=own)
    weights = (stage.work.matrix_bytes + 2 * stage.work.head) / DEVICE.stream
    assert other.steps[1] == pytest.approx(2 * weights + DEVICE.token_s, rel=0.01)
    prefill, its = (float(one.prefilling([[1]], [0])[0]) for one in (stage, other))
    assert its == pytest.approx(prefill + weights - 32 * DEVICE.block_s - DEVICE.pass_s, rel=0.01)
    lengths = np.array([8.0]), np.array([5.0])
    assert other.reading(*lengths) == pytest.approx(2 * stage.reading(*lengths))


def test_decoding_reads_the_experts_that_rows_choose():
    model = llama(moe=MoEConfig(n_experts=64, top_k=2, intermediate_size=2048))
    (stage,) = decoding(model)
    one, many = stage.work.bytes_read(np.array([1.0, 64.0]))
    assert many > 4 * one
    assert stage.steps[64] > stage.steps[1]


def test_tensor_parallel_steps_pay_latency_in_every_block():
    (alone,), (group,) = decoding(), decoding(tensor=LinearCost(1e-3, 0.0))
    work = alone.work
    assert group.steps[3] - alone.steps[3] == pytest.approx(1e-3 * (2 * work.n_layers + 2))  # embedding, logits


def test_copies_of_a_prompt_cost_its_cache():
    (stage,) = decoding()
    alone, copied = stage.prefilling([[100], [100]], [0, 300])
    cache = 300 * 8 * stage.work.cache_bytes
    assert copied - alone == pytest.approx(2 * cache / DEVICE.stream)


def test_nothing_to_generate():
    assert replica_seconds([], decoding(), settings_of()) == 0.0


def test_long_prompts_take_several_passes():
    (stage,) = decoding(llama())
    device = replace(DEVICE, pass_s=1000.0)
    slow = StageDecoding(stage.work, device, FREE, FREE, 64)
    assert slow.prefilling([[3000, 3000, 1000], [500]], [0, 0]).astype(int).tolist() == [2000, 1000]

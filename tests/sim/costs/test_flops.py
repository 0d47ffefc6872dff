import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.memory.buffers import LOGITS_CHUNK
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import LoRA, MoEConfig
from realrl.sim.costs.flops import attended, stage_work
from tests.sim.costs.models import LLAMAS, llama, small

ONE = ParallelStrategy()
MOE = MoEConfig(n_experts=8, top_k=2, intermediate_size=96)


@pytest.mark.parametrize("size", LLAMAS)
def test_a_llama_takes_six_flops_a_parameter_and_token(size):
    model = llama(size)
    work, n_tokens = stage_work(model, ONE, 0), 2.0
    flops = sum(
        work.product_flops(n_tokens, is_backward=back) + float(work.head_flops(np.array(n_tokens), is_backward=back))
        for back in (False, True)
    )
    n_parameters = sum(spec.n_elements for spec in parameter_specs(model))
    assert flops == pytest.approx(6 * n_parameters * n_tokens, rel=0.03)
    assert n_parameters == pytest.approx(float(size[:-1]) * 1e9, rel=0.06)


@pytest.mark.parametrize("model", [small(), small(moe=MOE), small(lora=LoRA(4, 8, ("q", "o", "up", "down")))])
def test_tensor_parallelism_halves_what_is_sharded(model):
    whole, half = (stage_work(model, ParallelStrategy(tp=tp), 0) for tp in (1, 2))
    router = 8 * 64 * 8 if model.moe else 0  # on every rank
    assert half.matrices - router == (whole.matrices - router) / 2
    assert half.queries == whole.queries / 2
    assert half.cache_bytes == whole.cache_bytes / 2
    assert half.head == whole.head / 2
    assert whole.adapters / 2 <= half.adapters <= whole.adapters
    assert half.hidden_bytes == whole.hidden_bytes == half.message_bytes
    assert stage_work(model, ParallelStrategy(tp=2, sp=True), 0).message_bytes == whole.message_bytes / 2


def test_stages_add_up_to_the_model():
    model = small()
    whole, stages = stage_work(model, ONE, 0), [stage_work(model, ParallelStrategy(pp=4), i) for i in range(4)]
    assert sum(stage.matrices for stage in stages) == whole.matrices
    assert sum(stage.n_trained for stage in stages) == whole.n_trained
    assert [stage.head > 0 for stage in stages] == [False, False, False, True]


def test_grouped_heads_share_keys_and_values():
    assert stage_work(small(), ONE, 0).cache_bytes == 2 * 4 * 8 * 2  # keys and values of 4 heads of 8 in bfloat16
    assert stage_work(small(n_kv_heads=8), ONE, 0).cache_bytes == 2 * 8 * 8 * 2
    assert stage_work(small(), ParallelStrategy(tp=8), 0).cache_bytes == 2 * 1 * 8 * 2  # two ranks share a head


def test_a_token_meets_its_experts_only():
    dense, sparse = stage_work(small(), ONE, 0), stage_work(small(moe=MOE), ONE, 0)
    attention = dense.matrices - 8 * 3 * 64 * 192
    assert sparse.matrices == attention + 8 * (2 * 3 * 64 * 96 + 8 * 64)
    read = sparse.bytes_read(np.array([0.0, 1.0, 1000.0]))
    experts = 8 * 8 * 3 * 64 * 96 * 2
    assert read[1] - read[0] == pytest.approx(experts / 4)  # two of eight
    assert read[2] - read[0] == pytest.approx(experts)


def test_adapters_leave_weights_frozen():
    plain, adapted = (stage_work(small(lora=lora), ONE, 0) for lora in (None, LoRA(4, 8, ("q",))))
    assert adapted.adapters == adapted.n_trained == 8 * 4 * (64 + 64)
    assert adapted.product_flops(1.0) == plain.product_flops(1.0) + 2 * adapted.adapters
    assert adapted.product_flops(1.0, is_backward=True) == plain.product_flops(1.0) + 4 * adapted.adapters


def test_logits_of_several_chunks_are_computed_again():
    work = stage_work(small(), ONE, 0)
    n = LOGITS_CHUNK // 512
    once, again = (float(work.head_flops(np.array(scored), is_backward=True)) / scored for scored in (n, 2.0 * n))
    assert again == once * 3 / 2


def test_scalar_heads_cost_next_to_nothing():
    assert stage_work(small(head="value"), ONE, 0).head == 64
    assert stage_work(small(head="value"), ONE, 0).logits == 0


@given(st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_counted_one_by_one(length, window):
    seen = sum(min(position + 1, window or length) for position in range(length))
    assert attended(length, window) == seen


def test_windows_are_counted_by_layer():
    work = stage_work(small(sliding_window=16, windowed_layers=(0, 2, 4)), ONE, 0)
    assert dict(work.windows) == {16: 3, None: 5}

"""Memory that CUDA alone takes: records of decode steps, repeated heads, sums of biases, norms in float32."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from realrl.plan.memory.buffers import BIAS_SUM, CUDA_SEGMENT, GRAPH_POOL
from realrl.plan.memory.formulas.blocks import backward_of_biases, backward_of_norm, generation_of_block, kept_by_block
from realrl.plan.memory.formulas.ends import kept_by_ends
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import ON_CUDA, Kernels, LocalShape, local_shape
from realrl.plan.memory.formulas.passes import training_bytes
from realrl.plan.memory.load import Load
from realrl.plan.parameters.shards import ModelShard
from realrl.shape import DecoderConfig, LoRA, MoEConfig

MODEL = DecoderConfig(64, 32, 4, 8, 4, 4, 48)
WHOLE = ModelShard(chunks=(range(4),), has_embedding=True, has_head=True, tp_rank=0, tp_size=1)
H, Q, K, INNER = 32, 32, 16, 48


def local(element_bytes: int = 4, **changes: Any) -> LocalShape:
    return local_shape(replace(MODEL, **changes), WHOLE, sp=False, element_bytes=element_bytes)


@pytest.mark.parametrize("n_later", [0, 5])
def test_recorded_decode_steps_have_memory_of_their_own(n_later: int) -> None:
    load = Load(1, n_runs=2, n_rows=3, longest_row=12, prefill_tokens=30, n_prompt=10, n_later=n_later)
    plain, recorded = (generation_bytes(local(), load, kernels=kernels).activations for kernels in (Kernels(), ON_CUDA))
    a_step = 3 * generation_of_block(local(), 0, 4, ON_CUDA)
    record = 2 * 3 * (2 * H + 64) * 4 + a_step + GRAPH_POOL
    # rows that begin later are prefilled beside the records of earlier steps
    assert recorded == (plain if n_later else a_step) + record
    moe = local(moe=MoEConfig(4, 2, 16))  # the host waits for groups in float32
    assert generation_bytes(moe, load, kernels=ON_CUDA) == generation_bytes(moe, load, kernels=Kernels())
    half = replace(local(), tp_size=2)
    assert generation_bytes(half, load, kernels=ON_CUDA) == generation_bytes(half, load, kernels=Kernels())


def test_records_with_large_tensors_take_whole_segments() -> None:
    load = Load(1, n_runs=1, longest_row=12, prefill_tokens=30, n_prompt=10)
    rows = [generation_bytes(local(), replace(load, n_rows=n), kernels=ON_CUDA).activations for n in (2730, 2731)]
    a_row = generation_of_block(local(), 0, 4, ON_CUDA)
    a_step = 2731 * a_row
    assert rows[0] == pytest.approx(2 * 2730 * a_row + 2730 * (2 * H + 64) * 4 + GRAPH_POOL)
    assert rows[1] == a_step + 2731 * (2 * H + 64) * 4 + math.ceil(a_step / CUDA_SEGMENT) * CUDA_SEGMENT + GRAPH_POOL


@pytest.mark.parametrize("gated", [True, False])
def test_matrices_with_an_adapter_are_copies(gated: bool) -> None:
    def copied(*targets: str) -> int:
        lora = LoRA(2, 4.0, targets) if targets else None
        here = local(2, dtype="bfloat16", lora=lora, gated_mlp=gated)
        return generation_bytes(here, Load(1), kernels=ON_CUDA).weights

    assert copied("up") - copied() == (0 if gated else 4 * INNER * H * 2)  # gate and up are joined in any case
    assert copied("down") - copied() == 4 * INNER * H * 2
    assert copied("o") - copied() == 4 * Q * H * 2


def test_keys_and_values_are_repeated_where_sequences_are_padded() -> None:
    def grown(here: LocalShape) -> float:
        return kept_by_block(here, 0, ON_CUDA) - kept_by_block(here, 0, Kernels())

    assert grown(local()) == 2 * (Q - K) * 4
    assert grown(local(2, dtype="bfloat16")) == 0  # FlashAttention groups heads
    assert grown(local(score_softcap=30.0)) == 0  # scores have groups of their own


def test_norms_with_an_offset_keep_float32() -> None:
    plain, offset = (local(2, dtype="bfloat16", norm_offset=has_offset) for has_offset in (False, True))
    assert kept_by_block(offset, 0, ON_CUDA) - kept_by_block(plain, 0, ON_CUDA) == 2 * H * 2
    assert backward_of_norm(offset, ON_CUDA) - backward_of_norm(plain, ON_CUDA) == 2 * H * 4
    load = Load(1, 10, 10)
    assert kept_by_ends(offset, load, 10, ON_CUDA) - kept_by_ends(plain, load, 10, ON_CUDA) == 10 * H * 2
    heads = [replace(here, model=replace(here.model, qk_norm="head")) for here in (plain, offset)]
    assert kept_by_block(heads[1], 0, ON_CUDA) - kept_by_block(heads[0], 0, ON_CUDA) == (2 * H + Q + K) * 2
    wide = local(norm_offset=True)
    assert kept_by_block(wide, 0, ON_CUDA) == kept_by_block(local(), 0, ON_CUDA)


def test_sums_of_biases() -> None:
    """Bytes seen on an H200: 44 MiB for 1,384 tokens of 4,096 inner units, 128 MiB for 4,048."""
    wide = local(2, dtype="bfloat16", gated_mlp=False, mlp_bias=True)
    wide = replace(wide, inner=4096)
    for n_tokens, seen in ((1384, 44 << 20), (4048, 128 << 20)):
        passing = n_tokens * (2 * H + 4096) * 2
        assert backward_of_biases(wide, 0, n_tokens, ON_CUDA) == passing + seen
        assert backward_of_biases(wide, 0, n_tokens, Kernels()) == 0
    n_tokens = 1 << 16
    assert backward_of_biases(wide, 0, n_tokens, ON_CUDA) == n_tokens * (2 * H + 4096) * 2 + BIAS_SUM
    adapted = replace(wide, model=replace(wide.model, lora=LoRA(2, 2.0, ("up",))))
    assert backward_of_biases(adapted, 0, n_tokens, ON_CUDA) == 0  # biases are frozen
    attention = local(2, dtype="bfloat16", attention_bias=True)
    freed = (3 + 1) * INNER
    assert backward_of_biases(attention, 0, 64, ON_CUDA) == max(0, 64 * (2 * H + Q + 2 * K - freed) * 2 + 8 * Q * 64)


def test_a_training_step_counts_sums_of_biases_in_its_blocks() -> None:
    biased, load = replace(local(2, dtype="bfloat16", gated_mlp=False, mlp_bias=True), inner=4096), Load(8, 4048, 4048)
    with_sums, without = (
        training_bytes(biased, load, n_in_flight=1, checkpointing=False, kernels=kernels)
        for kernels in (ON_CUDA, replace(ON_CUDA, splits_sums=False))
    )
    assert with_sums.block - without.block == with_sums.last - without.last == 128 << 20
    assert with_sums.head == without.head

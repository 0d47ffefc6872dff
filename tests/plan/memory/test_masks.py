"""Attention masks, and what else a pass holds beside its blocks."""

from __future__ import annotations

from dataclasses import replace

from realrl.plan.memory.formulas.blocks import scores_of_block
from realrl.plan.memory.formulas.ends import backward_of_last_norm, kept_by_ends
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.formulas.masks import fork_masks, prompt_masks
from realrl.plan.memory.formulas.passes import inference_activations, training_activations, training_bytes
from realrl.plan.memory.load import Load
from realrl.plan.parameters.shards import ModelShard
from tests.plan.memory.examples import LOAD, MODEL, local

PADS = Kernels(shares_prompts=True, float_attention=True)  # joins sequences of similar length
WINDOWED = replace(MODEL, sliding_window=6, windowed_layers=(0, 2, 3))


def training(model, load, *, checkpointing=False, n_in_flight=1):
    return training_bytes(local(model), load, n_in_flight=n_in_flight, checkpointing=checkpointing, kernels=PADS)


def test_a_windows_mask_is_shared_and_its_floats_are_each_blocks_own():
    load = replace(LOAD, longest_row=20, n_sequences=1)
    plain, windowed = (inference_activations(local(m), load, n_again=0, kernels=PADS) for m in (MODEL, WINDOWED))
    assert windowed - plain == 20 * 20 * (1 + 4)
    kept = training(WINDOWED, load).block - training(MODEL, load).block
    assert kept == 20 * 20 * (1 + 3 * 4)  # of three blocks
    two = training(WINDOWED, load, n_in_flight=2).block - training(MODEL, load, n_in_flight=2).block
    assert two == 2 * kept
    again = training(WINDOWED, load, checkpointing=True).block - training(MODEL, load, checkpointing=True).block
    assert again == 20 * 20 * (1 + 4)
    wide = replace(WINDOWED, sliding_window=20)  # hides nothing
    assert training(wide, load) == training(MODEL, load)
    counts = [
        inference_activations(local(replace(m, dtype="bfloat16")), load, n_again=0, kernels=Kernels())
        for m in (MODEL, WINDOWED)
    ]
    assert counts[0] == counts[1]  # that kernel takes the window as a number


def test_groups_of_other_lengths_have_masks_of_their_own():
    load = replace(LOAD, longest_row=20)
    one, three = (
        inference_activations(local(WINDOWED), padded, n_again=0, kernels=PADS)
        - inference_activations(local(), padded, n_again=0, kernels=PADS)
        for padded in (load, replace(load, n_padded=3 * 20))
    )
    assert three == 3 * one


def test_masks_for_common_prompts_are_there_for_each_window():
    load = replace(LOAD, longest_row=20, n_tail=5)
    assert fork_masks(local(WINDOWED), load, 40, PADS) == 2 * fork_masks(local(), load, 40, PADS) > 0
    assert fork_masks(local(WINDOWED), load, 0, PADS) == 0


def test_a_prefill_has_masks_of_its_longest_prompt():
    load = Load(1, n_runs=1, n_rows=3, longest_row=90, prefill_tokens=30, n_prompt=10)
    assert prompt_masks(local(WINDOWED), load, 4, Kernels()) == 10 * 10 * (1 + 4)
    assert prompt_masks(local(), load, 4, Kernels()) == 0
    assert prompt_masks(local(WINDOWED), load, 4, Kernels(fused_heads=4)) == 0
    capped = replace(WINDOWED, score_softcap=50.0)
    assert prompt_masks(local(capped), load, 4, Kernels()) == (2 + 1) * 10 * 10
    assert (
        generation_bytes(local(WINDOWED), load, kernels=Kernels()).activations
        - generation_bytes(local(), load, kernels=Kernels()).activations
        == 10 * 10 * 5
    )


def test_short_rows_need_more_for_values_than_for_scores():
    capped, load = local(replace(MODEL, score_softcap=50.0)), replace(LOAD, longest_row=3)
    a_head, a_query = capped.n_heads * 3 * 4, capped.queries * 4
    assert scores_of_block(capped, load, Kernels())[1] == 2 * a_head + 3 * a_query + 2 * 3


def test_the_gradient_of_a_tied_head_waits_while_the_last_norm_gets_its():
    load, here = replace(LOAD, n_mbs=2, n_scored=1), local(replace(MODEL, vocab_size=1024, tied_embeddings=True))
    head, _, kept = training_activations(
        here, load, n_tokens=64, n_in_flight=1, checkpointing=False, kernels=Kernels(fused_norms=False)
    )
    kept -= kept_by_ends(here, load, 64, Kernels(fused_norms=False))
    assert head == kept + 64 * backward_of_last_norm(here, Kernels(fused_norms=False)) + 1024 * 32 * 4


def test_what_came_from_another_stage_stays_beside_later_blocks():
    load = Load(1, n_runs=2, n_rows=3, longest_row=12, prefill_tokens=30, n_prompt=10)

    def activations(chunks, n_chunks=1, has_embedding=False):
        shard = ModelShard(chunks=chunks, has_embedding=has_embedding, has_head=False, tp_rank=0, tp_size=1)
        here = local_shape(MODEL, shard, sp=False, element_bytes=4)
        return generation_bytes(here, load, kernels=Kernels(), n_chunks=n_chunks).activations

    first = activations((range(2),), has_embedding=True)
    assert activations((range(2, 4),)) - first == 30 * 32 * 4
    assert activations((range(3, 4),)) == first  # the only block reads it
    assert activations((range(1), range(2, 3)), 2, True) == first
    assert activations((range(2), range(2, 4)), 2, True) - first == 30 * 32 * 4

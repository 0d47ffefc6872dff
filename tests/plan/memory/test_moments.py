"""Moments of calls at which memory is fullest, each by what it adds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from realrl.config.policy_options import PPOOptions
from realrl.config.schema import GenerationConfig
from realrl.graph.mfc import InterfaceRef
from realrl.plan.hooks import CallHooks, Offload
from realrl.plan.memory.buffers import CALL_ROW_BYTES, PASS_ROW_BYTES
from realrl.plan.memory.cuts import CutModel
from realrl.plan.memory.formulas.blocks import (
    backward_of_block,
    expert_matrix,
    forward_of_block,
    generation_of_block,
    kept_by_block,
    padding_of_attention,
    scores_of_block,
)
from realrl.plan.memory.formulas.ends import backward_of_head, scalar_floats
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.formulas.passes import (
    forward_bytes,
    stage_training_bytes,
    training_bytes,
)
from realrl.plan.memory.load import Load, RowLengths, load_of
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.optimizer import reduction_bytes
from realrl.plan.memory.plan import SAVE
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.shards import ModelShard, whole_shard
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.plan.pipeline import InFlight
from realrl.shape import LoRA, MoEConfig
from tests.plan.memory.examples import (
    GENERATE,
    INFERENCE,
    LOAD,
    MODEL,
    N_BYTES,
    ROWS,
    TABLE,
    TRAIN,
    VECTORS,
    call,
    local,
    mfc,
    place,
    role,
)


def training(model=MODEL, *, load=LOAD, n_in_flight=1, shard=None, kernels=None, sp=False):
    here = local_shape(model, shard or whole_shard(model), sp=sp, element_bytes=DTYPE_BYTES[model.dtype])
    return training_bytes(here, load, n_in_flight=n_in_flight, checkpointing=False, kernels=kernels or Kernels())


def test_adapters_keep_their_inner_activations():
    adapted = replace(MODEL, lora=LoRA(3, 3.0, ("q", "o", "gate", "down")))
    assert kept_by_block(local(adapted), 0, Kernels()) == kept_by_block(local(), 0, Kernels()) + 4 * 3 * 4


def test_frozen_layers_without_an_adapter_need_no_input_for_their_gradients():
    def bytes_of(*targets, **changes):
        here = local(replace(MODEL, lora=LoRA(0, 1.0, targets), **changes))
        return [find(here, 0, Kernels()) for find in (kept_by_block, backward_of_block, forward_of_block)]

    everything = bytes_of("q", "k", "v", "o", "gate", "up", "down")
    others = bytes_of("k", "o", "up", "down"), bytes_of("o", "gate", "down"), bytes_of("q", "o", "gate")
    kept, backward, forward = zip(everything, *others, strict=True)
    assert kept[1] == kept[0]
    assert kept[0] - kept[2] == 32 * 4  # what the norm before attention gives
    assert kept[0] - kept[3] == 48 * 4  # the input of the MLP's last matrix
    assert (backward[2] - backward[0], backward[3] - backward[0]) == (0, 48 * 4)  # the other gradients go on without it
    assert (forward[0] - forward[1], forward[0] - forward[2]) == (48 * 4, 0)  # an adapter's part of the gate
    plain = bytes_of("q", "gate", gated_mlp=False)[0]
    assert bytes_of("q", "gate", "down", gated_mlp=False)[0] - plain == 48 * 4


def test_rows_are_there_between_the_passes():
    found = training(load=Load(4, 10, 10, n_held=40))
    assert found.rows == 40 * CALL_ROW_BYTES + 10 * PASS_ROW_BYTES + VECTORS
    few = plan_memory({"actor": role("d2")}, [call(TRAIN, "d2", load=Load(1, 1, 1, n_held=9))]).calls["call"][0]
    assert (few.gradients, few.activations) == (2 * N_BYTES, PASS_ROW_BYTES + 9 * CALL_ROW_BYTES + VECTORS)


def test_a_second_gradient_of_the_embedding():
    """It is made before it is added to that of the head, or of an earlier micro-batch."""
    table = 64 * 32 * 4
    once = training().embedding
    assert training(replace(MODEL, tied_embeddings=True)).embedding == once + 2 * table  # that, and the sum
    assert training(load=replace(LOAD, n_mbs=2)).embedding == once + table
    assert training(replace(MODEL, tied_embeddings=True), load=replace(LOAD, n_mbs=2)).embedding == once + 3 * table
    adapters = 4 * 2 * (32 + 32) * 4
    assert training(replace(MODEL, lora=LoRA(2, 2.0, ("q",)), tied_embeddings=True)).embedding == once + adapters


def test_micro_batches_in_flight_are_there_until_their_own_backward_pass():
    first = ModelShard(chunks=(range(2),), has_embedding=True, has_head=False)
    load = replace(LOAD, n_mbs=4)
    one, three = (training(load=load, n_in_flight=n, shard=first) for n in (1, 3))
    kept = 2 * 64 * 2 * kept_by_block(local(), 0, Kernels())
    for moment in ("head", "block", "last", "embedding"):
        assert getattr(three, moment) - getattr(one, moment) > kept


def test_micro_batches_in_flight_share_the_tokens_of_a_minibatch():
    rows = RowLengths([1] * 8, [10] * 8, [10] * 8)
    loads = [
        load_of(mfc(TRAIN, n_seqs=n, **cut), place("p4"), rows, generation=GenerationConfig(), n_responses=0)
        for n, cut in ((8, {"max_tokens_per_mb": 75}), (8, {"n_mbs": 4}), (5, {"n_mbs": 4}))
    ]
    assert [(load.n_tokens, load.n_mbs) for load in loads] == [(70, 2), (20, 4), (20, 4)]
    assert [[load.at_once(n) for n in (1, 2, 4)] for load in loads] == [[1, 8 / 7, 8 / 7], [1, 2, 4], [1, 2, 2.5]]
    assert LOAD.at_once(3) == 3  # nothing is known of a minibatch
    first = ModelShard(chunks=(range(2),), has_embedding=True, has_head=False)
    found = [
        stage_training_bytes(
            [local_shape(MODEL, first, sp=False, element_bytes=4)],
            replace(LOAD, n_mbs=2, n_largest=n),
            [InFlight((2,), 0)],
            checkpointing=False,
            kernels=Kernels(),
        )
        for n in (None, 2.0, 1.5, 1.0)
    ]
    assert found[0] == found[1]
    kept = 64 * 2 * kept_by_block(local(), 0, Kernels())
    assert found[1].last - found[2].last == pytest.approx(found[2].last - found[3].last, abs=VECTORS)
    assert found[1].last - found[3].last > kept


def test_messages_of_a_pipeline_wait_for_each_other():
    first, last = (
        local_shape(
            MODEL, ModelShard(chunks=(range(2),), has_embedding=n == 0, has_head=n == 1), sp=False, element_bytes=4
        )
        for n in (0, 1)
    )
    sizes = [
        [forward_bytes(stage, replace(LOAD, n_mbs=n), kernels=Kernels()) for n in (1, 2, 4, 5, 9)]
        for stage in (first, last)
    ]
    message = 64 * 32 * 4
    assert [n - sizes[0][0] for n in sizes[0]] == [0, message, 3 * message, 4 * message, 4 * message]
    assert [n - sizes[1][0] for n in sizes[1]] == [0] * 5


def test_gradients_that_tensor_ranks_add_up():
    assert reduction_bytes(1000, 10, dp=1, partial=300) == 300
    assert reduction_bytes(1000, 10, dp=2, partial=300) == 1000
    kinds = {text: CutModel(MODEL).cut(place(text).strategy).kinds[0] for text in ("d1", "t4", "t8")}
    vectors = 2 * 4 * 32 + 32  # two norms of each block, and the last one
    assert [kinds[text].partial(sp=False) for text in kinds] == [0, 0, 4 * 2 * 16 * 32]
    assert [kinds[text].partial(sp=True) for text in ("t4", "t8")] == [vectors, vectors + 4 * 2 * 16 * 32]


def test_tensors_that_collectives_may_hold():
    shard = ModelShard(chunks=(range(4),), has_embedding=True, has_head=True, tp_rank=0, tp_size=2)
    half = local_shape(replace(MODEL, head="value"), shard, sp=False, element_bytes=4)
    alone = replace(half, tp_size=1)
    for n_bytes in (partial(backward_of_block, kernels=Kernels()), partial(forward_of_block, kernels=Kernels())):
        assert n_bytes(half, 0) == n_bytes(alone, 0) + 32 * 4


def test_experts_hold_inner_units_or_results_and_those_with_terms_more():
    plain = MoEConfig(n_experts=4, top_k=2, intermediate_size=48)
    biased, capped = replace(plain, biases=True), replace(plain, limit=7.0)
    inner, results, terms = (
        forward_of_block(local(replace(MODEL, moe=moe)), 0, Kernels())
        for moe in (plain, replace(plain, intermediate_size=1), biased)
    )
    assert inner - results == 2 * (32 + 3 * 48 - 2 * 32) * 4  # of each slot
    assert terms - inner == 2 * (48 + 2 * 4) * 4  # and which expert a slot has
    assert terms == forward_of_block(local(replace(MODEL, moe=capped)), 0, Kernels())
    trained, frozen = (
        kept_by_block(local(replace(MODEL, moe=biased, lora=lora)), 0, Kernels(fused_norms=True))
        for lora in (None, LoRA(0, 1.0, ("q", "o")))
    )
    # inputs of matrices that are not trained are not kept, nor that of the router
    assert trained - frozen == (2 * (32 + 48) + 32) * 4
    whole, adapted = (
        backward_of_block(local(replace(MODEL, moe=plain, lora=lora)), 0, Kernels())
        for lora in (None, LoRA(0, 1.0, ()))
    )
    assert adapted - whole == 2 * 48 * 4  # nothing of its size goes when the backward pass is in the experts


def test_scores_are_there_while_a_block_attends_and_not_with_its_mlp():
    capped, sinks = replace(MODEL, score_softcap=50.0), replace(MODEL, sinks=True)
    load = replace(LOAD, longest_row=1000)
    a_head, beside = local().n_heads * 1000 * 4, 2 * local().queries * 4 + 2 * 1000
    assert scores_of_block(local(), load, Kernels()) == (0, 0, 0)
    keys, masks, gradient = 2 * local().keys * 4, 2 * 1000, 2 * 32 * 4  # the gradient of rows, there and to be added
    # with sinks they are joined once more; with bounds these are kept
    joined = scores_of_block(local(sinks), load, Kernels())
    assert joined == (a_head, 4 * a_head + beside, 3 * a_head + keys + gradient + masks)
    found = scores_of_block(local(capped), load, Kernels(), padding=1.5)
    assert found[:2] == (1.5 * 2 * a_head, 1.5 * (3 * a_head + beside))
    assert found[2] == 1.5 * (2 * a_head + max(keys, local().queries * 4) + masks) + gradient
    half = local_shape(replace(MODEL, sinks=True, dtype="bfloat16"), whole_shard(MODEL), sp=False, element_bytes=2)
    assert scores_of_block(half, load, Kernels())[0] == 1.5 * a_head  # weights in the dtype of the values, too
    assert scores_of_block(half, load, Kernels(float_attention=True))[0] == a_head
    wide = scores_of_block(local(sinks), replace(load, longest_row=1), Kernels())[2]
    assert wide == (1 * 8 + 2 * 32 + 2 * 16) * 4 + gradient + 2  # values of all heads, and the result
    few, many = (forward_of_block(local(sinks), 0, Kernels(), scores=scores) for scores in (1.0, 4.0 * a_head))
    assert few == forward_of_block(local(sinks), 0, Kernels())
    assert 4 * a_head < many < 4 * a_head + few


def test_norms_behind_a_layer_and_of_heads():
    half = replace(local(replace(MODEL, norm_place="both")), element_bytes=2, inner=1)
    before = replace(half, model=MODEL)
    assert backward_of_block(half, 0, Kernels(fused_norms=False)) == 2 * 32 * 2 + 5 * 32 * 4
    assert backward_of_block(before, 0, Kernels(fused_norms=False)) == (2 * 32 + 2) * 2
    usual, behind, of_heads, two_tables = (
        generation_of_block(local(replace(MODEL, **changes)), 0, 4, Kernels(fused_heads=4))
        for changes in ({}, {"norm_place": "after"}, {"qk_norm": "head"}, {"local_rope_theta": 1e4})
    )
    assert behind - usual == 32 * 4
    assert of_heads - usual == (local().queries + 2 * local().keys) * 4
    assert two_tables - usual == 2 * MODEL.head_dim * 4
    shard = replace(whole_shard(MODEL), tp_size=2)
    joint = local_shape(replace(MODEL, qk_norm="all"), shard, sp=False, element_bytes=2)
    alone, floats = replace(joint, tp_size=1), Kernels(fused_norms=False)
    more = kept_by_block(joint, 0, floats) - kept_by_block(alone, 0, floats)
    assert more == (joint.queries + joint.keys) * 4  # ranks add up squares of a further copy
    fused = kept_by_block(joint, 0, Kernels()) - kept_by_block(alone, 0, Kernels())
    assert fused == (joint.queries + joint.keys) * (3 * 4 - 2)


def test_rows_that_end_already_leave_room_for_more_in_a_micro_batch():
    rows = RowLengths([4] * 8, [16] * 8, [8] * 8, n_sequences=2)
    made = mfc(TRAIN, n_seqs=8, interface_impl=InterfaceRef("reward_model"), max_tokens_per_mb=32)
    found = load_of(made, place("d1"), rows, generation=GenerationConfig(), n_responses=0)
    assert (found.n_tokens, found.n_samples, found.longest_row) == (32, 2, 9)


def test_prompts_that_wait_for_rows_and_drawing_from_logits():
    load = Load(1, n_runs=1, n_rows=3, longest_row=7, prefill_tokens=1)
    made = generation_bytes(local(), load, kernels=Kernels())
    waiting = generation_bytes(local(), replace(load, n_waiting=5), kernels=Kernels())
    assert waiting.cache - made.cache == (2 * 4 * 16 * 5 + 64) * 4
    drawn = [
        generation_bytes(local(replace(MODEL, vocab_size=6400)), load, kernels=Kernels(fused_sampling=True)).activations
        for load in (load, replace(load, is_filtered=True))
    ]
    assert drawn == [2 * 3 * 6400 * 4, 4 * 3 * 6400 * 4]
    generation = GenerationConfig(max_new_tokens=4, max_batch_size=6, top_k=3)
    held, all_there = (
        load_of(mfc(GENERATE, n_seqs=n), place("d1"), ROWS, generation=generation, n_responses=3) for n in (4, 2)
    )
    assert (held.n_waiting, all_there.n_waiting, held.is_filtered) == (9, 0, True)


def test_a_last_save_leaves_what_came_back_for_it():
    roles = {"actor": role(), "ema": role(is_trained=False, is_changed=True)}
    calls = [call(INFERENCE, name="inf", of="ema", hooks=CallHooks(after=(Offload("ema", place("d1")),))), call(TRAIN)]
    kept, copied = (
        plan_memory(roles, calls, saves=Saves(is_staged=False, is_repeated=is_repeated)).calls[SAVE][0]
        for is_repeated in (False, True)
    )
    assert kept.host == N_BYTES
    assert copied.host == N_BYTES + 2 * N_BYTES + TABLE  # with the actor's moments, and a tensor on its way


def test_sequences_of_different_lengths_are_padded_in_attention():
    generation = GenerationConfig(max_new_tokens=4, min_new_tokens=4)

    def loads(rows, **changes):
        made = mfc(INFERENCE, n_seqs=3, input_keys=("input_ids",))
        return load_of(made, place("d1"), rows, generation=replace_settings(generation, changes), n_responses=1)

    even, uneven = RowLengths([9] * 3, [9] * 3, [9] * 3), ROWS
    assert (loads(even).n_padded, loads(uneven).n_padded) == (0, 3 * 13)
    assert loads(even, min_new_tokens=1).n_padded == 3 * 13  # some responses may end early
    found = padding_of_attention(local(), loads(uneven), Kernels())
    assert found == 3 * 13 / (5 + 3 + 9 + 3 * 4)
    assert padding_of_attention(local(), loads(even), Kernels()) == 0
    half = local_shape(replace(MODEL, dtype="bfloat16"), whole_shard(MODEL), sp=False, element_bytes=2)
    assert padding_of_attention(half, loads(uneven), Kernels()) == 0  # whose kernel reads the tokens in their place
    narrow = replace(half, hidden=1, inner=1, queries=32, keys=16)  # attention alone counts
    on_cpu = Kernels(float_attention=True, fused_norms=True)
    plain, padded = (forward_of_block(narrow, 0, on_cpu, padding) for padding in (0.0, 1.5))
    # sums of exponentials, and two tables, and the input with its norm
    assert plain == 64 * 2 + 64 * 4 + 32 * 4 + 8 * 4 + 2 * 2 + 2 * 4 * 2
    assert padded - plain == 1.5 * (64 + 2 * 32) * 4 - (64 + 32 + 8) * 4  # results of all groups are joined


def replace_settings(generation, changes):
    return GenerationConfig(**{**generation.model_dump(), **changes})


def test_norms_of_half_precision_compute_on_copies_in_float32():
    narrow = replace(local(), inner=1, queries=1, keys=1, n_heads=1, n_kv_heads=1)
    half = replace(narrow, element_bytes=2)
    assert (
        forward_of_block(half, 0, Kernels(fused_norms=False)) == 2 * 32 * 2 + 3 * 32 * 4 + 2 * 4 * 2
    )  # and two tables
    assert forward_of_block(half, 0, Kernels()) < forward_of_block(narrow, 0, Kernels())


def test_norms_of_queries_compute_on_copies_in_float32():
    plain, of_heads = (
        replace(local(replace(MODEL, qk_norm=kind)), hidden=1, inner=1, element_bytes=2) for kind in (None, "head")
    )
    rest = (2 + 2 * 4) * 2  # the input with its norm, and two tables
    assert forward_of_block(of_heads, 0, Kernels(fused_norms=False)) == (32 + 2 * 16) * 2 + 3 * 32 * 4 + rest
    assert forward_of_block(of_heads, 0, Kernels()) == forward_of_block(plain, 0, Kernels())


def test_a_norm_behind_the_mlp_has_its_input_beside_what_comes_before_it():
    sizes = {"inner": 1, "queries": 1, "keys": 1, "n_heads": 1, "n_kv_heads": 1, "element_bytes": 2}
    before, after, both = (
        forward_of_block(replace(local(replace(MODEL, norm_place=where)), **sizes), 0, Kernels(fused_norms=False))
        for where in ("before", "after", "both")
    )
    # the MLP's result behind the block's input and the sum after attention; and the MLP's own input
    assert (after - before, both - after) == (32 * 2, 32 * 2)


def test_sums_of_ranks_with_rows_of_their_own_are_padded_and_cut():
    shard = ModelShard(chunks=(range(4),), has_embedding=True, has_head=True, tp_rank=0, tp_size=2)
    whole, rows = (local_shape(MODEL, shard, sp=sp, element_bytes=4) for sp in (False, True))
    # two more sums and half the rows that come, half the rows that three tensors have no more, and those gathered
    expected = 2 * 32 + 32 // 2 - 3 * 32 // 2 + 32
    assert forward_of_block(rows, 0, Kernels()) - forward_of_block(whole, 0, Kernels()) == expected * 4


def test_answers_are_further_sequences_that_a_policy_learns():
    rows = RowLengths([5, 3], [5, 3], [5, 3], answers=[7, 2])
    actor = mfc(TRAIN, n_seqs=2, interface_impl="ppo_actor", input_keys=("input_ids", "metadata"))
    generation = GenerationConfig(max_new_tokens=4, min_new_tokens=4)
    plain, learning = (
        load_of(actor, place("d1"), rows, generation=generation, n_responses=2, algorithm=PPOOptions(ptx_coef=weight))
        for weight in (0.0, 0.5)
    )
    assert learning.n_tokens - plain.n_tokens == 5 + 7 + 3 + 2
    assert learning.n_scored - plain.n_scored == 7 + 2
    assert (learning.n_sequences, learning.longest_row, learning.n_tail) == (3, 12, 7)


def test_merged_matrices_are_there_while_the_last_mlp_is_packed():
    load = Load(1, n_runs=1, n_rows=1, longest_row=2, prefill_tokens=1)

    def activations(kernels, *, dtype_bytes=4, **changes):
        """Without a head, which is packed later, and with the cache, which is made later."""
        stage = replace(local(replace(MODEL, **changes)), vocabulary=0, has_head=False, element_bytes=dtype_bytes)
        made = generation_bytes(stage, load, kernels=kernels)
        return made.activations + made.cache

    packing, matrix = Kernels(packs_weights=True), 32 * 48
    both, down = LoRA(2, 2.0, ("up", "down")), LoRA(2, 2.0, ("down",))
    assert activations(packing) < matrix * 4  # nothing is merged
    assert activations(packing, lora=both) == 2 * matrix * 4
    assert activations(packing, lora=down) == matrix * 4
    assert activations(Kernels(), lora=both) == matrix * 4  # the other one stays as it is
    assert activations(packing, dtype_bytes=2, lora=both) == matrix * (2 + 4 + 4 - 2)  # one is merged in float32


def test_a_loss_without_entropies_keeps_one_copy_of_logits_backward():
    scored = Load(1, 64, 64)
    one, two = (
        backward_of_head(local(), replace(scored, trains_entropy=trains), Kernels()) for trains in (False, True)
    )
    assert two - one == 64 * 64 * 4
    adapted = local(replace(MODEL, lora=LoRA(2, 2.0, ("q",))))
    summed = replace(scored, n_mbs=2)
    assert backward_of_head(local(), summed, Kernels()) - backward_of_head(adapted, summed, Kernels()) == TABLE


def test_scalar_heads_convert_all_tokens():
    half = replace(local(replace(MODEL, head="value")), element_bytes=2, vocabulary=0)
    assert scalar_floats(half, Load(1, 64)) == 64 * 32 * 4
    assert scalar_floats(replace(half, element_bytes=4), Load(1, 64)) == 0


def test_a_router_keeps_weights_and_places_of_slots():
    """Probabilities of four experts and a sum; of each of two slots two weights, and three numbers of eight bytes."""
    moe = MoEConfig(n_experts=4, top_k=2, intermediate_size=24)
    experts = replace(MODEL, moe=moe)
    slot, dense = 32 + 5 * 24, 4 * 48
    for width in (2, 4):
        found = kept_by_block(replace(local(experts), element_bytes=width), 0, Kernels())
        plain = kept_by_block(replace(local(), element_bytes=width), 0, Kernels())
        assert found - plain == (2 * slot - dense) * width + 4 * 4 + 4 + 2 * (4 + width + 3 * 8)


def test_the_gradient_of_one_expert_goes_into_that_of_all():
    experts = replace(MODEL, moe=MoEConfig(n_experts=4, top_k=2, intermediate_size=24))
    more = replace(experts, moe=replace(experts.moe, n_experts=8))
    one, two = (training(model, load=replace(LOAD, n_mbs=2)) for model in (experts, more))
    assert expert_matrix(local(experts)) == expert_matrix(local(more)) == 24 * 32
    assert two.last - one.last == 4 * 24 * 32 * 4 + 4 * LOAD.n_tokens * 4  # experts, and the router's probabilities


def test_a_buffer_of_gradients_may_be_there_while_they_go_to_the_host():
    few = replace(LOAD, n_tokens=1, n_scored=1)
    usages = [
        plan_memory(
            {"actor": role("d2", offloads_optimizer=True)}, [call(TRAIN, "d2", load=few)], kernels=Kernels(on_host=True)
        ).calls["call"][0]
    ]
    assert [(usage.gradients, usage.host) for usage in usages] == [(2 * N_BYTES, 3 * N_BYTES + N_BYTES)]


def test_a_last_save_copies_only_what_is_merged_and_on_the_first_replica():
    adapted = replace(MODEL, lora=LoRA(2, 2.0, ("q",)))
    saves = Saves(is_staged=False, is_repeated=False)
    plan = plan_memory({"actor": role("d2", model=adapted, is_changed=True)}, [call(TRAIN, "d2")], saves=saves)
    first, second = (plan.calls[SAVE][rank] for rank in (0, 1))
    assert (first.host, second.host) == (4 * 32 * 32 * 4, 0)  # of four blocks
    assert (first.copies, second.copies) == (32 * 32 * 4, 0)

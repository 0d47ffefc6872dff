"""Moments of calls at which memory is fullest, each by what it adds."""

from __future__ import annotations

from dataclasses import replace

from realrl.config.schema import GenerationConfig
from realrl.mesh.notation import parse_allocation
from realrl.plan.hooks import CallHooks, Offload
from realrl.plan.memory.buffers import CALL_ROW_BYTES, PASS_ROW_BYTES
from realrl.plan.memory.cuts import CutModel
from realrl.plan.memory.formulas.blocks import backward_of_block, forward_of_block, kept_by_block
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.formulas.passes import forward_bytes, training_bytes
from realrl.plan.memory.load import Load, load_of
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.moves import lacking
from realrl.plan.memory.optimizer import reduction_bytes
from realrl.plan.memory.plan import SAVE
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.shards import ModelShard, whole_shard
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.shape import LoRA
from tests.plan.memory.examples import (
    GENERATE,
    INFERENCE,
    LOAD,
    MODEL,
    N_BYTES,
    NODE,
    ROWS,
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
    adapted = replace(MODEL, lora=LoRA(3, 3.0, ("q", "v", "down")))
    assert kept_by_block(local(adapted), 0, Kernels()) == kept_by_block(local(), 0, Kernels()) + 3 * 3 * 4


def test_rows_are_there_between_the_passes():
    found = training(load=Load(4, 10, 10, n_held=40))
    assert found.rows == 40 * CALL_ROW_BYTES + 10 * PASS_ROW_BYTES + VECTORS
    few = plan_memory({"actor": role("d2")}, [call(TRAIN, "d2", load=Load(1, 1, 1, n_held=9))]).calls["call"][0]
    assert (few.gradients, few.activations) == (2 * N_BYTES, PASS_ROW_BYTES + 9 * CALL_ROW_BYTES + VECTORS)


def test_a_second_gradient_of_the_embedding():
    """It is made before it is added to that of the head, or of an earlier micro-batch."""
    table = 64 * 32 * 4
    once = training().embedding
    assert training(replace(MODEL, tied_embeddings=True)).embedding == once + table
    assert training(load=replace(LOAD, n_mbs=2)).embedding == once + table
    assert training(replace(MODEL, tied_embeddings=True), load=replace(LOAD, n_mbs=2)).embedding == once + 2 * table
    adapters = 4 * 2 * (32 + 32) * 4
    assert training(replace(MODEL, lora=LoRA(2, 2.0, ("q",)), tied_embeddings=True)).embedding == once + adapters


def test_micro_batches_in_flight_are_there_until_their_own_backward_pass():
    first = ModelShard(layers=range(2), has_embedding=True, has_head=False)
    load = replace(LOAD, n_mbs=4)
    one, three = (training(load=load, n_in_flight=n, shard=first) for n in (1, 3))
    kept = 2 * 64 * 2 * kept_by_block(local(), 0, Kernels())
    for moment in ("head", "block", "last", "embedding"):
        assert getattr(three, moment) - getattr(one, moment) > kept


def test_messages_of_a_pipeline_wait_for_each_other():
    first, last = (
        local_shape(
            MODEL, ModelShard(layers=range(2), has_embedding=n == 0, has_head=n == 1), sp=False, element_bytes=4
        )
        for n in (0, 1)
    )
    sizes = [
        [forward_bytes(stage, replace(LOAD, n_mbs=n), kernels=Kernels()) for n in (1, 2, 4, 5, 9)]
        for stage in (first, last)
    ]
    message = 64 * 32 * 4
    assert [n - sizes[0][0] for n in sizes[0]] == [0, message, 3 * message, 4 * message, 4 * message]
    assert [n - sizes[1][0] for n in sizes[1]] == [0, message, message, message, message]


def test_gradients_that_tensor_ranks_add_up():
    assert reduction_bytes(1000, 10, dp=1, partial=300) == 300
    assert reduction_bytes(1000, 10, dp=2, partial=300) == 1000
    kinds = {text: CutModel(MODEL).cut(place(text).strategy).kinds[0] for text in ("d1", "t4", "t8")}
    vectors = 2 * 4 * 32 + 32  # two norms of each block, and the last one
    assert [kinds[text].partial(sp=False) for text in kinds] == [0, 0, 4 * 2 * 16 * 32]
    assert [kinds[text].partial(sp=True) for text in ("t4", "t8")] == [vectors, vectors + 4 * 2 * 16 * 32]


def test_tensors_that_collectives_may_hold():
    shard = ModelShard(layers=range(4), has_embedding=True, has_head=True, tp_rank=0, tp_size=2)
    half = local_shape(replace(MODEL, head="value"), shard, sp=False, element_bytes=4)
    alone = replace(half, tp_size=1)
    for n_bytes in (backward_of_block, lambda *args: forward_of_block(*args, Kernels())):
        assert n_bytes(half, 0) == n_bytes(alone, 0) + 32 * 4


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


def test_large_slices_of_a_move_arrive_in_their_place():
    large = CutModel(replace(MODEL, vocab_size=1 << 15))  # embedding and head have 4 MB each
    found = lacking(large, place("d1"), parse_allocation("d1@0:1", NODE))
    assert found.received - found.buffered == 2 * (1 << 15) * 32 * 4
    cut = lacking(large, place("d1"), parse_allocation("t2@0:2-3", NODE))
    assert (cut.received == cut.buffered).all()


def test_a_last_save_leaves_what_came_back_for_it():
    roles = {"actor": role(), "ema": role(is_trained=False, is_changed=True, is_averaged=True)}
    calls = [call(INFERENCE, name="inf", of="ema", hooks=CallHooks(after=(Offload("ema", place("d1")),))), call(TRAIN)]
    kept, copied = (
        plan_memory(roles, calls, saves=Saves(is_staged=False, is_repeated=is_repeated)).calls[SAVE][0]
        for is_repeated in (False, True)
    )
    assert kept.host == 2 * N_BYTES
    assert copied.host == 2 * N_BYTES + 2 * N_BYTES  # with the actor's moments

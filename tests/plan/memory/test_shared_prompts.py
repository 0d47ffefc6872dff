"""Memory of prompts that are computed once, of what their sequences keep, and of logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from realrl.config.policy_options import PPOOptions
from realrl.config.schema import GenerationConfig
from realrl.plan.memory.buffers import PASS_ROW_BYTES
from realrl.plan.memory.formulas.ends import backward_of_head, kept_by_ends
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.formulas.passes import inference_activations, kept_by_forks, training_bytes
from realrl.plan.memory.load import Load, RowLengths, load_of
from tests.plan.memory.examples import MODEL, TRAIN, local, mfc, place


def test_prompts_computed_once_need_copies_for_one_sample_at_a_time():
    load = Load(8, 8 * 4 * 20, n_sequences=4, longest_row=20, n_prompt=15, n_again=8 * 3 * 15, n_tail=5, n_samples=8)
    model = replace(MODEL, hidden_size=512)  # whose prompts are worth it
    wide = replace(local(model), hidden=1, inner=1, element_bytes=2)
    kernels = Kernels(shares_prompts=True, float_attention=True)
    found = inference_activations(wide, load, n_again=load.n_again, kernels=kernels)
    n_tokens, mask = load.n_tokens - load.n_again, 2 * 5 * 20
    copies = 2 * 16 * 4 * 20 + 3 * 32 * 4 * 5
    assert found == n_tokens * (2 * (2 + 8 + 64 + 2 * 32) + 4 * 64) + 4 * (copies + 2 * mask)  # one sample has more
    several = inference_activations(wide, replace(load, n_padded=8 * 4 * 21), n_again=load.n_again, kernels=kernels)
    assert several - found == 4 * (6 * mask + 64 * 4 * 5)  # a mask for each pair of lengths, and padded responses


def test_rows_of_all_sequences_are_there_until_the_head_is_through():
    load = Load(8, 8 * 4 * 20, n_sequences=4, longest_row=20, n_prompt=15, n_again=8 * 3 * 15, n_tail=5, n_samples=8)
    model, kernels = replace(MODEL, hidden_size=512), Kernels(shares_prompts=True)
    train = partial(training_bytes, local(model), n_in_flight=1, checkpointing=True, kernels=kernels)
    one, more = train(load), train(replace(load, n_tokens=load.n_tokens + 10, n_again=load.n_again + 10))
    behind, queries = 10 - 10 * 4 / 3, 32 * 4  # repeated tokens are those of prompts, once less than sequences
    of_forks = 10 * 2 * 16 * 4 + behind * queries  # keys and values of a block; queries whose order changes
    assert more.head - one.head == pytest.approx(10 * (PASS_ROW_BYTES + 512 * 4) + of_forks, abs=1)
    assert more.block - one.block == pytest.approx(10 * PASS_ROW_BYTES + of_forks, abs=1)
    assert more.last - one.last == more.block - one.block


def test_forks_keep_keys_and_values_of_whole_sequences():
    load = Load(8, 8 * 4 * 20, n_sequences=4, longest_row=20, n_prompt=15, n_again=8 * 3 * 15, n_tail=5, n_samples=8)
    of_row, whole, behind = 2 * 16 * 4, 8 * 4 * 20, 8 * 4 * 5
    kept = partial(kept_by_forks, n_again=load.n_again)
    assert kept(local(), load, kernels=Kernels()) == whole * of_row + behind * 32 * 4  # queries of two heads a key
    alone = local(replace(MODEL, n_kv_heads=8))
    assert kept(alone, load, kernels=Kernels()) == whole * 2 * 32 * 4
    # padded: each has as many tokens as the longest of its sample, and no more than all of them together
    uneven = replace(load, n_padded=1000, n_tail=8)
    assert kept(local(), uneven, kernels=Kernels()) == (whole - behind + 256) * of_row + 256 * 32 * 4
    scored = local(replace(MODEL, score_softcap=50.0))  # all heads have keys and values of their own
    assert kept(scored, load, kernels=Kernels()) == (whole - behind) * 2 * 32 * 4
    half = replace(scored, element_bytes=2)
    assert kept(half, load, kernels=Kernels()) == (whole - behind) * 32 * (4 + 2)
    assert kept_by_forks(local(), load, 0, Kernels()) == 0


def test_long_prompts_are_computed_once_beside_short_ones():
    prompts = [20] * 6 + [60, 64]
    rows = RowLengths(prompts, [2 * (p + 6) for p in prompts], [p + 6 for p in prompts], n_sequences=2)
    generation = GenerationConfig()
    load = load_of(mfc(TRAIN, n_seqs=8), place("d1"), rows, generation=generation, n_responses=0)
    assert (load.n_prompt, load.n_again) == (20, sum(prompts))
    assert load.longer == ((60, 124), (64, 64))
    assert [load.repeated(size) for size in (1024, 64, 32, 8)] == [sum(prompts), 124, 0, 0]
    many = RowLengths(range(1, 101), range(1, 101), range(1, 101), n_sequences=2)
    steps = load_of(mfc(TRAIN, n_seqs=8), place("d1"), many, generation=generation, n_responses=0).longer
    assert [length for length, _ in steps] == [13, 25, 38, 50, 62, 75, 87, 100]


def test_logits_of_answers_go_before_those_of_responses_come():
    rows = RowLengths([5] * 4, [5] * 4, [5] * 4, answers=[9] * 4)
    actor = mfc(TRAIN, n_seqs=4, interface_impl="ppo_actor", input_keys=("input_ids", "metadata"))
    generation = GenerationConfig(max_new_tokens=4, min_new_tokens=4)
    algorithm = PPOOptions(ptx_coef=0.5)
    load = load_of(actor, place("d1"), rows, generation=generation, n_responses=1, algorithm=algorithm)
    assert (load.n_scorings, load.n_scored, load.n_scored_apart, load.n_scored_once) == (2, 4 * 13, 4 * 9, 4 * 9)
    wide = local(replace(MODEL, vocab_size=6400))
    one = backward_of_head(wide, replace(load, n_scorings=1, n_scored=36, n_scored_apart=0), Kernels())
    table, gone = 6400 * 32 * 4, (52 - 36) * 6400 * 4
    assert table > gone
    assert backward_of_head(wide, load, Kernels()) == one + table - gone  # one gradient waits, and its logits are gone
    few = replace(load, n_scored=2, n_scored_apart=1)
    assert backward_of_head(wide, few, Kernels()) == 2 * table - 2 * 6400 * 4  # the sum of both gradients
    kept = [kept_by_ends(wide, one, 52, Kernels()) for one in (load, replace(load, n_scorings=1, n_scored_apart=0))]
    assert kept[0] == kept[1]


def test_bounded_logits_are_there_with_their_quotient():
    bounded, large = replace(MODEL, logit_softcap=30.0, vocab_size=6400), replace(MODEL, vocab_size=6400)
    load, fused = Load(1, n_runs=1, n_rows=3, longest_row=7, prefill_tokens=1), Kernels(fused_sampling=True)
    found = [generation_bytes(local(model), load, kernels=fused).activations for model in (bounded, large)]
    assert found == [3 * (3 * 6400 + 32) * 4, 2 * 3 * 6400 * 4]
    load, blocks = Load(1, 1024, 1024), Kernels(whole_logits=False)  # two blocks of 2 MB of their softmax
    more = backward_of_head(local(bounded), load, blocks) - backward_of_head(local(large), load, blocks)
    assert more == 4 * (1024 * 6400 - 2 * (1 << 19) * 2)

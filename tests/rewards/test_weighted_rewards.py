"""Several rewards in one: weights, shaping, what is logged, what is left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.api import CallContext
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.rewards.interface import FunctionReward, WeightedRewards, overlong_penalty, until_failure
from realrl.rewards.pool import Outcome
from tests.algo.batches import SEQUENCE, token_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, fake_context, fake_model

FUNCTIONS = "tests.rewards.reward_functions"
BATCH = token_batch([[([1, 2], [0, 9]), ([1, 2], [0])], [([3], [0, 1, 2])]])


@pytest.fixture
def run() -> Any:
    """Score a batch in this process; returns the result and the context that took the metrics."""

    def call(
        parts: dict[str, dict[str, Any]], batch: SequenceSample = BATCH, **args: Any
    ) -> tuple[SequenceSample, CallContext]:
        interface = WeightedRewards(parts, in_process=True, **args)
        context = fake_context("rew_inf", [batch.ids], generation=GenerationConfig(max_new_tokens=10))
        return interface.inference(fake_model("reward", FakeEngine(Bigram(10))), batch, context), context

    return call


def test_parts_are_weighted_and_logged_before_that(run: Any) -> None:
    parts = {
        "length": {"function": f"{FUNCTIONS}:scaled_ids", "weight": 0.5, "options": {"scale": 2.0}},
        "model": {"function": "reward_model", "weight": -1.0},
        "seen": {"function": f"{FUNCTIONS}:rank", "weight": 0.0},
    }
    model_rewards = BATCH.derive("input_ids", {"model_rewards": (SEQUENCE, torch.tensor([0.5, 1.0, 1.5]))})
    result, context = run(parts, BATCH.update(model_rewards))
    assert result.ids == BATCH.ids
    assert result["rewards"].dtype == torch.float32
    assert result["rewards"].tolist() == [2.0 - 0.5, 1.0 - 1.0, 3.0 - 1.5]
    assert context.metrics.sums["reward/length/mean"] == (12.0, 3.0)
    assert context.metrics.sums["reward/length/mean_square"] == (16.0 + 4.0 + 36.0, 3.0)
    assert context.metrics.sums["reward/model/mean"] == (3.0, 3.0)
    assert context.metrics.sums["reward/seen/mean"] == (1.0, 3.0)
    assert not any("failed" in name for name in context.metrics.sums)


def test_one_function_alone_logs_no_mean_of_its_own() -> None:
    interface = FunctionReward(f"{FUNCTIONS}:misbehave", in_process=True, on_failure="zero")
    batch = token_batch([[([1], [0]), ([1], [1])]])
    context = fake_context("rew_inf", [batch.ids])
    interface.inference(fake_model("reward", FakeEngine(Bigram(10))), batch, context)
    assert context.metrics.sums == {"reward/failed": (1.0, 2.0)}


def test_a_failed_sample_is_dropped_with_all_its_responses(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    batch = token_batch([[([1], [0]), ([1], [1])], [([1], [0]), ([1], [0])], [([1], [3]), ([1], [2])]])
    parts = {
        "strict": {"function": f"{FUNCTIONS}:misbehave", "on_failure": "drop"},
        "length": {"function": f"{FUNCTIONS}:scaled_ids"},
    }
    with caplog.at_level(logging.WARNING):
        result, context = run(parts, batch, metrics="greedy_reward")
    assert result.ids == ("0/1",)
    assert result["rewards"].tolist() == [1.5, 1.5]
    assert "rew_inf at step 1 drops sample '0/0' (response 1): the reward function" in caplog.text
    assert context.metrics.sums["greedy_reward/strict/failed"] == (3.0, 6.0)
    assert context.metrics.sums["greedy_reward/strict/mean"] == (1.0, 2.0)
    assert context.metrics.sums["greedy_reward/length/mean"] == (2.0, 2.0)


def test_all_samples_may_be_dropped(run: Any) -> None:
    result, context = run(
        {"strict": {"function": f"{FUNCTIONS}:misbehave", "on_failure": "drop"}}, token_batch([[([1], [1])]])
    )
    assert result.ids == ()
    assert result["rewards"].shape == (0,)
    assert context.metrics.sums["reward/strict/mean"] == (0.0, 0.0)


def test_each_part_has_its_own_policy_and_key(run: Any) -> None:
    batch = token_batch([[([1], [1])]])
    zero = {"function": f"{FUNCTIONS}:misbehave", "on_failure": "zero"}
    result, _ = run({"zero": zero, "length": {"function": f"{FUNCTIONS}:scaled_ids"}}, batch)
    assert result["rewards"].tolist() == [1.0]
    with pytest.raises(CallError, match=r"algorithm\.rewards\.strict\.on_failure=zero"):
        run({"zero": zero, "strict": {"function": f"{FUNCTIONS}:misbehave"}}, batch)


def test_processes_give_the_same(run: Any) -> None:
    parts = {
        "length": {"function": f"{FUNCTIONS}:scaled_ids", "weight": 0.5, "options": {"scale": 2.0}},
        "all": {"function": f"{FUNCTIONS}:rank"},
        "waits": {"function": f"{FUNCTIONS}:wait"},
        "text": {"function": f"{FUNCTIONS}:text_length"},
        "overlong": {"function": "overlong", "options": {"max_tokens": 3, "cache_tokens": 2}},
    }
    expected, context = run(parts)
    interface = WeightedRewards(parts)
    other = fake_context("rew_inf", [BATCH.ids])
    try:
        result = interface.inference(fake_model("reward", FakeEngine(Bigram(10))), BATCH, other)
    finally:
        interface.close()
    assert result == expected
    assert other.metrics.sums == context.metrics.sums


# ---------------------------------------------------------------- overlong


def dapo_13(length: int, max_tokens: int, cache: int) -> float:
    """DAPO, equation 13, as it is printed."""
    if length <= max_tokens - cache:
        return 0.0
    if length <= max_tokens:
        return ((max_tokens - cache) - length) / cache
    return -1.0


@given(st.integers(1, 200), st.data())
def test_the_penalty_is_that_of_the_paper(max_tokens: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, max_tokens))
    lengths = list(range(max_tokens + 5))
    expected = [dapo_13(length, max_tokens, cache) for length in lengths]
    assert overlong_penalty(torch.tensor(lengths), max_tokens, cache).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_penalty_counts_response_tokens_up_to_the_longest_one_allowed(run: Any) -> None:
    batch = token_batch([[([1] * 20, [0] * n)] for n in (8, 9, 10)])
    result, _ = run({"overlong": {"function": "overlong", "weight": 2.0}}, batch)  # of at most 10 tokens, cache 2
    assert result["rewards"].tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(ValueError, match="cache_tokens=11 must be above 0 and at most max_tokens=10"):
        overlong_penalty(torch.tensor([1]), 10, 11)


@pytest.mark.parametrize(
    ("coming", "told"),
    [([2, 0, 1], [2, 0, 1]), ([3, 0, 4, 1, 2], [3]), ([4, 3, 2, 1, 0], [3]), ([2, 4, 0, 1, 3], [2, 3])],
)
def test_the_first_failing_response_is_told_whichever_process_was_quicker(coming, told):  # type: ignore[no-untyped-def]
    outcomes = [Outcome(i, failure="raised" if i >= 3 else None) for i in coming]
    found = until_failure(iter(outcomes), 5, lambda outcome: outcome.failure is not None)
    assert [outcome.index for outcome in found] == told

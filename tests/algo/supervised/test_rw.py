from __future__ import annotations

import math

import pytest
import torch

from realrl.algo.supervised.rw import RewardModel, with_end
from realrl.errors import CallError
from tests.algo.batches import token_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, fake_context, fake_model

PAIRS = token_batch([[([0], [1, 2]), ([0], [3])], [([1], [2]), ([1], [0])], [([1], [2]), ([1], [2, 3])]])


def train(module: Bigram, n_mbs: int | None = None) -> dict[str, float]:
    ctx = fake_context("reward_train", [PAIRS.ids], n_mbs=n_mbs)
    return RewardModel().train_step(fake_model("reward", FakeEngine(module, lr=1.0)), PAIRS, ctx)


def test_loss_is_the_mean_over_pairs() -> None:
    module = Bigram(4)
    s = module.scores.tolist()
    margins = [s[2] - s[3], s[2] - s[0], s[2] - s[3]]
    metrics = train(module)
    assert metrics["reward/loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 3, rel=1e-5)
    assert metrics["reward/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert metrics["reward/chosen_mean"] == pytest.approx(s[2], rel=1e-5)
    assert metrics["reward/n_pairs"] == 3.0


def test_it_learns_the_preference() -> None:
    module = Bigram(4)
    for _ in range(20):
        metrics = train(module)
    assert metrics["reward/accuracy"] == 1.0
    assert metrics["reward/loss"] < 0.2


def test_micro_batches_change_nothing() -> None:
    one, two = Bigram(4), Bigram(4)
    assert train(one) == pytest.approx(train(two, n_mbs=3), rel=1e-5)
    torch.testing.assert_close(one.scores, two.scores)


def test_inference_scores_the_end_of_each_sequence_also_where_it_was_cut_off() -> None:
    module = Bigram(4)
    model = fake_model("reward", FakeEngine(module))
    eos = model.tokenizer.eos_token_id
    batch = token_batch([[([0], [1, 2]), ([0], [3, eos])], [([1], [2]), ([1], [eos])]])
    closed = with_end(batch, eos)
    assert closed.seqlens["input_ids"] == ((4, 3), (3, 2))
    assert closed["input_ids"].tolist() == [0, 1, 2, eos, 0, 3, eos, 1, 2, eos, 1, eos]
    result = RewardModel().inference(model, batch, fake_context("rew_inf", [batch.ids], n_mbs=2))
    assert result.ids == batch.ids
    assert result["rewards"].tolist() == [pytest.approx(module.scores[eos].item())] * 4
    assert result.seqlens["rewards"] == ((1, 1),) * 2


def test_a_sample_that_is_no_pair_is_named() -> None:
    batch = token_batch([[([0], [1]), ([0], [2])], [([0], [1])]])
    ctx = fake_context("reward_train", [batch.ids], step=3)
    with pytest.raises(CallError, match=r"reward_train of role 'reward' at step 3 .* sample '0/1' has 1"):
        RewardModel().train_step(fake_model("reward", FakeEngine(Bigram(4))), batch, ctx)

"""Advantages against float64 numpy, written after the papers' formulas one response at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algo.policy.actor import PolicyActor, mixed_advantages
from realrl.algo.policy.advantages import (
    dr_grpo,
    gae,
    grpo,
    lagrangian,
    reinforce_pp,
    remax,
    reverse_kl,
    rloo,
    versus,
)
from realrl.algo.policy.filters import Filter, equal_rewards
from realrl.algo.policy.piece_calls import call_piece
from realrl.config.policy_options import PolicyOptions, PPOOptions, SafeRLHFOptions
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.experiment.pieces import Piece, PieceKind, find_piece
from tests.helpers.fake_engine import Bigram, FakeEngine, fake_context, fake_model
from tests.helpers.policies import CASES, rollout_batch, rollout_of

N_TOKENS = 5
EACH = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 1000)


@dataclass
class Response:
    """One response in float64: arrays have an entry per action."""

    sample: int
    reward: float
    cost: float
    old: np.ndarray
    ref: np.ndarray
    teacher: np.ndarray
    values: np.ndarray
    cost_values: np.ndarray
    last_value: float
    last_cost_value: float
    truncated: bool


def responses(batch: SequenceSample) -> list[Response]:
    found = []
    columns = {key: batch.sequences(key) for key in batch.keys}
    for i in range(len(batch)):
        for j, mask in enumerate(columns["prompt_mask"][i]):
            actions = np.flatnonzero(~mask[1:].numpy())

            def at(key: str, i: int = i, j: int = j, actions: np.ndarray = actions) -> np.ndarray:
                return columns[key][i][j].double().numpy()[actions]

            found.append(
                Response(
                    i,
                    columns["rewards"][i][j].item(),
                    columns["costs"][i][j].item(),
                    *(at(key) for key in ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "cost_values")),
                    columns["values"][i][j][-1].item(),
                    columns["cost_values"][i][j][-1].item(),
                    bool(columns["truncated"][i][j].item()),
                )
            )
    return found


def check(batch: SequenceSample, found: torch.Tensor, wanted: list[np.ndarray], rtol: float = 1e-5) -> None:
    rollout = rollout_of(batch, PolicyOptions())
    assert found.shape == rollout.mask.shape
    np.testing.assert_allclose(found[rollout.mask].numpy(), np.concatenate(wanted), rtol=rtol, atol=1e-5)
    assert torch.equal(found[~rollout.mask], torch.zeros(int((~rollout.mask).sum())))


def group(all_of: list[Response], one: Response) -> np.ndarray:
    return np.array([r.reward for r in all_of if r.sample == one.sample])


def returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    return np.array([sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))])


def token_rewards(score: float, r: Response, kl_coef: float) -> np.ndarray:
    rewards = -kl_coef * (r.old - r.ref)
    rewards[-1] += score
    return rewards


def generalised(rewards: np.ndarray, v: np.ndarray, last: float, gamma: float, lam: float) -> np.ndarray:
    v_next = np.append(v[1:], last)
    delta = rewards + gamma * v_next - v
    return returns(delta, gamma * lam)


@EACH
@given(seeds, st.integers(2, 4))
def test_grpo(seed: int, n: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, n_responses=n, junk=math.nan)
    all_of = responses(batch)
    wanted = []
    for r in all_of:
        rewards = group(all_of, r)
        wanted.append(np.full(len(r.old), (r.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)))
    check(batch, grpo(rollout_of(batch, PolicyOptions())), wanted)


@EACH
@given(seeds)
def test_dr_grpo_and_rloo(seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, junk=math.nan)
    all_of = responses(batch)
    wanted = [np.full(len(r.old), r.reward - group(all_of, r).mean()) for r in all_of]
    check(batch, dr_grpo(rollout_of(batch, PolicyOptions())), wanted)
    options = PolicyOptions(kl_coef=0.2)
    for r in all_of:
        r.reward -= 0.2 * (r.old - r.ref).sum()
    wanted = [np.full(len(r.old), r.reward - (group(all_of, r).sum() - r.reward) / 2) for r in all_of]
    check(batch, rloo(rollout_of(batch, options)), wanted)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    batch = rollout_batch(3, vocab_size=N_TOKENS)
    rewards = torch.full_like(batch["rewards"], 0.7)
    batch = batch.update(batch.derive("input_ids", {"rewards": (batch.schemas["rewards"], rewards)}))
    for piece in (grpo, dr_grpo, rloo):
        assert piece(rollout_of(batch, PolicyOptions())).abs().max() < 1e-6


def test_a_single_response_has_no_advantage_over_others() -> None:
    batch = rollout_batch(3, vocab_size=N_TOKENS, n_responses=1)
    for piece in (grpo, dr_grpo, rloo):
        assert torch.equal(piece(rollout_of(batch, PolicyOptions())), torch.zeros(len(batch["old_logprobs"])))


@EACH
@given(seeds, st.sampled_from([1.0, 0.9]))
def test_remax_and_reinforce_pp(seed: int, gamma: float) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, junk=math.nan)
    options = PolicyOptions(kl_coef=0.1, gamma=gamma)
    all_of = responses(batch)
    wanted = [returns(token_rewards(r.reward, r, 0.1), gamma) for r in all_of]
    check(batch, reinforce_pp(rollout_of(batch, options)), wanted)
    greedy = batch["greedy_rewards"].double().numpy()
    minus = [w - greedy[r.sample] for w, r in zip(wanted, all_of, strict=True)]
    check(batch, remax(rollout_of(batch, options)), minus)


def test_remax_without_penalty_is_the_difference_of_rewards() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS)
    greedy = batch["greedy_rewards"].double().numpy()
    wanted = [np.full(len(r.old), r.reward - greedy[r.sample]) for r in responses(batch)]
    keys = tuple(key for key in batch.keys if key != "ref_logprobs")
    check(batch, remax(rollout_of(batch.select(batch.ids, keys), PolicyOptions())), wanted)


@EACH
@given(seeds)
def test_reverse_kl(seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, junk=math.nan)
    rollout = rollout_of(batch, PolicyOptions())
    wanted = [r.teacher - r.old for r in responses(batch)]
    check(batch, reverse_kl(rollout), wanted)
    assert rollout.metrics["distill/reverse_kl"] == pytest.approx(-np.concatenate(wanted).mean(), rel=1e-5)


@EACH
@given(seeds)
def test_versus(seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed)
    all_of = responses(batch)
    theirs = [[t.item() for t in sample] for sample in batch.sequences("other_rewards")]
    payoffs = [np.mean([np.sign(r.reward - other) for other in theirs[r.sample]]) for r in all_of]
    means = [np.mean([p for p, q in zip(payoffs, all_of, strict=True) if q.sample == r.sample]) for r in all_of]
    wanted = [np.full(len(r.old), p - m) for p, m, r in zip(payoffs, means, all_of, strict=True)]
    rollout = rollout_of(batch, PolicyOptions())
    check(batch, versus(rollout), wanted)
    assert rollout.metrics["game/payoff"] == pytest.approx(np.mean(payoffs))
    assert rollout.metrics["game/win_rate"] == pytest.approx((np.mean(payoffs) + 1) / 2)


def test_the_other_player_sees_the_opposite_payoff() -> None:
    batch = rollout_batch(5, vocab_size=N_TOKENS, n_responses=2)
    swapped = {"rewards": "other_rewards", "other_rewards": "rewards"}
    rollouts = [rollout_of(b, PolicyOptions()) for b in (batch, batch.remap(swapped))]
    for rollout in rollouts:
        versus(rollout)
    mine, theirs = (rollout.metrics["game/payoff"] for rollout in rollouts)
    assert mine == pytest.approx(-theirs)


@EACH
@given(seeds)
def test_gae(seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, junk=math.nan)
    options = PPOOptions(kl_coef=0.1, gamma=0.97, gae_lambda=0.9)
    wanted = [
        generalised(token_rewards(r.reward, r, 0.1), r.values, r.last_value if r.truncated else 0.0, 0.97, 0.9)
        for r in responses(batch)
    ]
    check(batch, gae(rollout_of(batch, options)), wanted)


@EACH
@given(seeds)
def test_lagrangian(seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed, junk=math.nan)
    options = SafeRLHFOptions(kl_coef=0.1, gamma=0.97, gae_lambda=0.9, lambda_init=1.5, lambda_lr=0.2, cost_limit=0.1)
    all_of = responses(batch)

    def wanted(weight: float) -> list[np.ndarray]:
        found = []
        for r in all_of:
            ends = (r.last_value, r.last_cost_value) if r.truncated else (0.0, 0.0)
            reward_side = generalised(token_rewards(r.reward, r, 0.05), r.values, ends[0], 0.97, 0.9)
            cost_side = generalised(token_rewards(r.cost, r, -0.05), r.cost_values, ends[1], 0.97, 0.9)
            found.append((reward_side - weight * cost_side) / (1 + weight))
        return found

    state: dict[str, float] = {}
    first = rollout_of(batch, options, state=state)
    check(batch, lagrangian(first), wanted(1.5))
    mean = np.mean([r.cost for r in all_of])
    assert first.metrics["cost/mean"] == pytest.approx(mean, rel=1e-5)
    later = math.exp(math.log(1.5) + 0.2 * 1.5 * (mean - 0.1))
    second = rollout_of(batch, options, state=state)
    check(batch, lagrangian(second), wanted(later))
    assert second.metrics["cost/lambda"] == pytest.approx(later, rel=1e-5)


def test_the_multiplier_is_bounded_and_survives_a_restart() -> None:
    batch, options = (
        rollout_batch(4, vocab_size=N_TOKENS),
        SafeRLHFOptions(advantage="lagrangian", cost_limit=-100.0, lambda_max=2.0, n_minibatches=1),
    )
    first = PolicyActor()
    ctx = fake_context("actor_train", [batch.ids], algorithm=options)
    first.train_step(fake_model("actor", FakeEngine(Bigram(N_TOKENS))), batch, ctx)
    second = PolicyActor()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    metrics = second.train_step(fake_model("actor", FakeEngine(Bigram(N_TOKENS))), batch, ctx)
    assert metrics["cost/lambda"] == pytest.approx(2.0)


def test_scores_are_shaped_before_they_are_compared() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS)
    plain = dr_grpo(rollout_of(batch, PolicyOptions()))
    torch.testing.assert_close(
        dr_grpo(rollout_of(batch, PolicyOptions(reward_scaling=3.0, reward_bias=7.0))), 3 * plain
    )
    assert not torch.equal(dr_grpo(rollout_of(batch, PolicyOptions(reward_clip=0.1))), plain)
    assert not torch.equal(dr_grpo(rollout_of(batch, PolicyOptions(score_truncated=False))), plain)


def test_a_mixture_is_the_weighted_sum() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS)
    mixed = mixed_advantages(rollout_of(batch, PolicyOptions(advantage={"grpo": 0.7, "rloo": 0.3})))
    parts = [piece(rollout_of(batch, PolicyOptions())) for piece in (grpo, rloo)]
    torch.testing.assert_close(mixed, 0.7 * parts[0] + 0.3 * parts[1])


def test_whitening_is_over_the_whole_batch() -> None:
    batch = rollout_batch(6, vocab_size=N_TOKENS)
    rollout = rollout_of(batch, PolicyOptions(advantage="reinforce_pp", normalise_advantages=True))
    a = mixed_advantages(rollout)[rollout.mask].double()
    assert a.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert a.std(correction=0).item() == pytest.approx(1.0, rel=1e-4)


def test_an_advantage_of_a_wrong_shape_is_refused() -> None:
    batch = rollout_batch(3, vocab_size=N_TOKENS)
    rollout = rollout_of(batch, PolicyOptions(advantage="tests.helpers.pieces:per_response"))
    with pytest.raises(CallError, match=r"pieces.py:\d+\) returned a tensor of shape \[9\], not one number for each"):
        mixed_advantages(rollout)


def test_a_function_that_declares_no_keys_learns_how_to(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def plain(rollout): return rollout.per_transition(rollout.scores)\n")
    options = PolicyOptions(advantage=f"{tmp_path}/mine.py:plain")
    batch = rollout_batch(3, vocab_size=N_TOKENS)
    assert len(mixed_advantages(rollout_of(batch, options))) > 0
    without = batch.select(batch.ids, [key for key in batch.keys if key != "rewards"])
    with pytest.raises(
        CallError, match=r"mine.py:plain \(line 1\) declares no key that it reads, .*no key 'rewards'"
    ) as error:
        mixed_advantages(rollout_of(without, options))
    assert "@realrl.register_piece('advantage', 'NAME', reads=('rewards',))" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "reads", "told"),
    [
        ("policy_loss", (), r"mine.py:f \(line \d+\) declares no key that it reads, and so gets none: no key 'laughs'"),
        ("filter", ("rewards",), r"mine.py:f \(line \d+\) declares no other key than rewards: no key 'laughs'"),
    ],
)
def test_any_piece_that_reads_what_it_does_not_declare(kind: PieceKind, reads: tuple[str, ...], told: str) -> None:
    batch = rollout_batch(3, vocab_size=N_TOKENS)
    with pytest.raises(CallError, match=told) as error:
        call_piece(Piece(kind, "f", lambda given: given["laughs"], reads), "mine.py:f", batch)
    assert f"register_piece('{kind}', 'NAME', reads={(*reads, 'laughs')})" in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_without_samples_works_them_out_too(name: str) -> None:
    batch = rollout_batch(2, vocab_size=N_TOKENS)
    rollout = rollout_of(batch.select(()), CASES[name])
    assert len(mixed_advantages(rollout)) == 0


def test_the_filter_keeps_what_differs() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS)
    rewards = batch["rewards"].clone()
    rewards[3:6] = 1.0
    batch = batch.update(batch.derive("input_ids", {"rewards": (batch.schemas["rewards"], rewards)}))
    assert equal_rewards(batch, PolicyOptions()) == [True, False, True, True]
    model, ctx = fake_model("actor", FakeEngine(Bigram(N_TOKENS))), fake_context("filter", [batch.ids])
    kept = Filter("equal_rewards").inference(model, batch, ctx)
    assert kept.ids == (batch.ids[0], *batch.ids[2:])
    assert torch.equal(kept["rewards"], rewards[[0, 1, 2, *range(6, 12)]])
    with pytest.raises(CallError, match=r"one_answer \(\S+pieces.py:\d+\) decided on 1 of 4 samples"):
        Filter("tests.helpers.pieces:one_answer").inference(model, batch, ctx)


def test_builtin_pieces_are_where_the_table_says() -> None:
    for piece in (grpo, versus, lagrangian):
        assert find_piece("advantage", piece.__name__).load() is piece

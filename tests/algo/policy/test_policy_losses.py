"""Policy losses against float64 numpy, written after the papers' formulas one response at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algo.packed import response_mask
from realrl.algo.policy.actor import (
    ADVANTAGES,
    IMPORTANCE,
    PER_TRANSITION,
    WEIGHTS,
    importance_weights,
    policy_objective,
)
from realrl.algo.policy.actor import loss_weights as loss_weights_of
from realrl.algo.policy.policy_losses import (
    ActionBatch,
    cispo,
    clip,
    kl_estimate,
    reinforce,
    response_clip,
    sequence_clip,
)
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample
from tests.helpers.fake_engine import Bigram, FakeEngine, FakeOutput, fake_context
from tests.helpers.policies import GENERATION, rollout_batch, rollout_of

N_TOKENS = 5
seeds = st.integers(0, 1000)
LOSSES = {f.__name__: f for f in (clip, sequence_clip, response_clip, cispo, reinforce)}


def responses(batch: SequenceSample) -> list[list[int]]:
    """Per response, the rows of its actions among all actions."""
    counts = rollout_of(batch, PolicyOptions()).actions.counts.tolist()
    ends = np.cumsum([0, *counts])
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def restated(name: str, new, old, a, rows: list[list[int]], low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each action, and the derivative of their sum by each new log-probability."""
    losses, grads = np.zeros(len(new)), np.zeros(len(new))
    for mine in rows:
        d = (new - old)[mine]
        if name == "sequence_clip":
            ratios, spread = np.full(len(mine), math.exp(d.mean())), 1 / len(mine)
        elif name == "response_clip":
            ratios, spread = np.full(len(mine), math.exp(d.sum())), 1.0
        else:
            ratios, spread = np.exp(d), None
        for i, ratio in zip(mine, ratios, strict=True):
            if name == "reinforce":
                losses[i], grads[i] = -a[i] * new[i], -a[i]
            elif name == "cispo":
                weight = min(ratio, high)
                losses[i], grads[i] = -a[i] * weight * new[i], -a[i] * weight
            else:
                plain, bounded = -a[i] * ratio, -a[i] * min(max(ratio, low), high)
                losses[i] = max(plain, bounded)
                slope = -a[i] * ratio if plain > bounded or low < ratio < high else 0.0
                if spread is None:
                    grads[i] += slope
                else:
                    grads[mine] += slope * spread
    return losses, grads


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_losses_and_gradients_agree_with_numpy(name: str, seed: int) -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, seed=seed)
    options = PolicyOptions(clip_ratio=0.2, clip_ratio_high=0.28)
    rng = np.random.default_rng(seed)
    old = batch["old_logprobs"][response_mask(batch)].double().numpy()
    new, a = old + rng.normal(0, 0.15, len(old)), rng.normal(0, 2, len(old))
    leaf = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    out = LOSSES[name](ActionBatch(batch, leaf, torch.tensor(old), torch.tensor(a)), options)
    out.losses.sum().backward()
    losses, grads = restated(name, new, old, a, responses(batch), 0.8, 1.28)
    np.testing.assert_allclose(out.losses.detach().numpy(), losses, rtol=1e-9)
    np.testing.assert_allclose(leaf.grad.numpy(), grads, rtol=1e-9, atol=1e-12)


def one_token(new: float, old: float, a: float, **options: float) -> tuple[float, dict[str, float], float]:
    leaf = torch.tensor([new], requires_grad=True)
    actions = ActionBatch(rollout_batch(1, vocab_size=3), leaf, torch.tensor([old]), torch.tensor([a]))
    out = clip(actions, PolicyOptions(**options))
    out.losses.sum().backward()
    return out.losses.item(), {k: v.item() for k, v in out.stats.items()}, leaf.grad.item()


def test_a_huge_ratio_makes_no_nan() -> None:
    loss, stats, gradient = one_token(500.0, -500.0, 0.0)
    assert (loss, gradient) == (0.0, 0.0)
    assert stats["clip_fraction"] == 1.0


def test_the_upper_clip_is_the_lower_one_unless_it_is_given() -> None:
    up = math.log(1.25)
    assert one_token(up, 0.0, 1.0)[0] == pytest.approx(-1.2)
    assert one_token(up, 0.0, 1.0, clip_ratio_high=0.28)[0] == pytest.approx(-1.25)
    assert one_token(up, 0.0, 1.0, clip_ratio_high=0.28)[1]["clip_fraction"] == 0.0
    assert one_token(-up, 0.0, -1.0, clip_ratio_high=0.28)[0] == pytest.approx(0.8)


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=10))
def test_kl_estimators(pairs: list[tuple[float, float]]) -> None:
    logp, ref = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    d = ref - logp
    torch.testing.assert_close(kl_estimate(logp, ref, "k1"), -d)
    torch.testing.assert_close(kl_estimate(logp, ref, "k2"), d**2 / 2)
    torch.testing.assert_close(kl_estimate(logp, ref, "k3"), d.exp() - d - 1)


# ---------------------------------------------------------------- the whole objective


def prepared(options: PolicyOptions, seed: int) -> tuple[SequenceSample, np.ndarray]:
    """A batch with the columns that the objective reads, and the advantages of its actions."""
    batch = rollout_batch(5, vocab_size=N_TOKENS, seed=seed)
    rollout = rollout_of(batch, options)
    a = torch.randn(len(rollout.mask), generator=torch.Generator().manual_seed(seed))
    ctx = fake_context("train", [batch.ids], generation=GENERATION)
    columns = {ADVANTAGES: a, IMPORTANCE: importance_weights(rollout, FakeEngine(Bigram(N_TOKENS)))}
    if options.loss_normaliser != "tokens":
        columns[WEIGHTS] = loss_weights_of(rollout, ctx, FakeEngine(Bigram(N_TOKENS)))
    batch = batch.update(batch.derive("input_ids", {k: (PER_TRANSITION, v) for k, v in columns.items()}))
    return batch, a[rollout.mask].double().numpy()


@pytest.mark.parametrize("normaliser", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("seed", range(3))
def test_the_objective_agrees_with_numpy(normaliser: str, seed: int) -> None:
    options = PolicyOptions(
        loss_normaliser=normaliser, kl_loss_coef=0.3, entropy_coef=0.02, importance_cap=1.1, kl_estimator="k3"
    )
    batch, a = prepared(options, seed)
    module = Bigram(N_TOKENS, seed)
    _, objective = policy_objective(options, GENERATION.temperature)
    out = objective(FakeOutput(module, batch), batch)

    mask = response_mask(batch)
    names = ("old_logprobs", "ref_logprobs", "behavior_logprobs")
    old, ref, behavior = (batch[name][mask].double().numpy() for name in names)
    table = module.logits.detach().double() / GENERATION.temperature
    p = torch.softmax(table, -1).numpy()
    ids = [t.tolist() for sample in batch.sequences("input_ids") for t in sample]
    prompts = [m.sum().item() for sample in batch.sequences("prompt_mask") for m in sample]
    pairs = [(t[i], t[i + 1]) for t, n in zip(ids, prompts, strict=True) for i in range(n - 1, len(t) - 1)]
    new = np.array([math.log(p[x, y]) for x, y in pairs])
    entropy = np.array([-(p[x] * np.log(p[x])).sum() for x, _ in pairs])
    ratio = np.exp(new - old)
    pg = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2)) * np.minimum(np.exp(old - behavior), 1.1)
    d = ref - new
    per_action = pg + 0.3 * (np.exp(d) - d - 1) - 0.02 * entropy
    rows = responses(batch)
    wanted = {
        "tokens": per_action.mean(),
        "sequences": np.mean([per_action[mine].mean() for mine in rows]),
        "constant": per_action.sum() / (len(rows) * GENERATION.max_new_tokens),
    }[normaliser]
    assert out.loss.item() / len(a) == pytest.approx(wanted, rel=1e-5)
    assert out.stats["ratio"].item() / len(a) == pytest.approx(ratio.mean(), rel=1e-5)
    assert out.stats["entropy"].item() / len(a) == pytest.approx(entropy.mean(), rel=1e-5)
    assert out.stats["approx_kl"].item() / len(a) == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)


def test_weights_are_of_the_minibatch_that_a_response_is_in() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS)
    rollout = rollout_of(batch, PolicyOptions(loss_normaliser="sequences"))
    minibatches = [batch.ids[:1], batch.ids[1:]]
    ctx = fake_context("train", minibatches, generation=GENERATION)
    weights = loss_weights_of(rollout, ctx, FakeEngine(Bigram(N_TOKENS)))
    batch = batch.update(batch.derive("input_ids", {WEIGHTS: (PER_TRANSITION, weights)}))
    for ids in minibatches:
        part = batch.select(ids)
        of_actions = part[WEIGHTS][response_mask(part)].double()
        n_actions = len(of_actions)
        for mine in responses(part):
            assert (of_actions[mine].sum() / n_actions).item() == pytest.approx(1 / len(responses(part)), rel=1e-5)


def test_importance_weights_are_truncated_and_reported() -> None:
    batch = rollout_batch(4, vocab_size=N_TOKENS, junk=math.nan)
    rollout = rollout_of(batch, PolicyOptions(importance_cap=1.05))
    weights = importance_weights(rollout, FakeEngine(Bigram(N_TOKENS)))
    mask = response_mask(batch)
    ratio = np.exp((batch["old_logprobs"][mask] - batch["behavior_logprobs"][mask]).double().numpy())
    np.testing.assert_allclose(weights[mask].numpy(), np.minimum(ratio, 1.05), rtol=1e-6)
    assert torch.equal(weights[~mask], torch.zeros(int((~mask).sum())))
    assert rollout.metrics["importance/capped"] == pytest.approx((ratio > 1.05).mean())
    assert rollout.metrics["importance/max"] == pytest.approx(ratio.max())
    assert rollout.metrics["importance/mean"] == pytest.approx(np.minimum(ratio, 1.05).mean())

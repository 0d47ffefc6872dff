from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.policy.actor import PolicyActor, training_temperature
from realrl.algo.policy.critic import PPOCritic
from realrl.config.policy_options import PPOOptions
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from tests.algo.batches import SEQUENCE, experience_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, ThreadGroup, fake_context, fake_model

N_TOKENS = 5
TEMPERATURE = 0.7
GENERATION = GenerationConfig(temperature=TEMPERATURE, max_new_tokens=4, n_responses=2)


def minibatches_of(batch: SequenceSample, n: int) -> list[tuple[str, ...]]:
    return [batch.ids[i::n] for i in range(n)]


def train(
    interface: PolicyActor | PPOCritic,
    module: Bigram,
    batch: SequenceSample,
    options: PPOOptions,
    *,
    lr: float = 0.1,
    n_mbs: int | None = None,
) -> dict[str, float]:
    ctx = fake_context(
        "train",
        minibatches_of(batch, options.n_minibatches) * options.ppo_epochs,
        n_passes=options.ppo_epochs,
        algorithm=options,
        generation=GENERATION,
        n_mbs=n_mbs,
    )
    role = "actor" if isinstance(interface, PolicyActor) else "critic"
    return interface.train_step(fake_model(role, FakeEngine(module, lr=lr)), batch, ctx)


class Restated:
    """PPO's train_step once more: float64, one token after the other, gradients by hand."""

    def __init__(self, batch: SequenceSample, options: PPOOptions) -> None:
        self.o = options
        self.rows: list[dict[str, Any]] = []
        names = ("input_ids", "prompt_mask", "old_logprobs", "ref_logprobs", "rewards", "values", "truncated")
        columns = {key: [t.numpy() for sample in batch.sequences(key) for t in sample] for key in names}
        owners = [i for i, lens in zip(batch.ids, batch.seqlens["input_ids"], strict=True) for _ in lens]
        for n, owner in enumerate(owners):
            row = {key: columns[key][n].astype(np.float64) for key in names}
            row["owner"] = owner
            row["ids"] = columns["input_ids"][n]
            row["actions"] = [t for t in range(len(row["ids"]) - 1) if not columns["prompt_mask"][n][t + 1]]
            self.estimate(row)
            self.rows.append(row)
        a = np.array([row["A"][t] for row in self.rows for t in row["actions"]])
        for row in self.rows:
            row["whitened"] = {t: (row["A"][t] - a.mean()) / (a.std() + 1e-5) for t in row["actions"]}
        self.kl = np.mean([sum((r["old_logprobs"] - r["ref_logprobs"])[t] for t in r["actions"]) for r in self.rows])

    def estimate(self, row: dict[str, Any]) -> None:
        o, v = self.o, row["values"]
        score = np.clip((row["rewards"][0] - o.reward_bias) * o.reward_scaling, -o.reward_clip, o.reward_clip)
        row["A"], row["R"] = {}, {}
        later = 0.0
        for t in reversed(row["actions"]):
            is_last = t == len(row["ids"]) - 2
            r = -o.kl_coef * (row["old_logprobs"][t] - row["ref_logprobs"][t]) + (score if is_last else 0.0)
            v_next = v[t + 1] if not is_last or row["truncated"][0] else 0.0
            later = r + o.gamma * v_next - v[t] + o.gamma * o.gae_lambda * later
            row["A"][t], row["R"][t] = later, later + v[t]

    def actor_step(self, logits: np.ndarray, ids: tuple[str, ...], lr: float) -> tuple[np.ndarray, float]:
        grad, loss, n = np.zeros_like(logits), 0.0, 0
        for row in (r for r in self.rows if r["owner"] in ids):
            for t in row["actions"]:
                here, there = row["ids"][t], row["ids"][t + 1]
                p = np.exp(logits[here] / TEMPERATURE)
                p /= p.sum()
                ratio, a = p[there] / np.exp(row["old_logprobs"][t]), row["whitened"][t]
                plain, clipped = -a * ratio, -a * np.clip(ratio, 1 - self.o.clip_ratio, 1 + self.o.clip_ratio)
                loss, n = loss + max(plain, clipped), n + 1
                if plain >= clipped:
                    grad[here] -= a * ratio * (np.eye(len(p))[there] - p) / TEMPERATURE
        return logits - lr * grad / n, loss / n

    def critic_step(self, scores: np.ndarray, ids: tuple[str, ...], lr: float) -> tuple[np.ndarray, float]:
        returns = np.array([row["R"][t] for row in self.rows for t in row["actions"]])
        mean, std = returns.mean(), max(returns.std(), 0.1)
        grad, loss, n = np.zeros_like(scores), 0.0, 0
        for row in (r for r in self.rows if r["owner"] in ids):
            for t in row["actions"]:
                v, old, target = scores[row["ids"][t]], row["values"][t], (row["R"][t] - mean) / std
                near = old + np.clip(v - old, -self.o.value_clip, self.o.value_clip)
                plain, clipped = 0.5 * (v - target) ** 2, 0.5 * (near - target) ** 2
                loss, n = loss + max(plain, clipped), n + 1
                if plain >= clipped or abs(v - old) < self.o.value_clip:
                    grad[row["ids"][t]] += v - target
        return scores - lr * grad / n, loss / n


OPTIONS = PPOOptions(n_minibatches=2, ppo_epochs=2, gamma=0.99, gae_lambda=0.95, early_stop_ratio=None)


@pytest.mark.parametrize("seed", range(4))
def test_actor_agrees_with_the_restatement(seed: int) -> None:
    batch = experience_batch(6, n_tokens=N_TOKENS, seed=seed, n_responses=2, junk=math.nan)
    module = Bigram(N_TOKENS, seed)
    restated, logits = Restated(batch, OPTIONS), module.logits.detach().double().numpy()
    losses, weights = [], []
    for ids in minibatches_of(batch, 2) * 2:
        logits, loss = restated.actor_step(logits, ids, lr=0.1)
        losses.append(loss)
        weights.append(sum(len(r["actions"]) for r in restated.rows if r["owner"] in ids))
    metrics = train(PolicyActor(), module, batch, OPTIONS)
    np.testing.assert_allclose(module.logits.detach().numpy(), logits, rtol=1e-5, atol=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-5, abs=1e-5)
    assert metrics["kl/mean"] == pytest.approx(restated.kl, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_critic_agrees_with_the_restatement(seed: int) -> None:
    batch = experience_batch(6, n_tokens=N_TOKENS, seed=seed, n_responses=2, junk=math.nan)
    module = Bigram(N_TOKENS, seed)
    restated, scores = Restated(batch, OPTIONS), module.scores.detach().double().numpy()
    for ids in minibatches_of(batch, 2) * 2:
        scores, _ = restated.critic_step(scores, ids, lr=0.1)
    metrics = train(PPOCritic(), module, batch, OPTIONS)
    np.testing.assert_allclose(module.scores.detach().numpy(), scores, rtol=1e-5, atol=1e-5)
    pairs = [(row["R"][t], row["values"][t]) for row in restated.rows for t in row["actions"]]
    r, v = np.array(pairs).T
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-5)


@pytest.mark.parametrize("interface", [PolicyActor, PPOCritic])
def test_micro_batches_sample_order_and_junk_change_nothing(interface: type[PolicyActor] | type[PPOCritic]) -> None:
    options = PPOOptions(n_minibatches=1, ppo_epochs=2)
    results = []
    for junk, order, n_mbs in ((0.0, slice(None), None), (math.nan, slice(None, None, -1), 3)):
        batch = experience_batch(5, n_tokens=N_TOKENS, n_responses=2, junk=junk)
        module = Bigram(N_TOKENS)
        metrics = train(interface(), module, batch.select(batch.ids[order]), options, n_mbs=n_mbs)
        results.append((metrics, module))
    (first, one), (second, two) = results
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(one.logits, two.logits)
    torch.testing.assert_close(one.scores, two.scores)


@pytest.mark.parametrize("interface", [PolicyActor, PPOCritic])
def test_two_ranks_are_as_one(interface: type[PolicyActor] | type[PPOCritic]) -> None:
    options = PPOOptions(n_minibatches=2, ppo_epochs=2, kl_controller="adaptive", kl_horizon=10)
    batch = experience_batch(7, n_tokens=N_TOKENS, n_responses=2)
    alone, whole = Bigram(N_TOKENS), interface()
    wanted = train(whole, alone, batch, options)
    group, modules, interfaces = ThreadGroup(2), [Bigram(N_TOKENS), Bigram(N_TOKENS)], [interface(), interface()]
    first, second = minibatches_of(batch, 2)
    shares = [(first[:1], second[:3]), (first[1:], second[3:])]
    assert shares[1][1] == ()

    def rank(r: int) -> dict[str, float]:
        engine = FakeEngine(modules[r], all_reduce=group.all_reduce(r))
        mine = batch.select([i for ids in shares[r] for i in ids])
        ctx = fake_context("train", shares[r] * 2, n_passes=2, algorithm=options, generation=GENERATION)
        role = "actor" if interface is PolicyActor else "critic"
        return interfaces[r].train_step(fake_model(role, engine), mine, ctx)

    for metrics, module, one in zip(group.run([lambda: rank(0), lambda: rank(1)]), modules, interfaces, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(module.logits, alone.logits)
        torch.testing.assert_close(module.scores, alone.scores)
        assert one.state_dict() == pytest.approx(whole.state_dict(), rel=1e-9)


def test_a_rank_without_samples_takes_part() -> None:
    options = PPOOptions(n_minibatches=1)
    batch = experience_batch(3, n_tokens=N_TOKENS)
    group = ThreadGroup(2)

    def rank(r: int) -> dict[str, float]:
        ids = batch.ids if r == 0 else ()
        engine = FakeEngine(Bigram(N_TOKENS), all_reduce=group.all_reduce(r))
        ctx = fake_context("train", [ids], algorithm=options, generation=GENERATION)
        return PolicyActor().train_step(fake_model("actor", engine), batch.select(ids), ctx)

    first, second = group.run([lambda: rank(0), lambda: rank(1)])
    assert first == second
    assert first["actor/pg_loss"] == pytest.approx(
        train(PolicyActor(), Bigram(N_TOKENS), batch, options)["actor/pg_loss"]
    )


def test_a_minibatch_that_went_too_far_is_skipped_and_counted() -> None:
    batch = experience_batch(4, n_tokens=N_TOKENS)
    module = Bigram(N_TOKENS)
    before = module.logits.detach().clone()
    for options in (
        PPOOptions(n_minibatches=2, early_stop_ratio=1e-3),
        PPOOptions(n_minibatches=2, early_stop_kl=1e-9),
    ):
        metrics = train(PolicyActor(), module, batch, options)
        assert metrics["actor/skipped_minibatches"] == 2.0
        assert metrics["actor/grad_norm"] == 0.0
        assert torch.equal(module.logits, before)


def test_actor_and_critic_keep_the_same_kl_weight() -> None:
    options = PPOOptions(kl_controller="adaptive", kl_target=0.01, kl_horizon=100, n_minibatches=1)
    actor, critic = PolicyActor(), PPOCritic()
    coefs = []
    for step in range(3):
        batch = experience_batch(5, n_tokens=N_TOKENS, seed=step)
        coefs.append(train(actor, Bigram(N_TOKENS), batch, options)["actor/kl_coef"])
        train(critic, Bigram(N_TOKENS), batch, options)
        assert actor.state_dict()["kl_coef"] == critic.state_dict()["kl_coef"]
    assert coefs[0] == options.kl_coef
    assert coefs[1] != coefs[0]


@pytest.mark.parametrize("interface", [PolicyActor, PPOCritic])
def test_state_continues_exactly(interface: type[PolicyActor] | type[PPOCritic]) -> None:
    options = PPOOptions(kl_controller="adaptive", kl_horizon=100, n_minibatches=1)
    straight, broken = interface(), interface()
    train(straight, Bigram(N_TOKENS), experience_batch(5, n_tokens=N_TOKENS, seed=1), options)
    train(broken, Bigram(N_TOKENS), experience_batch(5, n_tokens=N_TOKENS, seed=1), options)
    resumed = interface()
    resumed.load_state_dict(broken.state_dict())
    assert resumed.state_dict() == broken.state_dict()
    batch = experience_batch(5, n_tokens=N_TOKENS, seed=2)
    one, two = Bigram(N_TOKENS), Bigram(N_TOKENS)
    assert train(straight, one, batch, options) == train(resumed, two, batch, options)
    assert torch.equal(one.scores, two.scores)


def infer_values(critic: PPOCritic, module: Bigram, batch: SequenceSample) -> SequenceSample:
    ctx = fake_context("critic_inf", [batch.ids], n_mbs=2)
    return critic.inference(fake_model("critic", FakeEngine(module)), batch, ctx)


def test_values_are_in_reward_units() -> None:
    batch = experience_batch(30, n_tokens=N_TOKENS, n_responses=2)
    rewards = 100.0 + 0.1 * batch["rewards"]
    batch = batch.update(batch.derive("input_ids", {"rewards": (SEQUENCE, rewards)}))
    options = PPOOptions(kl_coef=0.0, reward_clip=1000.0, n_minibatches=1)
    critic, module = PPOCritic(), Bigram(N_TOKENS)
    assert infer_values(critic, module, batch)["values"].abs().max() < 5
    batch = batch.update(infer_values(critic, module, batch))
    train(critic, module, batch, options)
    values = infer_values(critic, module, batch)["values"]
    assert values.shape == batch["input_ids"].shape
    assert 80 < values.mean() < 120


def test_values_are_not_normalised_when_told_so() -> None:
    batch = experience_batch(5, n_tokens=N_TOKENS)
    critic, module = PPOCritic(), Bigram(N_TOKENS)
    train(critic, module, batch, PPOOptions(normalise_values=False, n_minibatches=1))
    assert torch.equal(infer_values(critic, module, batch)["values"], module.scores.detach()[batch["input_ids"]])


def test_clipping_is_around_what_the_head_put_out() -> None:
    """Right after inference no value has moved, whatever the statistics have become since."""
    critic, module = PPOCritic(), Bigram(N_TOKENS)
    for seed in range(3):
        batch = experience_batch(8, n_tokens=N_TOKENS, seed=seed)
        batch = batch.update(infer_values(critic, module, batch))
        metrics = train(critic, module, batch, PPOOptions(value_clip=1e-4, n_minibatches=1))
        assert metrics["critic/clip_fraction"] == 0.0


def prompts(n: int) -> SequenceSample:
    batch = experience_batch(n, n_tokens=N_TOKENS - 1)
    return batch.select(batch.ids, ("input_ids",)).remap({"input_ids": "prompt_ids"})


def test_generate_gives_what_training_recomputes() -> None:
    batch, module = prompts(4), Bigram(N_TOKENS)
    model = fake_model("actor", FakeEngine(module))
    ctx = fake_context("actor_gen", [batch.ids], generation=GENERATION)
    result = PolicyActor().generate(model, batch, ctx)
    assert result.ids == batch.ids
    assert all(len(lens) == 2 for lens in result.seqlens["input_ids"])
    for prompt, tokens, masks, flags in zip(
        batch.samples("prompt_ids"),
        result.sequences("input_ids"),
        result.sequences("prompt_mask"),
        result.sequences("truncated"),
        strict=True,
    ):
        for t, m, flag in zip(tokens, masks, flags, strict=True):
            assert torch.equal(t[m], prompt)
            assert torch.equal(t[: len(prompt)], prompt)
            assert flag.item() == (t[-1].item() != N_TOKENS - 1)
    logprobs = PolicyActor().inference(model, result, ctx)
    torch.testing.assert_close(logprobs["logprobs"], result["old_logprobs"], rtol=1e-6, atol=1e-6)
    assert logprobs.schemas["logprobs"] == result.schemas["old_logprobs"]


def test_greedy_sampling_recomputes_at_temperature_one() -> None:
    assert training_temperature(GenerationConfig(temperature=0.0)) == 1.0
    assert training_temperature(GENERATION) == TEMPERATURE


def test_the_minibatches_of_all_passes_are_the_optimizer_steps() -> None:
    batch = experience_batch(6, n_tokens=N_TOKENS, n_responses=2)
    engine = FakeEngine(Bigram(N_TOKENS))
    options = PPOOptions(n_minibatches=2, ppo_epochs=3)
    ctx = fake_context("t", minibatches_of(batch, 2) * 3, n_passes=3, algorithm=options, generation=GENERATION)
    PolicyActor().train_step(fake_model("actor", engine), batch, ctx)
    assert len(engine.normalisers) == PolicyActor().optimizer_steps_per_call(6, options) == 6


@pytest.mark.parametrize("normaliser", ["tokens", "sequences", "constant"])
def test_each_pass_weighs_tokens_by_its_own_minibatches(normaliser: str) -> None:
    """Two passes over one batch are as two calls, of which the second has other minibatches."""
    batch = experience_batch(6, n_tokens=N_TOKENS, n_responses=2)
    options = PPOOptions(loss_normaliser=normaliser, early_stop_ratio=None, kl_coef=0.0)
    first, second = [batch.ids[:2], batch.ids[2:]], [batch.ids[:1], batch.ids[1:]]

    def train_on(module: Bigram, minibatches: list[tuple[str, ...]], n_passes: int) -> float:
        ctx = fake_context("t", minibatches, n_passes=n_passes, algorithm=options, generation=GENERATION)
        return PolicyActor().train_step(fake_model("actor", FakeEngine(module)), batch, ctx)["actor/pg_loss"]

    at_once, apart = Bigram(N_TOKENS), Bigram(N_TOKENS)
    loss = train_on(at_once, [*first, *second], 2)
    losses = [train_on(apart, first, 1), train_on(apart, second, 1)]
    torch.testing.assert_close(at_once.logits, apart.logits)
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-5, abs=1e-7)


def test_ppo_solves_a_bandit() -> None:
    """Two prompts, each with one good answer token; generation, inference and training by the interfaces alone."""
    options = PPOOptions(n_minibatches=2, ppo_epochs=2, kl_coef=0.01)
    generation = GenerationConfig(max_new_tokens=2, n_responses=8)
    actor_module, critic_module, ref_module = Bigram(N_TOKENS), Bigram(N_TOKENS, 1), Bigram(N_TOKENS)
    actor, critic, ref = PolicyActor(), PPOCritic(), PolicyActor()
    actor_model = fake_model("actor", FakeEngine(actor_module, lr=2.0))
    critic_model = fake_model("critic", FakeEngine(critic_module, lr=0.5))
    ref_model = fake_model("ref", FakeEngine(ref_module))
    means = []
    for step in range(1, 31):
        batch = SequenceSample.from_lists(
            tuple(f"{step}/{i}" for i in range(8)),
            {"prompt_ids": (prompts(1).schemas["prompt_ids"], [[torch.tensor([i % 2])] for i in range(8)])},
        )
        ctx = fake_context(
            "call",
            minibatches_of(batch, 2) * 2,
            n_passes=2,
            algorithm=options,
            generation=generation,
            step=step,
            n_mbs=2,
        )
        data = actor.generate(actor_model, batch, ctx)
        firsts = [(int(t[0]), int(t[1])) for sample in data.sequences("input_ids") for t in sample]
        rewards = torch.tensor([1.0 if answer == prompt + 2 else 0.0 for prompt, answer in firsts])
        data = data.update(data.derive("input_ids", {"rewards": (SEQUENCE, rewards)}))
        data = data.update(ref.inference(ref_model, data, ctx).remap({"logprobs": "ref_logprobs"}))
        data = data.update(critic.inference(critic_model, data, ctx))
        metrics = actor.train_step(actor_model, data, ctx) | critic.train_step(critic_model, data, ctx)
        means.append(metrics["reward/mean"])
        assert all(math.isfinite(value) for value in metrics.values())
    assert means[0] < 0.4
    assert sum(means[-3:]) / 3 > 0.9
    assert metrics["kl/mean"] > 0.5
    assert metrics["response_length/mean"] <= 2.0
    assert metrics["prompt_length/mean"] == 1.0

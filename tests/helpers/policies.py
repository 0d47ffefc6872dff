"""Rollouts for tests of policy gradients, and one minibatch of a policy through a real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from realrl.algo.api import MicroBatching, Model
from realrl.algo.policy.actor import PolicyActor
from realrl.algo.policy.rollout import Rollout
from realrl.config.policy_options import PolicyOptions, SafeRLHFOptions
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.graph.mfc import ModelName
from realrl.sched.messages import KeySchema, Per
from tests.helpers.fake_engine import FakeTokenizer, fake_context
from tests.helpers.supervised import GradientEngine

GENERATION = GenerationConfig(temperature=0.8, max_new_tokens=12, n_responses=3)
SCHEMAS = {
    "input_ids": KeySchema("int64", Per.TOKEN),
    "prompt_mask": KeySchema("bool", Per.TOKEN),
    "truncated": KeySchema("bool", Per.SEQUENCE),
    **{key: KeySchema("float32", Per.TOKEN) for key in ("values", "cost_values")},
    **{key: KeySchema("float32", Per.SEQUENCE) for key in ("rewards", "other_rewards", "greedy_rewards", "costs")},
    "greedy_truncated": KeySchema("bool", Per.SEQUENCE),
}
LOGPROBS = ("old_logprobs", "ref_logprobs", "behavior_logprobs", "teacher_logprobs")

CASES: dict[str, PolicyOptions] = {
    "gae": SafeRLHFOptions(advantage="gae", gae_lambda=0.9, gamma=0.97),
    "grpo": PolicyOptions(advantage="grpo", loss_normaliser="sequences", kl_loss_coef=0.04),
    "dr_grpo": PolicyOptions(advantage="dr_grpo", loss_normaliser="constant", entropy_coef=0.01),
    "dapo": PolicyOptions(advantage="grpo", clip_ratio_high=0.28),
    "gspo": PolicyOptions(advantage="grpo", policy_loss="sequence_clip", loss_normaliser="sequences", clip_ratio=0.01),
    "rloo": PolicyOptions(advantage="rloo", policy_loss="response_clip", loss_normaliser="sequences", kl_coef=0.05),
    "remax": PolicyOptions(advantage="remax", policy_loss="reinforce", kl_coef=0.01),
    "reinforce_pp": PolicyOptions(advantage="reinforce_pp", kl_coef=0.01, gamma=0.95, normalise_advantages=True),
    "cispo": PolicyOptions(advantage="grpo", policy_loss="cispo", clip_ratio_high=0.3),
    "reverse_kl": PolicyOptions(advantage="reverse_kl"),
    "versus": PolicyOptions(advantage="versus"),
    "lagrangian": SafeRLHFOptions(advantage="lagrangian", cost_limit=0.2),
    "mixture": PolicyOptions(advantage={"grpo": 0.7, "rloo": 0.3}, kl_loss_coef=0.1, kl_estimator="k2"),
}


def rollout_batch(
    n_samples: int, *, vocab_size: int, seed: int = 0, n_responses: int = 3, junk: float = 0.0, others: float = -1.5
) -> SequenceSample:
    """Make a random batch with every key that a piece reads.

    Args:
        n_samples: number of samples, each a prompt of 1 to 4 tokens with `n_responses` responses of 1 to 8.
        vocab_size: bound of the tokens.
        seed: seed of all random numbers.
        n_responses: responses of each sample; the other player has 2, the greedy policy 1.
        junk: value of log-probabilities and values on prompts.
        others: typical value of log-probabilities.
    """
    generator = torch.Generator().manual_seed(seed)

    def length(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    columns: dict[str, list[list[torch.Tensor]]] = {}
    for _ in range(n_samples):
        sample: dict[str, list[torch.Tensor]] = {key: [] for key in (*SCHEMAS, *LOGPROBS)}
        prompt = torch.randint(0, vocab_size, (length(5),), generator=generator)
        for _ in range(n_responses):
            response = torch.randint(0, vocab_size, (length(9),), generator=generator)
            tokens, n = torch.cat([prompt, response]), len(response)
            before = torch.full((len(prompt) - 1,), junk)
            old = others + 0.3 * torch.randn(n, generator=generator)
            sample["input_ids"].append(tokens)
            sample["prompt_mask"].append(torch.arange(len(tokens)) < len(prompt))
            for key in LOGPROBS:
                near = old if key == "old_logprobs" else old + 0.3 * torch.randn(n, generator=generator)
                sample[key].append(torch.cat([before, near]))
            for key in ("values", "cost_values"):
                sample[key].append(torch.cat([before, torch.randn(n + 1, generator=generator)]))
            for key in ("rewards", "costs"):
                sample[key].append(torch.randn(1, generator=generator))
            sample["truncated"].append(torch.tensor([length(3) == 1]))
        sample["other_rewards"] = list(torch.randn(2, 1, generator=generator))
        sample["greedy_rewards"] = [torch.randn(1, generator=generator)]
        sample["greedy_truncated"] = [torch.tensor([False])]
        for key, tensors in sample.items():
            columns.setdefault(key, []).append(tensors)
    schemas = SCHEMAS | dict.fromkeys(LOGPROBS, KeySchema("float32", Per.TRANSITION))
    ids = [f"1/{i}" for i in range(n_samples)]
    return SequenceSample.from_lists(ids, {key: (schemas[key], columns[key]) for key in schemas})


def rollout_of(batch: SequenceSample, options: PolicyOptions, **more: Any) -> Rollout:
    """Make the rollout of a batch on a single rank, with the options' own weight of the KL penalty."""
    return Rollout(batch, options, lambda tensor, op="sum": tensor.clone(), options.kl_coef, **more)


def gradients_of(
    engine: DecoderEngine, batch: SequenceSample, options: PolicyOptions, cut: MicroBatching | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train on one minibatch of all samples, for metrics and gradient; the engine keeps its parameters."""
    recorder = GradientEngine(engine)
    model = Model(ModelName("actor"), recorder, FakeTokenizer(2))  # type: ignore[arg-type]
    ctx = fake_context("actor_train", [batch.ids], algorithm=options, generation=GENERATION)
    ctx = replace(ctx, micro_batching=cut or MicroBatching())
    return PolicyActor().train_step(model, batch, ctx), recorder.gradients

"""What PPO works out from a whole batch before it is cut into minibatches: token rewards, advantages, returns.

The actor's and the critic's train_step both do this from the same inputs, each over its own ranks, and so agree without
talking to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realrl.algo.gae import gae
from realrl.algo.kl import sequence_kl, shape_scores, token_rewards
from realrl.algo.normalise import AllReduce, Moments
from realrl.algo.packed import Actions, action_mask, before_transition
from realrl.config.algorithms import PPOOptions
from realrl.data.checks import SampleError
from realrl.data.sample import SequenceSample
from realrl.sched.messages import Per

EXPERIENCE_KEYS = {
    "input_ids": Per.TOKEN,
    "prompt_mask": Per.TOKEN,
    "old_logprobs": Per.TRANSITION,
    "ref_logprobs": Per.TRANSITION,
    "rewards": Per.SEQUENCE,
    "values": Per.TOKEN,
    "truncated": Per.SEQUENCE,
}


@dataclass(frozen=True)
class Experience:
    """This rank's share of a batch, worked out; tensors lie where the batch's tensors lie.

    Attributes:
        actions: of the batch.
        mask: bool [T - S], the actions.
        values: float32 [T - S], critic's values of the states that transitions start from, in reward units.
        advantages: float32 [T - S], not normalised; 0 off the actions.
        returns: float32 [T - S], in reward units; 0 off the actions.
        kl: moments of the per-sequence KL to the reference, over all ranks; `kl.count` is the number of sequences.
    """

    actions: Actions
    mask: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    kl: Moments


def work_out(batch: SequenceSample, options: PPOOptions, kl_coef: float, all_reduce: AllReduce) -> Experience:
    """Token rewards with the KL penalty, then advantages and returns.

    Args:
        batch: with `EXPERIENCE_KEYS`.
        options: of the algorithm.
        kl_coef: weight of the KL penalty for this batch.
        all_reduce: sum over ranks.

    Raises:
        SampleError: a key has another granularity than in `EXPERIENCE_KEYS`.
    """
    for key, per in EXPERIENCE_KEYS.items():
        found = batch.schemas[key].per
        if found is not per:
            raise SampleError(f"key {key!r} is per {found.value}, and PPO needs it per {per.value}", key=key)
    cu_seqlens = batch.cu_seqlens("input_ids")
    mask = action_mask(batch["prompt_mask"], cu_seqlens)
    actions = Actions.find(mask, cu_seqlens)
    scores = shape_scores(
        batch["rewards"],
        batch["truncated"],
        options.reward_scaling,
        options.reward_bias,
        options.reward_clip,
        options.score_truncated,
    )
    rewards = token_rewards(batch["old_logprobs"], batch["ref_logprobs"], scores, actions, kl_coef)
    advantages, returns = gae(
        rewards, batch["values"], mask, cu_seqlens, batch["truncated"], options.gamma, options.gae_lambda
    )
    kl = sequence_kl(batch["old_logprobs"], batch["ref_logprobs"], actions)
    values = before_transition(batch["values"], cu_seqlens)
    return Experience(actions, mask, values, advantages, returns, Moments.of(kl, all_reduce))


def batch_metrics(batch: SequenceSample, experience: Experience, all_reduce: AllReduce) -> Mapping[str, float]:
    """Metrics of a batch as the actor reports them, over all ranks.

    Lengths are in tokens, `kl/mean` is a sum over a response in nats, `reward/*` are rewards as they came.
    """
    lengths = batch.cu_seqlens("input_ids").diff().double()
    responses = experience.actions.counts.double()
    reward = Moments.of(batch["rewards"], all_reduce)
    return {
        "reward/mean": reward.mean,
        "reward/std": reward.std,
        "kl/mean": experience.kl.mean,
        "response_length/mean": Moments.of(responses, all_reduce).mean,
        "prompt_length/mean": Moments.of(lengths - responses, all_reduce).mean,
        "truncated/mean": Moments.of(batch["truncated"], all_reduce).mean,
    }


def explained_variance(experience: Experience, all_reduce: AllReduce) -> float:
    """1 - Var(returns - values) / Var(returns) over the actions of all ranks; 0 if all returns are equal."""
    returns = experience.returns[experience.mask].double()
    errors = returns - experience.values[experience.mask].double()
    total = Moments.of(returns, all_reduce).variance
    residual = Moments.of(errors, all_reduce).variance
    return 1.0 - residual / total if total > 0.0 else 0.0

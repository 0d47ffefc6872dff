"""Advantages and returns of a whole batch under a critic, worked out before it is cut into minibatches.

The actor's and the critic's train_step both do this from the same inputs, each over its own ranks, and so agree without
talking to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realrl.algo.normalise import AllReduce, Moments
from realrl.algo.packed import before_transition
from realrl.algo.policy.gae import gae
from realrl.algo.policy.rollout import Rollout


@dataclass(frozen=True)
class Experience:
    """What generalised advantage estimation makes of a rollout; all float32 [T - S], in reward units.

    Attributes:
        values: critic's values of the states that transitions start from.
        advantages: not normalised; 0 off the actions.
        returns: 0 off the actions.
    """

    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def generalised(rollout: Rollout, rewards: torch.Tensor, values: torch.Tensor) -> Experience:
    """Advantages and returns with the options' gamma and gae_lambda.

    Args:
        rollout: of the batch; needs `truncated`.
        rewards: [T - S], token rewards.
        values: [T], critic's value of each prefix.
    """
    o, truncated = rollout.options, rollout.batch["truncated"]
    advantages, returns = gae(rewards, values, rollout.mask, rollout.cu_seqlens, truncated, o.gamma, o.gae_lambda)
    return Experience(before_transition(values, rollout.cu_seqlens), advantages, returns)


def batch_metrics(rollout: Rollout) -> Mapping[str, float]:
    """Metrics of a batch as a policy reports them, over all ranks.

    Lengths are in tokens, `kl/mean` is a sum over a response in nats, `reward/*` are rewards as they came. `kl/*` and
    `reward/*` are there if the batch has reference log-probabilities and rewards.
    """
    lengths = rollout.cu_seqlens.diff().double()
    responses = rollout.actions.counts.double()
    metrics = {}
    if "rewards" in rollout.batch:
        reward = rollout.moments(rollout.batch["rewards"])
        metrics = {"reward/mean": reward.mean, "reward/std": reward.std}
    if rollout.sequence_kl is not None:
        metrics["kl/mean"] = rollout.moments(rollout.sequence_kl).mean
    return {
        **metrics,
        "response_length/mean": rollout.moments(responses).mean,
        "prompt_length/mean": rollout.moments(lengths - responses).mean,
        "truncated/mean": rollout.moments(rollout.batch["truncated"]).mean,
    }


def explained_variance(experience: Experience, mask: torch.Tensor, all_reduce: AllReduce) -> float:
    """1 - Var(returns - values) / Var(returns) over the actions of all ranks; 0 if all returns are equal."""
    returns = experience.returns[mask].double()
    errors = returns - experience.values[mask].double()
    total = Moments.of(returns, all_reduce).variance
    residual = Moments.of(errors, all_reduce).variance
    return 1.0 - residual / total if total > 0.0 else 0.0

"""Advantages and returns of a whole batch under a critic, computed before the batch is cut into minibatches.

The train steps of actor and critic compute them from the same inputs, each over its own ranks, so they agree without
communicating.
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
    """Result of generalised advantage estimation; all float32 [T - S], in reward units.

    Attributes:
        values: the critic's value before each transition.
        advantages: not normalised; 0 off the actions.
        returns: 0 off the actions.
    """

    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def generalised(rollout: Rollout, rewards: torch.Tensor, values: torch.Tensor) -> Experience:
    """Advantages and returns with the options' gamma and gae_lambda.

    Args:
        rollout: its batch needs `truncated`.
        rewards: [T - S], token rewards.
        values: [T], the critic's value of each prefix.
    """
    o, truncated = rollout.options, rollout.batch["truncated"]
    advantages, returns = gae(rewards, values, rollout.mask, rollout.cu_seqlens, truncated, o.gamma, o.gae_lambda)
    return Experience(before_transition(values, rollout.cu_seqlens), advantages, returns)


def batch_metrics(rollout: Rollout) -> Mapping[str, float]:
    """Metrics of a policy's batch over all ranks.

    Lengths are in tokens. `kl/mean` is a sum over a response, in nats; absent without reference log-probabilities.
    `reward/*` are rewards before shaping; absent without rewards.
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

"""Generalised advantage estimation on packed sequences.

Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equations 11 and 16:
delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_k (gamma lambda)^k delta_{t+k}, return_t = A_t + V_t.

Only actions are time steps: the next state of an action is the state of the sequence's next action. Prompt tokens, and
tokens that an environment put between two responses, are skipped with their values.

The train steps of actor and critic compute advantages from the same inputs, each over its own ranks, so they agree
without communicating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from realrl.algo.normalise import AllReduce, Moments
from realrl.algo.packed import Actions, before_transition, last_token
from realrl.algo.policy.rollout import Rollout


def discounted_suffix_sums(x: torch.Tensor, remaining: torch.Tensor, discount: float) -> torch.Tensor:
    """y_i = sum over j >= i in the same segment of discount^(j - i) x_j.

    Doubling scan: after round k, y_i holds the next 2^k terms, so a batch of any size takes log2(longest segment)
    rounds of whole-tensor work. The order of additions depends on the distance to the segment's end only, never on
    where a segment lies in the batch.

    Args:
        x: [R], segments one after the other.
        remaining: int64 [R], number of later elements in the same segment.
        discount: in [0, 1].
    """
    if x.numel() == 0:
        return x.clone()
    longest = int(remaining.max()) + 1
    y, span = x, 1
    while span < longest:
        ahead = torch.where(remaining[:-span] >= span, y[span:], 0.0)
        y = torch.cat([y[:-span] + discount**span * ahead, y[-span:]])
        span *= 2
    return y


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of all actions.

    Args:
        rewards: [T - S], token rewards.
        values: [T], critic's value of each prefix, in reward units.
        mask: bool [T - S], the actions; nothing is read where it is False.
        cu_seqlens: [S + 1].
        truncated: bool [S]; the value after the last action is 0 after a real end, and the value of the sequence's last
            token (bootstrap) after a truncation.
        gamma: discount per action.
        gae_lambda: lambda.

    Returns:
        (advantages, returns), float32 [T - S] each, 0 where the mask is False. Computed in float64.
    """
    actions = Actions.find(mask, cu_seqlens)
    r = rewards[actions.transition].double()
    v = values[actions.token].double()
    bootstrap = torch.where(truncated, last_token(values, cu_seqlens).double(), 0.0)
    v_next = torch.where(actions.remaining == 0, bootstrap[actions.sequence], v.roll(-1))
    advantages = discounted_suffix_sums(r + gamma * v_next - v, actions.remaining, gamma * gae_lambda)
    n_transitions = mask.shape[0]
    return actions.spread(advantages, n_transitions), actions.spread(advantages + v, n_transitions)


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
    values = {"reward": rollout.batch["rewards"]} if "rewards" in rollout.batch else {}
    if rollout.sequence_kl is not None:
        values["kl"] = rollout.sequence_kl
    values |= {
        "response_length": responses,
        "prompt_length": lengths - responses,
        "truncated": rollout.batch["truncated"],
    }
    moments = dict(zip(values, Moments.of_each([*values.values()], rollout.all_reduce), strict=True))
    metrics = {"reward/mean": 0.0, "reward/std": moments["reward"].std} if "reward" in moments else {}
    return metrics | {f"{name}/mean": found.mean for name, found in moments.items()}


def explained_variance(experience: Experience, mask: torch.Tensor, all_reduce: AllReduce) -> float:
    """1 - Var(returns - values) / Var(returns) over the actions of all ranks; 0 if all returns are equal."""
    returns = experience.returns[mask].double()
    errors = returns - experience.values[mask].double()
    total, residual = (found.variance for found in Moments.of_each([returns, errors], all_reduce))
    return 1.0 - residual / total if total > 0.0 else 0.0

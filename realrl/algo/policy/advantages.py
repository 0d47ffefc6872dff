"""Advantage estimators, chosen by ``algorithm.advantage``.

Each maps a `Rollout` to float32 [T - S], 0 off the actions. The caller adds up several with their weights, and whitens
the sum over the batch.
"""

from __future__ import annotations

import math

import torch

from realrl.algo.normalise import Moments
from realrl.algo.policy.gae import discounted_suffix_sums, generalised
from realrl.algo.policy.rollout import Rollout

GROUP_STD_EPS = 1e-4


def gae(rollout: Rollout) -> torch.Tensor:
    """Generalised advantage estimation over token rewards with a KL penalty; see `realrl.algo.policy.gae`."""
    rewards = rollout.token_rewards(rollout.scores)
    return generalised(rollout, rewards, rollout.batch["values"]).advantages


def grpo(rollout: Rollout) -> torch.Tensor:
    """(r - mean of its group) / (standard deviation of its group + 1e-4), on every action of a response.

    Shao et al. 2024, "DeepSeekMath: pushing the limits of mathematical reasoning in open language models", section
    4.1.2, outcome supervision. The standard deviation is the unbiased one, over n - 1.
    """
    centred = rollout.scores.double() - rollout.group_mean(rollout.scores)
    n = rollout.group_sizes[rollout.group]
    variance = rollout.group_sum(centred.square()) / (n - 1).clamp(min=1)
    return rollout.per_transition(centred / (variance.sqrt() + GROUP_STD_EPS))


def dr_grpo(rollout: Rollout) -> torch.Tensor:
    """r - mean of its group: Liu et al. 2025, "Understanding R1-Zero-like training: a critical perspective"."""
    return rollout.per_transition(rollout.scores.double() - rollout.group_mean(rollout.scores))


def rloo(rollout: Rollout) -> torch.Tensor:
    """r - mean r of the other responses in its group, where r = reward - kl_coef * KL of the response to the reference.

    Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE style optimization for learning from human feedback in
    LLMs", equation 8; the KL penalty of a whole response as in equation 3. A response alone in its group gets 0.
    """
    scores = rollout.scores.double()
    if rollout.sequence_kl is not None:
        scores = scores - rollout.kl_coef * rollout.sequence_kl
    n = rollout.group_sizes[rollout.group]
    others = (rollout.group_sum(scores) - scores) / (n - 1).clamp(min=1)
    return rollout.per_transition(torch.where(n > 1, scores - others, 0.0))


def remax(rollout: Rollout) -> torch.Tensor:
    """Discounted sum of token rewards from each action on, minus the reward of the greedy response to the same prompt.

    Li et al. 2024, "ReMax: a simple, effective, and efficient reinforcement learning method for aligning large language
    models", section 4.1. With gamma 1 and no KL penalty: r(sampled) - r(greedy). Reads the first greedy response of
    each sample.
    """
    greedy = rollout.shaped(rollout.batch["greedy_rewards"], rollout.batch["greedy_truncated"])
    sizes = [len(responses) for responses in rollout.batch.seqlens["greedy_rewards"]]
    firsts = torch.tensor([0, *sizes], device=greedy.device).cumsum(0)[:-1]
    baseline = greedy[firsts][rollout.group]
    return _returns(rollout) - rollout.per_transition(baseline)


def reinforce_pp(rollout: Rollout) -> torch.Tensor:
    """Discounted sum of the token rewards, KL penalty included, from each action on.

    Hu 2025, "REINFORCE++: a simple and efficient approach for aligning large language models", section 3; the paper
    normalises it over the batch (``algorithm.normalise_advantages``).
    """
    return _returns(rollout)


def reverse_kl(rollout: Rollout) -> torch.Tensor:
    """log pi_teacher - log pi_old of each sampled token: minus the one-sample estimate of KL(student || teacher).

    Agarwal et al. 2024, "On-policy distillation of language models: learning from self-generated mistakes", equation 3,
    with reverse KL. This is its policy gradient if each token is credited with its own term only.
    """
    at = rollout.actions.transition
    gap = rollout.batch["teacher_logprobs"][at].double() - rollout.batch["old_logprobs"][at].double()
    rollout.metrics["distill/reverse_kl"] = -rollout.moments(gap).mean
    return rollout.actions.spread(gap, rollout.mask.shape[0])


def versus(rollout: Rollout) -> torch.Tensor:
    """Payoff of a symmetric game against another player's responses to the same prompt, less its mean over the group.

    A response wins 1 against each other one with a smaller reward, loses 1 against a larger and draws with an equal
    one; its payoff is the mean over the other player's responses. With a single response nothing is subtracted.
    """
    others = rollout.batch.sequences("other_rewards")
    payoffs = [
        (mine.double()[:, None] - torch.cat(theirs).double()[None, :]).sign().mean(1)
        for mine, theirs in zip(rollout.batch.samples("rewards"), others, strict=True)
    ]
    payoff = torch.cat(payoffs) if payoffs else rollout.batch["rewards"].double()
    rollout.metrics["game/payoff"] = rollout.moments(payoff).mean
    rollout.metrics["game/win_rate"] = rollout.moments((payoff + 1.0) / 2.0).mean
    n = rollout.group_sizes[rollout.group]
    return rollout.per_transition(torch.where(n > 1, payoff - rollout.group_mean(payoff), payoff))


def lagrangian(rollout: Rollout) -> torch.Tensor:
    """(A_reward - lambda A_cost) / (1 + lambda); then log lambda += lambda_lr lambda (mean cost - cost_limit).

    Dai et al. 2024, "Safe RLHF: safe reinforcement learning from human feedback", appendix B.3: half of the KL penalty
    is a reward and half is a cost, each side has its own critic, and lambda follows gradient ascent on log lambda. The
    cost of a response is positive where it does harm. lambda is kept between steps and at most lambda_max.
    """
    o, batch = rollout.options, rollout.batch
    reward_side = generalised(rollout, rollout.token_rewards(rollout.scores, 0.5), batch["values"])
    cost_side = generalised(rollout, rollout.token_rewards(batch["costs"].float(), -0.5), batch["cost_values"])
    log_lambda = rollout.state.get("log_lambda", math.log(o.lambda_init))
    weight = math.exp(log_lambda)
    cost = Moments.of(batch["costs"], rollout.all_reduce)
    if cost.count:
        log_lambda += o.lambda_lr * weight * (cost.mean - o.cost_limit)
        rollout.state["log_lambda"] = min(log_lambda, math.log(o.lambda_max))
    rollout.metrics.update({"cost/mean": cost.mean, "cost/std": cost.std, "cost/lambda": weight})
    return (reward_side.advantages - weight * cost_side.advantages) / (1.0 + weight)


def _returns(rollout: Rollout) -> torch.Tensor:
    """float32 [T - S]: discounted token rewards from each action on."""
    actions = rollout.actions
    rewards = rollout.token_rewards(rollout.scores)[actions.transition].double()
    sums = discounted_suffix_sums(rewards, actions.remaining, rollout.options.gamma)
    return actions.spread(sums, rollout.mask.shape[0])

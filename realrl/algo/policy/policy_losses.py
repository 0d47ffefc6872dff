"""Policy losses, chosen by ``algorithm.policy_loss``.

Each gives one number per action; `realrl.algo.policy.actor` normalises, and adds the KL term and the entropy bonus. The
loss of a whole response is repeated on each of its actions, so that its mean over them is the response's loss.

Log-ratios are clipped at +-20, because an infinite ratio would make the loss NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from realrl.algo.packed import Actions, response_mask
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample

MAX_LOG_RATIO = 20.0
SMALLEST_REST = 1e-6


@dataclass(frozen=True)
class ActionBatch:
    """The R actions of a micro-batch; all float32 [R], in the order of the transitions.

    Attributes:
        batch: the micro-batch, with `input_ids`, `prompt_mask` and the keys that the piece declared.
        logprobs: under the trained policy, with gradient.
        old_logprobs: under the policy at the start of the step.
        logprobs_of: int64 [R, K] tokens in the actions' places -> float32 [R, K] log-probabilities under the trained
            policy, with gradient. Costs a second pass through the language-model head.
    """

    batch: SequenceSample
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    logprobs_of: Callable[[torch.Tensor], torch.Tensor] | None = None

    @cached_property
    def actions(self) -> Actions:
        return Actions.find(response_mask(self.batch), self.batch.cu_seqlens("input_ids"))

    @cached_property
    def logratio(self) -> torch.Tensor:
        """log pi - log pi_old of each action, with gradient, clipped at +-20."""
        return _cut(self.logprobs - self.old_logprobs)

    def rows(self, key: str) -> torch.Tensor:
        """[R, ...]: rows of a per-transition key at the actions."""
        return self.batch[key][response_mask(self.batch)]

    def response_sums(self, values: torch.Tensor) -> torch.Tensor:
        """[R]: the sum of `values` [R] over each action's response, with gradient."""
        sums = values.new_zeros(self.actions.counts.shape).index_add(0, self.actions.sequence, values)
        return sums[self.actions.sequence]

    def response_means(self, values: torch.Tensor) -> torch.Tensor:
        """[R]: the mean of `values` [R] over each action's response, with gradient."""
        return self.response_sums(values) / self.actions.counts[self.actions.sequence]


@dataclass(frozen=True)
class PolicyLoss:
    """Losses and statistics per action.

    Attributes:
        losses: [R], with gradient.
        stats: [R] each, detached; logged as means over actions under the role's name.
    """

    losses: torch.Tensor
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)


def clip(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """max(-A ratio, -A clip(ratio, 1 - clip_ratio, 1 + clip_ratio_high)) with ratio = pi / pi_old of the token.

    Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7. An upper bound of its own: Yu et al.
    2025, "DAPO: an open-source LLM reinforcement learning system at scale", equation 8.

    Stats: clip_fraction, actions whose ratio is outside of the bounds.
    """
    return _clipped(actions.logratio.exp(), actions.advantages, options)


def sequence_clip(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """As `clip`, with ratio = exp(mean of the log-ratios of the response).

    Zheng et al. 2025, "Group sequence policy optimization", equations 5 to 7. The paper takes the mean over responses:
    ``algorithm.loss_normaliser=sequences``.
    """
    logratio = _cut(actions.response_means(actions.logprobs - actions.old_logprobs))
    return _clipped(logratio.exp(), actions.advantages, options)


def response_clip(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """As `clip`, with the ratio of the whole response's probability, exp(sum of its log-ratios).

    At the policy that sampled, its gradient is REINFORCE's with the response as one action: Ahmadian et al. 2024, "Back
    to basics", equation 6. Take the mean over responses: ``algorithm.loss_normaliser=sequences``.
    """
    logratio = _cut(actions.response_sums(actions.logprobs - actions.old_logprobs))
    return _clipped(logratio.exp(), actions.advantages, options)


def cispo(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """-A min(ratio, 1 + clip_ratio_high) log pi, no gradient through the ratio: no action's gradient vanishes.

    MiniMax 2025, "MiniMax-M1: scaling test-time compute efficiently with lightning attention", equations 4 and 5.
    Without clip_ratio_high the ratio is not bounded.

    Stats: clip_fraction.
    """
    ratio = actions.logratio.detach().exp()
    weights = ratio if options.clip_ratio_high is None else ratio.clamp(max=1.0 + options.clip_ratio_high)
    return PolicyLoss(-actions.advantages * weights * actions.logprobs, {"clip_fraction": (ratio > weights).float()})


def reinforce(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """-A log pi: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning", theorem 1. Right for a single optimizer step per batch; several need a ratio.
    """
    return PolicyLoss(-actions.advantages * actions.logprobs)


def teacher_kl(actions: ActionBatch, options: PolicyOptions) -> PolicyLoss:
    """KL(pi || teacher) of the next token, with all tokens but the teacher's likeliest `teacher_top_k` taken as one.

    sum over the top tokens of p log(p / q), plus the same for the remaining mass of both. At most the KL of the whole
    distributions (log-sum inequality), and equal to it when `teacher_top_k` is the size of the vocabulary. Agarwal et
    al. 2024, "On-policy distillation of language models", equation 3, with reverse KL. Advantages are not read.
    """
    assert actions.logprobs_of is not None
    logq = actions.rows("teacher_top_logprobs").float()
    logp = actions.logprobs_of(actions.rows("teacher_top_tokens"))
    p = logp.exp()
    p_rest, q_rest = ((1.0 - x.sum(1)).clamp(min=SMALLEST_REST) for x in (p, logq.exp()))
    return PolicyLoss((p * (logp - logq)).sum(1) + p_rest * (p_rest / q_rest).log())


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Estimates of KL(pi || ref) from one sample each, [R], with d = log ref - log pi, clipped at +-20.

    k1 = -d; k2 = d^2 / 2; k3 = exp(d) - d - 1, which is never negative (http://joschu.net/blog/kl-approx.html).
    """
    d = _cut(ref_logprobs - logprobs)
    if kind == "k1":
        return -d
    return 0.5 * d.square() if kind == "k2" else torch.expm1(d) - d


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, options: PolicyOptions) -> PolicyLoss:
    low, high = options.clip_bounds
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    outside = (ratio < low) | (ratio > high)
    return PolicyLoss(losses, {"clip_fraction": outside.detach().float()})


def _cut(logratio: torch.Tensor) -> torch.Tensor:
    return logratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

"""KL to the reference policy: the penalty in the token rewards, and the proportional controller of its weight.

Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2: token rewards
-kl_coef (log pi - log ref)_t with the score on the last action, and the proportional controller of kl_coef.
"""

from __future__ import annotations

import torch

from realrl.algo.packed import Actions

MAX_RELATIVE_ERROR = 0.2


def adapted_coef(coef: float, kl: float, n_sequences: int, *, target: float, horizon: float) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n_sequences / horizon): a KL above target raises the weight.

    A batch larger than the horizon counts as one horizon, so that the weight can never become negative.

    Args:
        kl: mean KL of a sequence, in nats, over a batch of `n_sequences`.
    """
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1.0 + error * min(n_sequences / horizon, 1.0))


def sequence_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, actions: Actions) -> torch.Tensor:
    """float64 [S]: sum over each sequence's actions of log pi - log ref, both [T - S]."""
    difference = logprobs[actions.transition].double() - ref_logprobs[actions.transition].double()
    return actions.sums(difference)


def token_rewards(
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    scores: torch.Tensor,
    actions: Actions,
    kl_coef: float,
) -> torch.Tensor:
    """float32 [T - S]: -kl_coef (old_logprobs - ref_logprobs) on actions, plus the score on each last action.

    Args:
        old_logprobs: [T - S].
        ref_logprobs: [T - S].
        scores: [S], already scaled and clipped.
        kl_coef: weight of the penalty.
    """
    at = actions.transition
    rewards = -kl_coef * (old_logprobs[at].double() - ref_logprobs[at].double())
    rewards = rewards + torch.where(actions.remaining == 0, scores.double()[actions.sequence], 0.0)
    return actions.spread(rewards, old_logprobs.shape[0])


def shape_scores(
    rewards: torch.Tensor,
    truncated: torch.Tensor,
    scaling: float,
    bias: float,
    clip: float | None,
    score_truncated: bool,
) -> torch.Tensor:
    """float32 [S]: clip((reward - bias) * scaling, +-clip); 0 for truncated responses unless `score_truncated`.

    ``clip=None`` does not clip.
    """
    scores = (rewards.float() - bias) * scaling
    scores = scores if clip is None else scores.clamp(-clip, clip)
    return scores if score_truncated else torch.where(truncated, 0.0, scores)

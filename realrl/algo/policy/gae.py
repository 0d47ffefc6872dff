"""Generalised advantage estimation on packed sequences.

Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equations 11 and 16:
delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_k (gamma lambda)^k delta_{t+k}, return_t = A_t + V_t.

Only actions are time steps: the next state of an action is the state of the sequence's next action. Prompt tokens, and
tokens that an environment put between two responses, are skipped with their values.
"""

from __future__ import annotations

import torch

from realrl.algo.packed import Actions, last_token


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

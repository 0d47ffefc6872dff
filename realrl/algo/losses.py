"""Losses as sums over selected rows, with the sums of their statistics; the caller divides by its normaliser.

All inputs that have a row per transition are [N] with `mask` bool [N]. Unselected rows are dropped before any
arithmetic, so their values (NaN included) reach neither the loss nor a gradient. Computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from realrl.algo.api import LossOutput


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | None,
    huber_delta: float | None,
) -> LossOutput:
    """sum of max(l(v), l(v_old + clip(v - v_old, +-clip))), with l half the squared error, or Huber's loss.

    Args:
        values: new outputs of the value head.
        old_values: its outputs before the update, in the same units.
        returns: targets, in the same units.
        mask: rows that count.
        clip: None leaves the second term out.
        huber_delta: None takes half the squared error.

    Stats: value_loss, and clip_fraction: rows where the second term is the larger one.
    """
    v, old, target = values[mask].float(), old_values[mask].float(), returns[mask].float()
    error = _error_loss(huber_delta)
    losses = error(v - target)
    if clip is None:
        is_clipped = torch.zeros_like(v, dtype=torch.bool)
    else:
        clipped = error(old + (v - old).clamp(-clip, clip) - target)
        is_clipped = (clipped > losses) & ((v - old).abs() > clip)
        losses = torch.maximum(losses, clipped)
    loss = losses.sum()
    return LossOutput(loss, {"value_loss": loss.detach(), "clip_fraction": is_clipped.float().sum()})


def _error_loss(huber_delta: float | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if huber_delta is None:
        return lambda e: 0.5 * e.square()
    return lambda e: functional.huber_loss(e, torch.zeros_like(e), reduction="none", delta=huber_delta)


def pair_loss(scores: torch.Tensor) -> LossOutput:
    """sum over pairs of -log sigmoid(chosen - rejected): Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback", equation 1, for pairs.

    Args:
        scores: [2 P]: chosen, rejected, chosen, rejected, ...

    Stats: loss, accuracy (chosen strictly above rejected), chosen and rejected scores.
    """
    chosen, rejected = scores.float().view(-1, 2).unbind(1)
    loss = -functional.logsigmoid(chosen - rejected).sum()
    stats = {
        "loss": loss.detach(),
        "accuracy": (chosen > rejected).float().sum(),
        "chosen_mean": chosen.detach().sum(),
        "rejected_mean": rejected.detach().sum(),
    }
    return LossOutput(loss, stats)


def nll_loss(logprobs: torch.Tensor, mask: torch.Tensor) -> LossOutput:
    """sum of -log-probability of the selected transitions. Stats: loss."""
    loss = -logprobs[mask].float().sum()
    return LossOutput(loss, {"loss": loss.detach()})

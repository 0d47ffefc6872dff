"""Pieces that a user might write, right and wrong."""

from __future__ import annotations

from typing import Any

import torch

from realrl.algo.policy.rollout import Rollout


def per_response(rollout: Rollout) -> torch.Tensor:
    """A wrong advantage: one number per response instead of one per transition."""
    return rollout.scores


def one_answer(batch: Any, options: Any) -> list[bool]:
    """A wrong filter: it answers for a single sample."""
    return [True]


def length(rollout: Rollout) -> torch.Tensor:
    """An advantage that likes long responses, and declares nothing."""
    return rollout.per_transition(rollout.actions.counts.float())


NOT_A_FUNCTION = 3

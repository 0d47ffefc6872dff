"""Corrections of a reward that follow from the response's length alone."""

from __future__ import annotations

import torch

DEFAULT_CACHE_SHARE = 0.2


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, cache_tokens: int | None = None) -> torch.Tensor:
    """Soft overlong punishment: 0 up to ``max_tokens - cache_tokens``, then falling linearly to -1 at `max_tokens`.

    Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", equation 13.

    Args:
        lengths: int64 [S], tokens of each response, its stop token included.
        max_tokens: length from which the penalty is -1.
        cache_tokens: length of the slope; default: a fifth of `max_tokens`, as in the paper, and at least 1.

    Returns:
        float64 [S], in [-1, 0].

    Raises:
        ValueError: not 0 < cache_tokens <= max_tokens.
    """
    cache = max(1, round(DEFAULT_CACHE_SHARE * max_tokens)) if cache_tokens is None else cache_tokens
    if not 0 < cache <= max_tokens:
        raise ValueError(f"cache_tokens={cache} must be above 0 and at most max_tokens={max_tokens}")
    return ((max_tokens - cache - lengths.double()) / cache).clamp(-1.0, 0.0)

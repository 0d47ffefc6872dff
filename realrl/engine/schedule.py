"""Learning rate as a function of the number of optimizer steps taken."""

from __future__ import annotations

import math

from realrl.config.schema import OptimizerConfig


def n_warmup_steps(config: OptimizerConfig, n_total: int) -> int:
    """Number of optimizer steps before the learning rate is at its peak."""
    return math.ceil(config.warmup_fraction * n_total)


def learning_rate(config: OptimizerConfig, n_taken: int, n_total: int) -> float:
    """Return the rate of the optimizer step that follows `n_taken` earlier ones.

    The rate rises linearly over ceil(warmup_fraction * n_total) steps, and is above zero in the first. Then it follows
    the schedule: one that decays is exactly at ``lr * min_lr_fraction`` after `n_total` steps, and stays there.
    """
    n_warmup = n_warmup_steps(config, n_total)
    if n_taken < n_warmup:
        return config.lr * (n_taken + 1) / n_warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (n_taken - n_warmup) / max(1, n_total - n_warmup))
    decayed = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * decayed)

from __future__ import annotations

import pytest

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import learning_rate

N_TOTAL = 100


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_starts_above_zero_and_ends_at_the_full_rate(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_fraction=0.1)
    rates = [learning_rate(config, i, N_TOTAL) for i in range(11)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2.0)


@pytest.mark.parametrize("min_lr_fraction", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_reaches_its_end_exactly_and_stays_there(schedule: str, min_lr_fraction: float) -> None:
    config = OptimizerConfig(lr=2.0, schedule=schedule, min_lr_fraction=min_lr_fraction)
    rates = [learning_rate(config, i, N_TOTAL) for i in range(2, N_TOTAL)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 2.0 * min_lr_fraction
    for n_taken in (N_TOTAL, N_TOTAL + 1, 10 * N_TOTAL):
        assert learning_rate(config, n_taken, N_TOTAL) == pytest.approx(2.0 * min_lr_fraction)


def test_halfway() -> None:
    for schedule in ("linear", "cosine"):
        config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_fraction=0.0)
        assert learning_rate(config, 50, N_TOTAL) == pytest.approx(1.0)
    assert learning_rate(OptimizerConfig(lr=2.0, schedule="constant"), 99, N_TOTAL) == 2.0


def test_a_single_step_uses_the_full_rate() -> None:
    assert learning_rate(OptimizerConfig(lr=2.0), 0, 1) == 2.0

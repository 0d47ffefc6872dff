from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.normalise import Moments, ValueNorm, whiten
from tests.helpers.fake_engine import ThreadGroup


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


@given(st.integers(0, 1000), st.floats(-1e4, 1e4))
def test_whitened_rows_have_mean_0_and_std_1(seed: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, 3, 50).astype(np.float32)
    mask = rng.random(50) < 0.8
    out = whiten(torch.where(torch.tensor(mask), torch.tensor(x), math.nan), torch.tensor(mask), alone).numpy()
    kept = x[mask].astype(np.float64)
    np.testing.assert_allclose(out[mask], (kept - kept.mean()) / (kept.std() + 1e-5), rtol=1e-5, atol=1e-5)
    assert (out[~mask] == 0).all()


def test_ranks_whiten_together() -> None:
    x = torch.randn(30, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(30) % 3 != 0
    group = ThreadGroup(2)
    parts = group.run(
        [
            lambda s=s, r=r: whiten(x[s], mask[s], lambda t: group.all_reduce(r)(t, "sum"))
            for r, s in enumerate((slice(11), slice(11, None)))
        ]
    )
    torch.testing.assert_close(torch.cat(parts), whiten(x, mask, alone), rtol=1e-6, atol=1e-6)


def test_equal_values_whiten_to_zero() -> None:
    assert whiten(torch.full((3,), 7.0), torch.tensor([True] * 3), alone).tolist() == [0.0] * 3


def test_moments_of_nothing_are_zero() -> None:
    assert Moments.of(torch.empty(0), alone) == Moments(0.0, 0.0, 0.0)


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_statistics_agree_with_their_definition(batches: list[list[float]]) -> None:
    norm, beta = ValueNorm(), 0.9
    mean = square = 0.0
    for batch in batches:
        norm.update(Moments.of(torch.tensor(batch), alone), beta)
        x = np.array(batch, dtype=np.float64)
        mean = beta * mean + (1 - beta) * x.mean()
        square = beta * square + (1 - beta) * (x**2).mean()
    debias = 1 - beta ** len(batches)
    variance = max(square / debias - (mean / debias) ** 2, 1e-2)
    assert norm.mean == pytest.approx(mean / debias, rel=1e-9, abs=1e-9)
    assert norm.std == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-5)


def test_normalise_and_denormalise_are_inverse() -> None:
    norm = ValueNorm()
    x = torch.tensor([3.0, -4.0, 100.0])
    assert torch.equal(norm.normalise(x), x)
    norm.update(Moments(10, 5.0, 9.0), 0.99995)
    assert norm.normalise(x).tolist() == pytest.approx([-2 / 3, -3.0, 95 / 3])
    torch.testing.assert_close(norm.denormalise(norm.normalise(x)), x)


def test_an_empty_batch_changes_nothing() -> None:
    norm = ValueNorm()
    norm.update(Moments(0.0, 0.0, 0.0), 0.9)
    assert (norm.mean, norm.std) == (0.0, 1.0)


def test_state_continues_exactly() -> None:
    first, second = ValueNorm(), ValueNorm()
    first.update(Moments(10, 5.0, 9.0), 0.9)
    second.load_state_dict(first.state_dict())
    for norm in (first, second):
        norm.update(Moments(4, -1.0, 2.0), 0.9)
    assert (first.mean, first.std) == (second.mean, second.std)

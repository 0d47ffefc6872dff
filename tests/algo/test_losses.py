from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.losses import nll_loss, pair_loss, value_loss

seeds = st.integers(0, 10_000)


def draw(seed: int, n: int = 40) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(-1, 0.5, n), rng.normal(-1, 0.5, n), rng.normal(0, 2, n), rng.random(n) < 0.7


def floats(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def error_loss(e: np.ndarray, delta: float | None) -> np.ndarray:
    return 0.5 * e**2 if delta is None else np.where(abs(e) <= delta, 0.5 * e**2, delta * (abs(e) - 0.5 * delta))


def slope(e: np.ndarray, delta: float | None) -> np.ndarray:
    return e if delta is None else np.clip(e, -delta, delta)


@given(seeds, st.sampled_from([None, 1.0, 10.0]), st.sampled_from([None, 0.2, 3.0]))
def test_value_loss_and_gradient_agree_with_numpy(seed: int, delta: float | None, clip: float | None) -> None:
    v, old, target, mask = draw(seed)
    leaf = floats(v).requires_grad_()
    out = value_loss(leaf, floats(old), floats(target), torch.tensor(mask), clip=clip, huber_delta=delta)
    out.loss.backward()

    plain, grads = error_loss(v - target, delta), slope(v - target, delta)
    losses, n_clipped = plain, 0
    if clip is not None:
        near = old + np.clip(v - old, -clip, clip)
        other = error_loss(near - target, delta)
        losses = np.maximum(plain, other)
        grads = np.where(abs(v - old) < clip, grads, np.where(other > plain, 0.0, grads))
        n_clipped = ((other > plain) & (abs(v - old) > clip) & mask).sum()
    assert out.loss.item() == pytest.approx((losses * mask).sum(), rel=1e-5)
    np.testing.assert_allclose(leaf.grad.numpy(), grads * mask, rtol=1e-5, atol=1e-5)
    assert out.stats["clip_fraction"].item() == n_clipped


@given(seeds, st.integers(0, 40))
def test_sums_of_parts_are_the_sum_of_the_whole(seed: int, cut: int) -> None:
    v, old, target, mask = draw(seed)
    tensors = [*(floats(x) for x in (v, old, target)), torch.tensor(mask)]
    whole = value_loss(*tensors, clip=0.2, huber_delta=None)
    parts = [value_loss(*(t[s] for t in tensors), clip=0.2, huber_delta=None) for s in (slice(cut), slice(cut, None))]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-4, abs=1e-4)
    for name, value in whole.stats.items():
        assert sum(p.stats[name].item() for p in parts) == pytest.approx(value.item(), rel=1e-4, abs=1e-4)


def test_masked_rows_reach_neither_losses_nor_gradients() -> None:
    new, old, a, mask = draw(3)
    for x in (new, old, a):
        x[~mask] = math.nan
    for result, leaf in (
        (
            lambda x: value_loss(x, floats(old), floats(a), torch.tensor(mask), clip=0.2, huber_delta=1.0),
            floats(new),
        ),
        (lambda x: nll_loss(x, torch.tensor(mask)), floats(new)),
    ):
        leaf.requires_grad_()
        out = result(leaf)
        out.loss.backward()
        assert math.isfinite(out.loss.item())
        assert all(math.isfinite(v.item()) for v in out.stats.values())
        assert torch.equal(leaf.grad[~torch.tensor(mask)], torch.zeros(int((~mask).sum())))


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    lp = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    assert nll_loss(lp, torch.tensor([True, True])).loss.dtype == torch.float32
    assert pair_loss(lp).loss.dtype == torch.float32


def test_pair_loss_agrees_with_numpy() -> None:
    scores = np.random.default_rng(0).normal(0, 3, 20)
    leaf = floats(scores).requires_grad_()
    out = pair_loss(leaf)
    out.loss.backward()
    margin = scores[::2] - scores[1::2]
    assert out.loss.item() == pytest.approx(np.log1p(np.exp(-margin)).sum(), rel=1e-5)
    assert out.stats["accuracy"].item() == (margin > 0).sum()
    np.testing.assert_allclose(leaf.grad.numpy()[::2], -1 / (1 + np.exp(margin)), rtol=1e-5)
    np.testing.assert_allclose(leaf.grad.numpy()[1::2], 1 / (1 + np.exp(margin)), rtol=1e-5)


def test_a_tie_is_not_accurate() -> None:
    assert pair_loss(torch.tensor([1.0, 1.0])).stats["accuracy"].item() == 0.0

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.policy.gae import discounted_suffix_sums, gae
from tests.algo.batches import Packed, Sequence1, pack, sequences

factors = st.sampled_from([1.0, 0.99, 0.95, 0.5, 0.0])


def reference(s: Sequence1, gamma: float, gae_lambda: float) -> tuple[list[float], list[float]]:
    """The recursion, backwards, in python floats."""
    advantage, advantages, returns = 0.0, [], []
    v_next = s.values[-1] if s.truncated else 0.0
    for reward, value in zip(reversed(s.rewards), reversed(s.values[s.n_prompt - 1 : -1]), strict=True):
        advantage = reward + gamma * v_next - value + gamma * gae_lambda * advantage
        v_next = value
        advantages.append(advantage)
        returns.append(advantage + value)
    return advantages[::-1], returns[::-1]


def run(p: Packed, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    return gae(p.rewards, p.values, p.mask, p.cu_seqlens, p.truncated, gamma, gae_lambda)


@given(st.lists(sequences(), min_size=1, max_size=6), factors, factors)
def test_agrees_with_the_recursion(parts: list[Sequence1], gamma: float, gae_lambda: float) -> None:
    advantages, returns = run(pack(parts, junk=math.nan), gamma, gae_lambda)
    wanted_a: list[float] = []
    wanted_r: list[float] = []
    for s in parts:
        a, r = reference(s, gamma, gae_lambda)
        wanted_a += [0.0] * (s.n_prompt - 1) + a
        wanted_r += [0.0] * (s.n_prompt - 1) + r
    torch.testing.assert_close(advantages, torch.tensor(wanted_a), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, torch.tensor(wanted_r), rtol=1e-5, atol=1e-5)


@given(st.lists(sequences(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_packing_order_changes_no_bit(parts: list[Sequence1], random: object) -> None:
    order = list(range(len(parts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    lengths = [s.length - 1 for s in parts]
    straight = torch.split(run(pack(parts), 0.99, 0.95)[0], lengths)
    shuffled = torch.split(run(pack([parts[i] for i in order]), 0.99, 0.95)[0], [lengths[i] for i in order])
    for i, advantages in zip(order, shuffled, strict=True):
        assert torch.equal(advantages, straight[i])


def test_a_long_sequence_stays_accurate() -> None:
    n = 5000
    x = torch.linspace(-1, 1, n, dtype=torch.float64)
    y = discounted_suffix_sums(x, torch.arange(n - 1, -1, -1), 0.999)
    wanted, total = [], 0.0
    for value in reversed(x.tolist()):
        total = value + 0.999 * total
        wanted.append(total)
    torch.testing.assert_close(y, torch.tensor(wanted[::-1], dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("truncated", "wanted"), [(False, 1.0 - 5.0), (True, 1.0 + 0.9 * 7.0 - 5.0)])
def test_only_a_truncated_response_bootstraps(truncated: bool, wanted: float) -> None:
    p = pack([Sequence1(1, [1.0], [5.0, 7.0], truncated)])
    advantages, returns = run(p, 0.9, 1.0)
    assert advantages.tolist() == pytest.approx([wanted])
    assert returns.tolist() == pytest.approx([wanted + 5.0])


def test_tokens_between_two_responses_take_no_time() -> None:
    rewards = torch.tensor([1.0, math.nan, math.nan, 2.0])
    values = torch.tensor([0.5, math.nan, math.nan, 0.25, math.nan])
    mask = torch.tensor([True, False, False, True])
    advantages, _ = gae(rewards, values, mask, torch.tensor([0, 5]), torch.tensor([False]), 0.5, 1.0)
    second = 2.0 - 0.25
    first = 1.0 + 0.5 * 0.25 - 0.5 + 0.5 * second
    assert advantages.tolist() == pytest.approx([first, 0.0, 0.0, second])


def test_an_empty_batch_gives_empty_results() -> None:
    none = torch.empty(0)
    no_flags = torch.empty(0, dtype=torch.bool)
    advantages, returns = gae(none, none, no_flags, torch.zeros(1, dtype=torch.int32), no_flags, 1.0, 1.0)
    assert advantages.shape == returns.shape == (0,)
